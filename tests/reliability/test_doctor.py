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
from jetrl.runs import RunDirectory
from jetrl.runs.attempts import StatusFile


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    return copy


def doctor(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = jetrl(["doctor", str(path)])
    return code, re.sub(" {2,}", "  ", capsys.readouterr().out)  # columns


def test_the_rank_that_ended_a_run_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    _, text = doctor(run, capsys)
    assert "rank 1 is gone (process 12)" in text
    assert "OK  rank 1  in update of step 3; 306 collectives begun, the fewest: others wait" in text
    assert "OK  rank 0  in update of step 3; 310 collectives begun; process 11" in text
    assert "collectives_rank_0.json, nccl_timeout_rank_0\n" in text
    board.write_text(json.dumps({**record, "time": 1.0, "ranks": ranks}))
    assert "collectives begun" not in doctor(run, capsys)[1]
    board.write_text("[" * 100_000)
    assert "board.json: " in doctor(run, capsys)[1]


def without_end(run: Path) -> None:
    lines = (run / "attempts.jsonl").read_text().splitlines()
    (run / "attempts.jsonl").write_text(lines[0] + "\n")


def ended(run: Path, state: str, reason: str) -> None:
    without_end(run)
    end = {"event": "end", "time": time.time(), "state": state, "reason": reason}
    with open(run / "attempts.jsonl", "a") as file:
        file.write(json.dumps(end) + "\n")


def in_phase(run: Path, phase: str, step: int) -> None:
    file = StatusFile(run)
    file.begin(phase, step)
    file.close()


def test_a_finished_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = doctor(run, capsys)
    assert code == 0, text
    assert "OK  end  finished" in text
    assert "3 of 3 steps" in text
    assert "whole: 2, 3" in text
    assert "to continue" not in text


def test_a_killed_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without_end(run)
    in_phase(run, "update", 3)
    shutil.rmtree(run / "checkpoints" / "step_000003")
    code, text = doctor(run, capsys)
    assert code == 1
    assert "FAIL  end  killed in update of step 3, which began" in text
    assert "whole: 2; a resume repeats 1 step" in text
    assert f"to continue  jetrl train {run}/config.toml --resume" in text
    assert "out-of-memory killer" in text


def test_a_killed_training_of_a_reward_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without_end(run)
    file = run / "attempts.jsonl"
    start = json.loads(file.read_text().splitlines()[0])
    start["command"] = "/bin/jetrl sft demo --task reward --out x"
    file.write_text(json.dumps(start) + "\n")
    _, text = doctor(run, capsys)
    assert f"to continue  jetrl sft {run}/config.toml --task reward --resume" in text
    assert "of 3 steps" not in text


def test_the_command_that_it_names_goes_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints" / "step_000003")
    without_end(run)
    _, text = doctor(run, capsys)
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
    state: str, reason: str, level: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_phase(run, "rollout", 3)
    ended(run, state, reason)
    code, text = doctor(run, capsys)
    assert code == (1 if level == "FAIL" else 0)
    assert f"{level}  end  {state} after" in text
    assert "in rollout of step 3, which began" in text
    assert f": {reason}; attempt 1" in text
    assert ("log.txt has the traceback" in text) == (level == "FAIL")


def test_damaged_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "checkpoints" / "step_000003" / "masters.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    code, text = doctor(run, capsys)
    assert code == 1
    assert "FAIL  checkpoint 3" in text
    assert "bytes instead of" in text
    assert "whole: 2; a resume repeats 1 step" in text


@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_a_run_whose_checkpoints_are_gone_is_not_forgotten(
    state: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run whose checkpoints were deleted, or not copied, keeps every step's line and rollouts.

    A resume does not write over them.
    """
    ended(run, state, "")
    shutil.rmtree(run / "checkpoints")
    every = 100 if state == "finished" else 1
    text = (run / "config.toml").read_text().replace("every = 2", f"every = {every}")
    (run / "config.toml").write_text(text)
    before = (run / "metrics.jsonl").read_bytes()
    words = ["train", "demo", f"run.dir={run.parent}", "run.name=run", "--resume"]
    assert jetrl([*words, "checkpoint.every=50"]) == 2
    assert "where there has been one: put it back" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == before
    assert len(list((run / "rollouts").iterdir())) == 3
    code, text = doctor(run, capsys)
    assert code == 1
    assert "FAIL  checkpoints  none left, although some were written" in text


def test_a_hang_and_odd_numbers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "hang.txt").write_text(
        "==== 2026-01-01 00:00:00 +0000  hang in reward of step 3: no sign of life for 301.0 s\n"
        'Thread 0x1 (most recent call first):\n  File "w.py", line 3 in wait\n\n'
        'Thread 0x2 (most recent call first):\n  File "mine.py", line 9 in score\n'
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[-1] |= {"reward/failures": 4, "mismatch/num_different": 2, "policy/skipped_updates": 1}
    lines[-1] |= {"critic/skipped_updates": 2, "reward_model/skipped_updates": 3}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, text = doctor(run, capsys)
    assert code == 1
    assert f"to run it again: jetrl replay {run}" in text
    assert "hang in reward of step 3: no sign of life for 301.0 s" in text
    assert "the main thread was in score (mine.py, line 9)" in text
    assert "2 tokens differ between sampler and trainer" in text
    assert "4 completions could not be judged" in text
    assert "1 updates were not finite and were skipped" in text
    assert "2 updates of the critic were not finite and were skipped" in text
    assert "3 updates of the reward model were not finite and were skipped" in text


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert jetrl(["doctor", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err


def test_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert jetrl(["doctor", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"status": "OK", "name": "checkpoints"}.items() <= found[2].items()


DAMAGE = {
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "flipped": lambda p: p.write_bytes(p.read_bytes()[:-1] + bytes([p.read_bytes()[-1] ^ 1])),
    "empty": lambda p: p.write_bytes(b""),
    "gone": lambda p: p.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    "file", ["masters.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
def test_a_resume_skips_a_damaged_checkpoint_and_ends_with_the_same_bits(
    file: str,
    damage: str,
    finished: Path,
    run: Path,
    same: Callable,
    capsys: pytest.CaptureFixture[str],
) -> None:
    DAMAGE[damage](run / "checkpoints" / "step_000003" / file)
    assert jetrl(["train", str(run / "config.toml"), f"run.dir={run.parent}", "--resume"]) == 0
    text = capsys.readouterr().out
    assert "step_000003 is damaged" in text
    assert "resumed after step 2" in text
    assert same(run, finished)
