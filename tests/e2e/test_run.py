"""Whole runs on the CPU: they learn, they stay exact, they resume with the bits of an uncut run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jetrl import Policy, load_config, train
from jetrl.errors import MismatchError, RunStopped, StorageError, UserError
from jetrl.precision import PrecisionPlan
from jetrl.runs import RunDirectory, reproducible

TINY = [
    "sft.steps=3",
    "sft.examples_per_step=8",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=6",
    "eval.prompts=8",
    "eval.every=2",
    "eval.max_tokens=6",
    "train.updates_per_step=1",
    "train.warmup_steps=0",
    "train.schedule=constant",
    "checkpoint.every=2",
    "report.enabled=false",
    "model.config.num_hidden_layers=1",
    "model.config.max_position_embeddings=64",
]


TASK = """
from jetrl.tasks import Task
from jetrl.types import Prompt

class Sum(Task):
    alphabet = "0123456789+="

    def prompts(self, split):
        return [Prompt(id=str(i), text=f"{i}+{i}=", answer=str(2 * i)) for i in range(20)]

    def score(self, prompt, completion):
        BODY

    def self_test(self):
        return []  # the broken score is to be met in the middle of a run
"""


def settings(path: Path, *overrides: str, name: str = "run") -> Any:
    return load_config("demo", [*TINY, f"run.dir={path}", f"run.name={name}", *overrides])


def metrics(path: Path) -> list[dict[str, float]]:
    return [{"step": r["step"], **reproducible(r)} for r in RunDirectory.open(path).metrics()]


def masters(path: Path) -> bytes:
    return (path / "masters.safetensors").read_bytes()


def test_a_run_leaves_what_it_promises(tmp_path: Path) -> None:
    result = train(settings(tmp_path, "loop.steps=3", "report.enabled=true"))
    assert result.steps == 3
    run = result.run_path
    rl = RunDirectory.open(run).metrics("rl")
    assert [r["step"] for r in rl] == [0, 1, 2, 3]
    assert all(r["mismatch/num_different"] == 0 for r in rl[1:])
    assert all(r["mismatch/num_tokens"] >= 16 for r in rl[1:])
    assert [r["step"] for r in rl if "eval/arithmetic/mean" in r] == [0, 2, 3]
    for name in ("config.toml", "plan.json", "log.txt", "report.html", "model/config.json"):
        assert (run / name).is_file(), name
    assert len((run / "rollouts" / "step_000002.jsonl").read_text().splitlines()) == 16
    assert result.checkpoint_path == run / "checkpoints" / "step_000003"
    assert load_config(run / "config.toml").loop.steps == 3
    model = Policy.from_pretrained(result.model_path, PrecisionPlan.preset("unified"))
    assert model.tokenizer.decode(model.tokenizer.encode("12+34=")) == "12+34="


def test_a_repeated_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    results = [train(settings(tmp_path, "loop.steps=2", name=name)) for name in ("a", "b")]
    assert metrics(results[0].run_path) == metrics(results[1].run_path)
    assert masters(results[0].checkpoint_path) == masters(results[1].checkpoint_path)


@pytest.mark.parametrize("seed", range(3))
def test_the_draws_of_an_ordinary_run_are_the_policys(seed: int, tmp_path: Path) -> None:
    given = ["loop.steps=6", "sft.steps=40", "eval.every=0", "rollout.prompts_per_step=16"]
    run = train(settings(tmp_path, *given, f"run.seed={seed}", "checkpoint.every=0")).run_path
    z = [line["sampling/surprise_z"] for line in RunDirectory.open(run).metrics("rl")[-6:]]
    assert max(map(abs, z)) < 5
    assert len(set(z)) == 6


@pytest.mark.parametrize("where", ["rollout", "reward", "update", "record", "before checkpoint"])
def test_cut_and_resumed_equals_uncut(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [
        "loop.steps=5",
        "train.updates_per_step=2",
        "train.schedule=linear",
        "train.warmup_steps=2",
    ]
    uncut = train(settings(tmp_path, *overrides, name="uncut"))
    import jetrl.session as module

    class CutError(Exception):
        pass

    def cut_at_step_4(original: Any, step_of: Any) -> Any:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            if step_of(self, args) == 4:
                raise CutError
            return original(self, *args, **kwargs)

        return wrapped

    method, step_of = {
        "rollout": ("sample", lambda self, args: args[0].number),
        "reward": ("score", lambda self, args: args[0].number),
        "update": ("update", lambda self, args: args[0].number),
        "record": ("record", lambda self, args: args[0].number),
        "before checkpoint": ("_save_checkpoint", lambda self, args: args[0].number),
    }[where]
    with monkeypatch.context() as patch:
        original = getattr(module.Session, method)
        patch.setattr(module.Session, method, cut_at_step_4(original, step_of))
        with pytest.raises(CutError):
            train(settings(tmp_path, *overrides, name="cut"))
    resumed = train(settings(tmp_path, *overrides, name="cut"), resume=True)
    assert metrics(resumed.run_path) == metrics(uncut.run_path)
    assert masters(resumed.checkpoint_path) == masters(uncut.checkpoint_path)


def test_cut_before_the_first_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uncut = train(settings(tmp_path, "loop.steps=1", name="uncut"))
    import jetrl.session as module

    def fail(*_: Any) -> None:
        raise RuntimeError("cut during the warm-up")

    with monkeypatch.context() as patch:
        patch.setattr(module.Session, "evaluate_start", fail)
        with pytest.raises(RuntimeError, match="warm-up"):
            train(settings(tmp_path, "loop.steps=1", name="cut"))
    resumed = train(settings(tmp_path, "loop.steps=1", name="cut"), resume=True)
    assert metrics(resumed.run_path) == metrics(uncut.run_path)


def test_cut_in_the_warm_up_and_resumed_equals_uncut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["sft.steps=7", "sft.until=2.0", "sft.check_every=2", "loop.steps=1"]
    uncut = train(settings(tmp_path, *overrides, name="uncut"))
    from jetrl.training import SftTrainer

    updates = SftTrainer.step

    def cut_at_update_6(self: SftTrainer, examples: Any) -> dict[str, float]:
        if self.optimizer.num_updates == 5:
            raise RuntimeError("cut during the warm-up")
        return updates(self, examples)

    with monkeypatch.context() as patch:
        patch.setattr(SftTrainer, "step", cut_at_update_6)
        with pytest.raises(RuntimeError, match="warm-up"):
            train(settings(tmp_path, *overrides, name="cut"))
    saved = tmp_path / "cut" / "checkpoints" / "sft"
    assert sorted(path.name for path in saved.iterdir()) == ["step_000002", "step_000004"]
    capsys.readouterr()
    resumed = train(settings(tmp_path, *overrides, name="cut"), resume=True)
    assert "resumed after supervised update 4" in capsys.readouterr().out
    assert metrics(resumed.run_path) == metrics(uncut.run_path)
    assert masters(resumed.checkpoint_path) == masters(uncut.checkpoint_path)
    assert not saved.exists(), "the warm-up is over"


def test_a_checkpoint_that_cannot_be_written_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread writes, so the lines of the step are whole, and the run can be resumed."""
    uncut = train(settings(tmp_path, "loop.steps=5", name="uncut"))
    import jetrl.training.checkpoint_files as module

    write = module.write_tensors

    def full_disk(path: Path, tensors: Any) -> Any:
        if "step_000004" in str(path):
            raise OSError(28, "No space left on device")
        return write(path, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_tensors", full_disk)
        with pytest.raises(StorageError, match=r"step_000004 could not be written: No space left"):
            train(settings(tmp_path, "loop.steps=5", name="full"))
    assert RunDirectory.open(tmp_path / "full").state() == "stopped"
    resumed = train(settings(tmp_path, "loop.steps=5", name="full"), resume=True)
    assert metrics(resumed.run_path) == metrics(uncut.run_path)
    assert masters(resumed.checkpoint_path) == masters(uncut.checkpoint_path)


def test_a_resume_with_nothing_left_to_do_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train(settings(tmp_path, "loop.steps=2", name="run"))
    capsys.readouterr()
    again = train(settings(tmp_path, "loop.steps=2", name="run"), resume=True)
    assert "all steps of loop.steps=2 are done" in capsys.readouterr().out
    assert masters(again.checkpoint_path) == masters(first.checkpoint_path)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uncut = train(settings(tmp_path, "loop.steps=6", name="uncut"))
    first = train(settings(tmp_path, "loop.steps=6", "loop.steps=4", name="cut"))
    damaged = first.checkpoint_path / "masters.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-7])
    capsys.readouterr()
    resumed = train(settings(tmp_path, "loop.steps=6", name="cut"), resume=True)
    printed = capsys.readouterr().out
    assert "step_000004 is damaged" in printed
    assert "resumed after step 2" in printed
    assert metrics(resumed.run_path)[-1] == metrics(uncut.run_path)[-1]


def test_ctrl_c_finishes_the_step_and_leaves_a_report(tmp_path: Path, wait_until: Callable) -> None:
    overrides = [*TINY, f"run.dir={tmp_path}", "run.name=stop", "loop.steps=10000"]
    command = [sys.executable, "-m", "jetrl.cli.main", "train", "demo", *overrides]
    command.append("report.enabled=true")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = tmp_path / "stop" / "metrics.jsonl"

    def has_ended_a_step() -> bool:
        return log.exists() and "reward/mean" in log.read_text()

    wait_until(lambda: process.poll() is not None or has_ended_a_step())
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130, output
    run = RunDirectory.open(tmp_path / "stop")
    last = run.metrics()[-1]["step"]
    assert run.state() == "interrupted"
    assert (run.path / "report.html").is_file()
    assert (run.checkpoints_dir / f"step_{last:06d}" / "manifest.json").is_file()


def test_a_step_that_is_not_exact_stops_the_run_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jetrl.rollout.paged_attention as module

    attend = module.PagedKeyValues.attend
    monkeypatch.setattr(module.PagedKeyValues, "attend", lambda *a: attend(*a) * (1 + 2.0**-7))
    with pytest.raises(MismatchError, match=r"log-probs differ.*layers\.0\.attention"):
        train(settings(tmp_path, "loop.steps=2", "eval.every=0"))
    assert RunDirectory.open(tmp_path / "run").state() == "stopped"


def test_mixed_runs_on_and_shows_its_gap(tmp_path: Path) -> None:
    result = train(settings(tmp_path, "loop.steps=2", "precision.preset=mixed"))
    rl = RunDirectory.open(result.run_path).metrics("rl")[1:]
    assert all(r["mismatch/num_different"] > 0 for r in rl)


def test_a_name_in_use_is_refused(tmp_path: Path) -> None:
    train(settings(tmp_path, "loop.steps=0", "sft.steps=0", "eval.every=0"))
    with pytest.raises(UserError, match=r"'run' is in use.*--resume"):
        train(settings(tmp_path, "loop.steps=1"))


def test_kl_to_a_reference_is_zero_at_first_and_survives_a_resume(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TASK.replace("BODY", "return float(len(completion) % 3)"))
    overrides = ["algorithm.kl=0.05", "train.lr=1e-2", f"task={file}:Sum", "sft.steps=0"]
    uncut = train(settings(tmp_path, *overrides, "loop.steps=3", name="uncut"))
    kl = [r["policy/kl_ref"] for r in RunDirectory.open(uncut.run_path).metrics("rl")[1:]]
    assert kl[0] == 0
    assert kl[1] > 0
    train(settings(tmp_path, *overrides, "loop.steps=2", name="cut"))
    resumed = train(settings(tmp_path, *overrides, "loop.steps=3", name="cut"), resume=True)
    assert metrics(resumed.run_path)[-1]["policy/kl_ref"] == kl[2]


def test_kl_that_a_resumed_run_turns_on_after_a_warm_up_is_refused(tmp_path: Path) -> None:
    """The policy as the warm-up left it is not there any more, and the initial one is another."""
    words = ["sft.steps=1", "eval.every=0"]
    train(settings(tmp_path, *words, "loop.steps=1"))
    with pytest.raises(UserError, match=r"as the warm-up left it.*set reference\.path"):
        train(settings(tmp_path, *words, "loop.steps=2", "algorithm.kl=0.1"), resume=True)
    assert train(settings(tmp_path, *words, "loop.steps=2"), resume=True).steps == 2


@pytest.mark.parametrize(
    "body,message",
    [("raise KeyError('lost')", "KeyError"), ("return 'good'", "not a number|number")],
    ids=["raises", "returns a word"],
)
def test_a_task_that_never_judges_stops_the_run(body: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TASK.replace("BODY", body))
    with pytest.raises(RunStopped, match=message):
        train(settings(tmp_path, f"task={file}:Sum", "sft.steps=0", "loop.steps=1", "eval.every=0"))


def test_a_prompt_longer_than_the_context_is_named(tmp_path: Path) -> None:
    overrides = ["model.config.max_position_embeddings=7", "rollout.max_tokens=2"]
    file = tmp_path / "mine.py"
    file.write_text(TASK.replace("BODY", "return 0.0").replace('"{i}+', '"{i:09d}+'))
    with pytest.raises(UserError, match=r"prompt '0' has 1\d tokens.*context of 7"):
        train(settings(tmp_path, *overrides, f"task={file}:Sum", "eval.max_tokens=2"))
    assert not (tmp_path / "run").exists(), "nothing was begun"


def test_report_lists_the_samples(tmp_path: Path) -> None:
    result = train(settings(tmp_path, "loop.steps=1", "report.enabled=true"))
    page = result.report_path.read_text()
    first = json.loads((result.run_path / "rollouts/step_000001.jsonl").read_text().split("\n")[0])
    assert (
        first["prompt"]["text"] in page
        if isinstance(first["prompt"], dict)
        else "arithmetic" in page
    )
