"""Whole runs on the CPU: they stay exact, and resume with the bits of an uncut run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from tests.e2e.small import SMALL, before_call, cut, demo, metrics, task_of

from jetrl import Policy, load_config, train
from jetrl.errors import MismatchError, RunStopped, UserError
from jetrl.precision import PrecisionPlan
from jetrl.runs.directory import RunDirectory
from jetrl.session import RunResult, Session
from jetrl.session.training_run import TrainingRun
from jetrl.training.sft import SftTrainer

TINY = [
    *SMALL,
    "sft.steps=7",
    "sft.until=2.0",
    "sft.check_every=2",
    "eval.prompts=4",
    "eval.every=2",
    "eval.max_tokens=6",
    "train.updates_per_step=2",
    "train.warmup_steps=2",
    "train.schedule=linear",
    "loop.steps=4",
]
NO_WARM_UP = ["sft.steps=0", "loop.steps=1", "eval.every=0"]
settings = partial(demo, TINY)


def masters(path: Path | None) -> bytes:
    assert path is not None
    return (path / "masters.safetensors").read_bytes()


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train(settings(tmp_path_factory.mktemp("runs"), "report.enabled=true"))


def is_as_uncut(result: RunResult, uncut: RunResult) -> bool:
    return metrics(result.run_path) == metrics(uncut.run_path) and masters(
        result.checkpoint_path
    ) == masters(uncut.checkpoint_path)


def test_a_run_leaves_what_it_promises(uncut: RunResult) -> None:
    assert (uncut.steps, uncut.chats) == (4, False)
    run = uncut.run_path
    rl = RunDirectory.open(run).metrics("rl")
    assert [r["step"] for r in rl] == [0, 1, 2, 3, 4]
    assert all(r["mismatch/num_different"] == 0 for r in rl[1:])
    z = [line["sampling/surprise_z"] for line in rl[1:]]
    assert max(map(abs, z)) < 5, "draws are the policy's"
    assert len(set(z)) == 4
    for name in ("config.toml", "plan.json", "log.txt", "report.html", "model/config.json"):
        assert (run / name).is_file(), name
    rollouts = (run / "rollouts" / "step_000004.jsonl").read_text().splitlines()
    assert len(rollouts) == 16
    page = (run / "report.html").read_text()
    assert any(json.loads(line)["prompt"] in page for line in rollouts)
    assert uncut.checkpoint_path == run / "checkpoints" / "step_000004"
    assert load_config(run / "config.toml").loop.steps == 4
    assert uncut.model_path is not None
    model = Policy.from_pretrained(uncut.model_path, PrecisionPlan.preset("unified"))
    assert model.tokenizer is not None
    assert model.tokenizer.decode(model.tokenizer.encode("12+34=")) == "12+34="


@pytest.mark.parametrize(
    ("owner", "method", "call"),
    [
        (SftTrainer, "step", 6),
        (Session, "evaluate_start", 1),
        (Session, "sample", 3),
        (Session, "update", 3),
        (TrainingRun, "save", 3),
    ],
    ids=["warm-up", "before the first checkpoint", "rollout", "update", "before a checkpoint"],
)
def test_cut_and_resumed_equals_uncut(
    owner: type,
    method: str,
    call: int,
    uncut: RunResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        before_call(owner, method, call, cut, patch.setattr)
        with pytest.raises(RuntimeError, match="cut"):
            train(settings(tmp_path))
    saved = tmp_path / "run" / "checkpoints" / "sft"
    if owner is SftTrainer:
        assert sorted(path.name for path in saved.iterdir()) == ["step_000002", "step_000004"]
    capsys.readouterr()
    resumed = train(settings(tmp_path), resume=True)
    assert "resumed after supervised update 4" in capsys.readouterr().out or owner is not SftTrainer
    assert is_as_uncut(resumed, uncut)
    assert not saved.exists(), "the warm-up is over"


def test_what_a_run_cannot_go_on_with_is_refused(
    uncut: RunResult, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = uncut.run_path.parent
    assert is_as_uncut(train(settings(runs, "sft.lr=1"), resume=True), uncut)
    said = capsys.readouterr().out
    assert "Nothing to do: all 4 steps are done. To train longer, raise loop.steps." in said
    assert "changes to [sft] have no effect" in said
    with pytest.raises(UserError, match=r"'run' is in use.*--resume"):
        train(settings(runs))
    # The policy as the warm-up left it is not there any more.
    with pytest.raises(UserError, match=r"as the warm-up left it.*set reference\.path"):
        train(settings(runs, "loop.steps=5", "algorithm.kl=0.1"), resume=True)


def test_a_step_that_is_not_exact_stops_the_run_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jetrl.rollout.kv_cache as module

    attend = module.PagedKeyValues.attend
    monkeypatch.setattr(module.PagedKeyValues, "attend", lambda *a: attend(*a) * (1 + 2.0**-7))
    with pytest.raises(MismatchError, match=r"log-probs differ.*layers\.0\.attention"):
        train(settings(tmp_path, *NO_WARM_UP))
    assert RunDirectory.open(tmp_path / "run").state() == "stopped"


def test_kl_to_a_reference_is_zero_at_first_and_survives_a_resume(tmp_path: Path) -> None:
    own = ["task=" + task_of(tmp_path, "return float(len(completion) % 3)"), "algorithm.kl=0.05"]
    own += [*NO_WARM_UP, "train.lr=1e-2", "train.updates_per_step=1", "train.schedule=constant"]
    own += ["train.warmup_steps=0", "checkpoint.every=1"]
    whole = train(settings(tmp_path, *own, "loop.steps=2", name="uncut"))
    kl = [r["policy/kl_ref"] for r in RunDirectory.open(whole.run_path).metrics("rl")[-2:]]
    assert kl[0] == 0
    assert kl[1] > 0
    train(settings(tmp_path, *own, "loop.steps=1"))
    resumed = train(settings(tmp_path, *own, "loop.steps=2"), resume=True)
    assert metrics(resumed.run_path)[-1]["policy/kl_ref"] == kl[1]


@pytest.mark.parametrize(
    "body,message",
    [("raise KeyError('lost')", "KeyError"), ("return 'good'", "not a number|number")],
    ids=["raises", "returns a word"],
)
def test_a_task_that_never_judges_stops_the_run(body: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match=message):
        train(settings(tmp_path, *NO_WARM_UP, "task=" + task_of(tmp_path, body)))
