"""`jetrl doctor RUN`: what it says of runs that ended in every way."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jetrl.cli.main import main as jetrl
from jetrl.runs.attempts import StatusFile
from jetrl.runs.directory import RunDirectory
from jetrl.training import checkpoint_files

Said = Callable[[], tuple[int, str]]


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def doctor(run: Path, capsys: pytest.CaptureFixture[str]) -> Said:
    def said() -> tuple[int, str]:
        capsys.readouterr()
        code = jetrl(["doctor", str(run)])
        return code, re.sub(" {2,}", "  ", capsys.readouterr().out)  # columns

    return said


def ended(run: Path, state: str = "", reason: str = "", phase: str = "", step: int = 0) -> None:
    """Let a run have ended in another way; with no state it was killed."""
    lines = (run / "attempts.jsonl").read_text().splitlines()[:1]
    if state:
        end = {"event": "end", "time": time.time(), "state": state, "reason": reason}
        lines.append(json.dumps(end))
    (run / "attempts.jsonl").write_text("\n".join(lines) + "\n")
    if phase:
        file = StatusFile(run)
        file.begin(phase, step)
        file.close()


def test_the_rank_that_ended_a_run_is_named(run: Path, doctor: Said) -> None:
    """The rank that had begun the fewest collectives is the one that the others waited for."""
    ended(run, "stopped", "rank 1 is gone")
    places = {"node": "a", "left": False, "place": "in update of step 3"}
    ranks = [
        {"rank": 0, "pid": 11, "collectives": 310, **places},
        {"rank": 1, "pid": 12, "collectives": 306, **places},
    ]
    record = {"time": time.time(), "rank": 1, "words": "rank 1 is gone (process 12)"}
    (run / "ranks").mkdir()
    board = run / "ranks" / "board.json"
    board.write_text(json.dumps({**record, "ranks": ranks}))
    for name in ("collectives_rank_0.json", "nccl_timeout_rank_0", "rank_1.txt"):
        (run / "ranks" / name).touch()
    _, text = doctor()
    assert "rank 1 is gone (process 12)" in text
    assert "OK  rank 1  in update of step 3; 306 collectives begun, the fewest: others wait" in text
    assert "OK  rank 0  in update of step 3; 310 collectives begun; process 11" in text
    assert "collectives_rank_0.json, nccl_timeout_rank_0\n" in text
    board.write_text(json.dumps({**record, "time": 1.0, "ranks": ranks}))
    assert "collectives begun" not in doctor()[1]
    board.write_text("[" * 100_000)
    assert "board.json: " in doctor()[1]


def test_a_finished_run(run: Path, doctor: Said, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = doctor()
    assert code == 0, text
    assert "OK  end  finished" in text
    assert "3 of 3 steps" in text
    assert "intact: 2, 3" in text
    assert "to continue" not in text
    assert jetrl(["doctor", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"status": "OK", "name": "checkpoints"}.items() <= found[2].items()
    assert jetrl(["doctor", str(run.parent)]) == 2
    assert "not a run directory" in capsys.readouterr().err


def test_steps_that_a_run_takes_meanwhile_are_not_counted(
    run: Path, doctor: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(run / "checkpoints" / "step_000003")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])

    def slow(path: Path) -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(last | {"step": last["step"] + 19}) + "\n")

    monkeypatch.setattr(checkpoint_files, "check_intact", slow)
    assert "intact: 2; a resume repeats 1 step" in doctor()[1]


def test_a_killed_run_and_the_command_that_continues_it(run: Path, doctor: Said) -> None:
    ended(run, phase="update", step=3)
    shutil.rmtree(run / "checkpoints" / "step_000003")
    code, text = doctor()
    assert code == 1
    assert "FAIL  end  killed in update of step 3, which began" in text
    assert "intact: 2; a resume repeats 1 step" in text
    assert f"to continue  jetrl train {run}/config.toml --resume" in text
    assert "out-of-memory killer" in text
    words = text.split("to continue  jetrl ")[1].splitlines()[0].split()
    # The copy's settings name the folder that it was copied from.
    assert jetrl([*words, f"run.dir={run.parent}"]) == 0
    assert RunDirectory.open(run).state() == "finished"


@pytest.mark.parametrize(
    "state, reason, level",
    [
        ("stopped", "step 3: 4 of 92 log-probs differ", "WARN"),
        ("interrupted", "SIGTERM", "WARN"),
        ("failed", "RuntimeError: an odd thing", "FAIL"),
    ],
)
def test_a_run_that_said_how_it_ended(
    state: str, reason: str, level: str, run: Path, doctor: Said
) -> None:
    ended(run, state, reason, "rollout", 3)
    code, text = doctor()
    assert code == (1 if level == "FAIL" else 0)
    assert f"{level}  end  {state} after" in text
    assert "in rollout of step 3, which began" in text
    assert f": {reason}; attempt 1" in text
    assert ("log.txt has the traceback" in text) == (level == "FAIL")


def test_a_run_whose_checkpoints_are_gone_is_not_forgotten(
    run: Path, doctor: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume does not write over the lines and rollouts of its steps."""
    ended(run, "interrupted")
    shutil.rmtree(run / "checkpoints")
    before = (run / "metrics.jsonl").read_bytes()
    words = ["train", "demo", f"run.dir={run.parent}", "run.name=run", "--resume"]
    assert jetrl([*words, "checkpoint.every=50"]) == 2
    assert "but the run had one: restore it" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == before
    assert len(list((run / "rollouts").iterdir())) == 3
    code, text = doctor()
    assert code == 1
    assert "FAIL  checkpoints  all were deleted" in text


