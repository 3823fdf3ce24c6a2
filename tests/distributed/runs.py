"""The tiny run that tests repeat on several ranks, and the results that two such runs share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.reliability.faults import SUMS

from jetrl import load_config, train
from jetrl.runs.directory import RunDirectory
from jetrl.runs.metrics import reproducible

SMALL = [
    *SUMS,
    "model.config.initializer_range=0.02",
    "sft.steps=3",
    "sft.until=2.0",
    "sft.check_every=2",
    "sft.examples_per_step=6",
    "rollout.prompts_per_step=5",
    "rollout.samples_per_prompt=3",
    "rollout.max_tokens=6",
    "algorithm.dynamic_sampling=true",
    "eval.every=2",
    "eval.prompts=5",
    "train.updates_per_step=2",
    "train.warmup_steps=0",
    "train.tokens_per_micro_batch=48",
    "checkpoint.every=3",
    "loop.steps=5",
    "report.enabled=false",
]

STEPS_ALONE = ["sft.steps=0", "eval.every=0", "algorithm.dynamic_sampling=false"]


def run_small(folder: str, name: str, *overrides: str, resume: bool = False) -> str:
    """Return the directory of a small run, whose every matrix is divided among ranks."""
    words = [*SMALL, f"run.dir={folder}", f"run.name={name}", *overrides]
    return str(train(load_config("demo", words), resume=resume).run_path)


def results(run: Path) -> dict[str, Any]:
    """Return what a run has to share with another: metrics but times, completions, the model."""
    lines = [
        {name: line.get(name) for name in ("step", "phase", "digest")} | reproducible(line)
        for line in RunDirectory.open(run).metrics()
    ]
    files = [*sorted((run / "rollouts").iterdir()), *sorted((run / "model").iterdir())]
    return {"metrics": lines, **{str(file.relative_to(run)): file.read_bytes() for file in files}}


def files_of(path: Path) -> list[str]:
    return sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())


def same_bytes(one: Path, other: Path) -> None:
    assert files_of(one) == files_of(other)
    for name in files_of(one):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
