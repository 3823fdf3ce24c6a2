from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import faults

from jetrl import load_config, train
from jetrl.runs.directory import RunDirectory
from jetrl.runs.metrics import reproducible

SMALL = [
    *faults.SMALL,
    "sft.steps=0",
    "eval.every=0",
    "train.updates_per_step=1",
    "train.warmup_steps=0",
    "loop.steps=5",
    "report.enabled=false",
]


@pytest.fixture
def small_words() -> list[str]:
    return [*SMALL]


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Any]:
    """Settings of a run of well under a second."""

    def make(*overrides: str, name: str = "run") -> Any:
        return load_config("demo", [*SMALL, f"run.dir={tmp_path}", f"run.name={name}", *overrides])

    return make


@pytest.fixture
def same() -> Callable[[Path, Path], bool]:
    """Return whether two runs have the same metrics, but times, and weights of the same bits."""

    def of(run: Path) -> Any:
        last = max((run / "checkpoints").glob("step_*"))
        lines = RunDirectory.open(run).metrics()
        return (
            [{"step": line["step"], **reproducible(line)} for line in lines],
            (last / "masters.safetensors").read_bytes(),
        )

    return lambda one, other: bool(of(one) == of(other))


def made(folder: Path, *words: str) -> Path:
    return train(load_config("demo", [*SMALL, f"run.dir={folder}", *words])).run_path


@pytest.fixture(scope="session")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small run, undisturbed."""
    return made(tmp_path_factory.mktemp("runs"), "run.name=uncut")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run that came to its end, with checkpoints of steps 2 and 3."""
    return made(tmp_path_factory.mktemp("runs"), "run.name=run", "loop.steps=3")
