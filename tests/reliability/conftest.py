from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jetrl import load_config, train
from jetrl.runs import RunDirectory, reproducible

TASK = Path(__file__).with_name("soak_task.py")
SMALL = [
    f"task.name={TASK}:Digits",
    "task.options={max_operand = 29, test_share = 0.2, mistakes = 0.55}",
    "task.workers=0",
    "train.lr=3e-3",
    "sft.steps=0",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=6",
    "eval.every=0",
    "train.updates_per_step=1",
    "train.warmup_steps=0",
    "checkpoint.every=2",
    "loop.steps=5",
    "report.enabled=false",
    "model.config.num_hidden_layers=1",
    "model.config.max_position_embeddings=64",
]


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Any]:
    """Settings of a run of well under a second."""

    def make(*overrides: str, name: str = "run") -> Any:
        return load_config("demo", [*SMALL, f"run.dir={tmp_path}", f"run.name={name}", *overrides])

    return make


def same_results(one: Path, other: Path) -> bool:
    """Return True if two runs have the same metrics, but times, and weights of the same bits."""

    def of(run: Path) -> Any:
        last = max((run / "checkpoints").glob("step_*"))
        lines = RunDirectory.open(run).metrics()
        return (
            [{"step": line["step"], **reproducible(line)} for line in lines],
            (last / "masters.safetensors").read_bytes(),
        )

    return bool(of(one) == of(other))


@pytest.fixture
def same() -> Callable[[Path, Path], bool]:
    return same_results


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run that came to its end, with checkpoints of steps 2 and 3."""
    folder = tmp_path_factory.mktemp("runs")
    words = [*SMALL, f"run.dir={folder}", "run.name=run", "loop.steps=3"]
    return train(load_config("demo", words)).run_path
