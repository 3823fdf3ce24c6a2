"""The shared parts of the whole runs here: a tiny model, a task and a copy cut short."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from jetrl import load_config, train
from jetrl.runs.directory import RunDirectory
from jetrl.runs.metrics import reproducible
from jetrl.session import RunResult
from jetrl.settings.sections import Settings

SMALL = [
    "sft.examples_per_step=8",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=6",
    "eval.every=0",
    "checkpoint.every=2",
    "report.enabled=false",
    "model.config.num_hidden_layers=1",
    "model.config.max_position_embeddings=64",
]

_TASK = """
from jetrl.tasks import Task
from jetrl.types import Prompt

class Sum(Task):
    alphabet = "0123456789+-="

    def prompts(self, split):
        return [Prompt(id=str(i), text=f"{i}+{i}=", answer=str(2 * i)) for i in range(20)]

    def score(self, prompt, completion):
        BODY

    def self_test(self):
        return []  # a broken score is met in the middle of a run
"""


def task_of(path: Path, body: str) -> str:
    """Write a task with a score of its own; return its name."""
    file = path / "mine.py"
    file.write_text(_TASK.replace("BODY", body))
    return f"{file}:Sum"


def demo(words: list[str], folder: Path, *overrides: str, name: str = "run") -> Settings:
    """Return the settings of a demo in a folder."""
    return load_config("demo", [*words, f"run.dir={folder}", f"run.name={name}", *overrides])


def trained(
    words: list[str], folder: Path, name: str, *overrides: str, resume: bool = False
) -> RunResult:
    return train(demo(words, folder, *overrides, name=name), resume=resume)


def metrics(path: Path, phase: str | None = None) -> list[dict[str, Any]]:
    lines = RunDirectory.open(path).metrics(phase)
    return [{"step": r["step"], "digest": r.get("digest"), **reproducible(r)} for r in lines]


def before_call(owner: Any, name: str, call: int, act: Any, put: Any = setattr) -> None:
    """Let `act` run before the n-th call (from 1) of a function, in this process from now on."""
    original, calls = getattr(owner, name), 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            act()
        return original(*args, **kwargs)

    put(owner, name, wrapped)


def cut() -> None:
    raise RuntimeError("cut")


def without_last_checkpoint(run: Path, copy: Path) -> Path:
    """Copy a run as if it had been killed before its last checkpoint was written."""
    shutil.copytree(run, copy)
    shutil.rmtree(sorted((copy / "checkpoints").glob("step_*"))[-1])
    return copy