def test_a_hang_and_odd_numbers(run: Path, doctor: Said) -> None:
    (run / "hang.txt").write_text(
        "==== 2026-01-01 00:00:00 +0000  hang in reward of step 3: no sign of life for 301.0 s\n"
        'Thread 0x1 (most recent call first):\n  File "w.py", line 3 in wait\n\n'
        'Thread 0x2 (most recent call first):\n  File "mine.py", line 9 in score\n'
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[-1] |= {"reward/failures": 4, "mismatch/num_different": 2, "policy/skipped_updates": 1}
    lines[-1] |= {"critic/skipped_updates": 2, "reward_model/skipped_updates": 3}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, text = doctor()
    assert code == 1
    for words in (
        f"to run it again: jetrl replay {run}",
        "hang in reward of step 3: no sign of life for 301.0 s",
        "the main thread was in score (mine.py, line 9)",
        "2 tokens differ between sampler and trainer",
        "4 completions could not be scored",
        "1 updates were not finite and were skipped",
        "2 updates of the critic were not finite and were skipped",
        "3 updates of the reward model were not finite and were skipped",
    ):
        assert words in text


def test_a_resume_puts_a_checkpoint_back_that_was_being_replaced(
    run: Path, finished: Path, same: Callable[[Path, Path], bool]
) -> None:
    for path in [*(run / "checkpoints").iterdir()]:
        path.rename(path.with_name(f".replaced-{path.name}"))
    assert jetrl(["train", str(run / "config.toml"), "--resume"]) == 0
    assert same(run, finished)


DAMAGE = {
    "masters.safetensors": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "optimizer.safetensors": lambda p: p.write_bytes(
        p.read_bytes()[:-1] + bytes([p.read_bytes()[-1] ^ 1])
    ),
    "state.json": lambda p: p.write_bytes(b""),
    "manifest.json": lambda p: p.unlink(),
}


@pytest.mark.parametrize("file", DAMAGE)
def test_a_resume_skips_a_damaged_checkpoint_and_ends_with_the_same_bits(
    file: str,
    finished: Path,
    run: Path,
    doctor: Said,
    same: Callable[[Path, Path], bool],
    capsys: pytest.CaptureFixture[str],
) -> None:
    DAMAGE[file](run / "checkpoints" / "step_000003" / file)
    code, text = doctor()
    assert code == 1
    assert "FAIL  checkpoint 3" in text
    assert "intact: 2; a resume repeats 1 step" in text
    assert jetrl(["train", str(run / "config.toml"), f"run.dir={run.parent}", "--resume"]) == 0
    text = capsys.readouterr().out
    assert "step_000003 is damaged" in text
    assert "resumed after step 2" in text
    assert same(run, finished)
