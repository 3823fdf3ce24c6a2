"""`jetrl.train` from Python: callbacks after each step, and the best checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from tests.distributed.ranks import run_ranks
from tests.e2e.small import SMALL, task_of

import jetrl
from jetrl.errors import UserError
from jetrl.runs.directory import RunDirectory
from jetrl.session import RunResult
from jetrl.types import StepStats

WORDS = ["sft.steps=0", "sft.until=none", "train.lr=1e-3", "train.warmup_steps=0"]


def run(folder: Path, *words: str, callbacks: Any = (), resume: bool = False) -> RunResult:
    task = task_of(folder, "return float(sum(map(ord, completion)) % 5)")
    own = [*SMALL, *WORDS, f"task={task}", f"run.dir={folder}", "run.name=run", *words]
    return jetrl.train(jetrl.load_config("demo", own), resume=resume, callbacks=callbacks)


def test_callbacks_see_each_step_and_end_the_run(tmp_path: Path) -> None:
    seen: list[StepStats] = []

    def second(stats: StepStats) -> bool:
        return stats.step == 2

    result = run(tmp_path, "loop.steps=4", callbacks=[second, seen.append])
    assert [stats.step for stats in seen] == [1, 2]
    assert len(seen[0].samples) == 16
    lines = RunDirectory.open(result.run_path).metrics("rl")
    assert [line["reward/mean"] for line in lines] == [s.metrics["reward/mean"] for s in seen]
    assert (result.steps, result.stopped) == (2, "a callback ended the run after step 2")
    assert result.checkpoint_path is not None
    assert result.checkpoint_path.name == "step_000002"
    assert run(tmp_path, "loop.steps=4", resume=True).steps == 4


@pytest.mark.parametrize("callbacks", [[5], print, [None]])
def test_what_is_no_list_of_functions_is_refused(callbacks: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="callbacks: give a list of functions"):
        run(tmp_path, callbacks=callbacks)
    assert not (tmp_path / "run").exists()


def _stopped_by_rank_1(folder: str) -> int:
    from jetrl.distributed.world import world

    def rank_1(stats: StepStats) -> bool:
        return world().rank == 1

    return run(Path(folder), "loop.steps=3", callbacks=[rank_1]).steps


def test_a_callback_of_one_rank_ends_all(tmp_path: Path) -> None:
    assert run_ranks(2, _stopped_by_rank_1, str(tmp_path)) == [1, 1]


def test_the_best_checkpoint_is_kept_returned_and_exported(tmp_path: Path) -> None:
    """Without evaluations, the score is the training reward."""
    words = ["loop.steps=2", "checkpoint.every=1", "checkpoint.keep_last=1"]
    words += ["precision.preset=fp32", "run.seed=3"]  # exported without rounding
    result = run(tmp_path, *words, "checkpoint.keep_best=1", "checkpoint.export=best")
    rewards = [r["reward/mean"] for r in RunDirectory.open(result.run_path).metrics("rl")]
    best = max(range(2), key=lambda i: (rewards[i], i)) + 1
    assert result.best_path is not None
    assert result.best_path.name == f"step_{best:06d}"
    assert best == 1, "else the last one would be exported anyway: choose another seed"
    assert result.model_path is not None
    exported = load_file(result.model_path / "model.safetensors")["model.norm.weight"]
    masters = load_file(result.best_path / "masters.safetensors")
    last = load_file(result.checkpoint_path / "masters.safetensors")
    (name,) = (name for name in masters if name in ("norm.weight", "final_norm.weight"))
    assert (exported == masters[name]).all()
    assert (exported != last[name]).any()


def test_a_best_model_needs_a_kept_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs checkpoint\.keep_best of at least 1"):
        run(tmp_path, "checkpoint.export=best")
