"""Runs with rollout.oversample: completions cross steps, stay exact where they can be, resume."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.runs import results
from tests.e2e.small import SMALL, demo, without_last_checkpoint

from jetrl import train
from jetrl.runs.directory import RunDirectory
from jetrl.session import RunResult

# max_batch_size: the last prompts begin late, and are cut off.
ROLLOUT = "prompts_per_step=3 max_tokens=10 max_batch_size=9 oversample=1.0"
TRAIN = "warmup_steps=0 schedule=constant lr=1e-3"
TINY = [*SMALL, "sft.steps=0", "loop.steps=4"]
TINY += [*(f"rollout.{x}" for x in ROLLOUT.split()), *(f"train.{x}" for x in TRAIN.split())]
settings = partial(demo, TINY)


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train(settings(tmp_path_factory.mktemp("runs")))


def test_completions_cross_steps_and_the_new_tokens_are_exact(uncut: RunResult) -> None:
    run = RunDirectory.open(uncut.run_path)
    steps = run.metrics("rl")
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    assert all(r["mismatch/num_different"] == 0 for r in steps)
    assert sum(r["partial_rollout/unfinished"] > 0 for r in steps) >= 3
    assert sum(r.get("partial_rollout/earlier_tokens", 0.0) > 0 for r in steps) >= 2
    mixed = 0
    for step in run.rollout_steps():
        records = run.rollouts(step)
        assert len(records) == 12
        assert all(r["finish_reason"] in ("stop", "length") for r in records)
        for record in records:
            versions = record.get("versions", [])
            assert len(versions) in (0, len(record["token_ids"]))
            assert versions == sorted(versions)
            assert all(1 <= version <= step for version in versions)
            mixed += len(set(versions)) > 1
    assert mixed, "a completion of two policies"


def test_cut_and_resumed_equals_uncut(uncut: RunResult, tmp_path: Path) -> None:
    without_last_checkpoint(uncut.run_path, tmp_path / "cut")
    resumed = train(settings(tmp_path, name="cut"), resume=True)
    assert results(resumed.run_path) == results(uncut.run_path)
    left, right = (r.checkpoint_path / "masters.safetensors" for r in (resumed, uncut))
    assert left.read_bytes() == right.read_bytes()


def test_turned_on_and_off_where_a_run_goes_on(tmp_path: Path) -> None:
    def go_on(steps: int, share: float, resume: bool = True) -> tuple[Any, list[int]]:
        words = [f"loop.steps={steps}", f"rollout.oversample={share}", "checkpoint.every=1"]
        run = RunDirectory.open(train(settings(tmp_path, *words), resume=resume).run_path)
        state = json.loads((run.checkpoints_dir / f"step_{steps:06d}" / "state.json").read_text())
        groups = state["extra"]["states"]["partial rollouts"]
        return run, [len(members) for _, members in groups]

    _, waiting = go_on(1, 0.0, resume=False)
    assert waiting == []
    run, waiting = go_on(3, 1.0)
    assert waiting == [4, 4, 4], "prompts on their way beside the three of a step"
    cut_off = run.metrics("rl")[-1]["partial_rollout/unfinished"]
    assert cut_off > 0
    run, waiting = go_on(5, 0.0)
    assert waiting == []
    assert all(r["mismatch/num_different"] == 0 for r in run.metrics("rl"))
    last = run.metrics("rl")[-2:]
    assert [r.get("partial_rollout/unfinished") for r in last] == [0, None]
    assert all(len(run.rollouts(step)) == 12 for step in run.rollout_steps())
