"""Kills at chosen moments of a run, for a child process to bring on itself.

A point is a place in the sources; the n-th time a run comes by, the process ends by SIGKILL: no
handler runs, nothing is flushed. Where a file is being written, half of it is on the disk by then.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jetrl.runs.storage
from jetrl.session import Session
from jetrl.training.optimizer import Optimizer

TASK = Path(__file__).with_name("soak_task.py")
SUMS = [
    f"task.name={TASK}:Digits",
    "task.options={max_operand = 29, test_share = 0.2, mistakes = 0.55}",
    "task.workers=0",
    "train.lr=3e-3",
    "model.config.num_hidden_layers=1",
    "model.config.max_position_embeddings=64",
]
SMALL = [
    *SUMS,
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=6",
    "checkpoint.every=2",
]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def redirect(output: Path) -> None:
    """Append what this process prints, from Python and from C, to a file."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115


def half_a_line(writer: Any, record: Any) -> None:
    """A metrics line of which the disk got the first half."""
    data = jetrl.runs.storage._line(record).encode()
    writer._file.write(data[: len(data) // 2])


def half_a_file(path: Path, *rest: Any) -> None:
    """A checkpoint's file of which the disk got the first bytes."""
    Path(path).write_bytes(b"\x40\x00\x00\x00")


BEFORE, AFTER = "before", "after"

# The place, and BEFORE, AFTER or what is done before the kill.
Point = tuple[str, str | Callable[..., None]]
POINTS: dict[str, Point] = {
    "sampling, before a forward": ("jetrl.rollout.prefill:Prefill.forward", BEFORE),
    "sampling, before a draw is taken in": ("jetrl.rollout.scheduler:Scheduler.complete", BEFORE),
    "scoring, while others are sampled": ("jetrl.tasks.sandbox.scorer:Scorer.begin", BEFORE),
    "scoring": ("jetrl.tasks.sandbox.scorer:Scorer.finish", BEFORE),
    "before the backward": ("torch:Tensor.backward", BEFORE),
    "after the backward": ("torch:Tensor.backward", AFTER),
    "before AdamW": ("jetrl.training.optimizer:Optimizer.apply", BEFORE),
    "between AdamW and requantize": ("jetrl.training.optimizer:Optimizer.apply", AFTER),
    "after requantize": ("jetrl.models.policy:Policy.requantize", AFTER),
    "in the held-out evaluation": ("jetrl.session.session:evaluate", BEFORE),
    "in a supervised update": ("jetrl.training.sft:SftTrainer.step", BEFORE),
    "after a supervised update": ("jetrl.training.sft:SftTrainer.step", AFTER),
    "before a rollouts file": ("jetrl.runs.writer:write_jsonl", BEFORE),
    "after a rollouts file": ("jetrl.runs.writer:write_jsonl", AFTER),
    "in the middle of a metrics line": ("jetrl.runs.storage:JsonlWriter.write", half_a_line),
    "after a metrics line": ("jetrl.runs.storage:JsonlWriter.write", AFTER),
    "checkpoint, half a file": ("jetrl.training.checkpoint_files:write_tensors", half_a_file),
    "checkpoint, after a file": ("jetrl.training.checkpoint_files:write_tensors", AFTER),
    "checkpoint, before the manifest": ("jetrl.training.checkpoint_files:fingerprint", BEFORE),
    "checkpoint, before its rename": ("jetrl.training.checkpoint_files:sync", BEFORE),
    "checkpoint, after its rename": (
        "jetrl.training.checkpoint:CheckpointFolder.put_in_place",
        AFTER,
    ),
    "checkpoint, before older ones go": (
        "jetrl.training.checkpoint:CheckpointFolder.prune",
        BEFORE,
    ),
    "checkpoint, while it is copied": ("jetrl.training.checkpoint:Snapshot.copied", BEFORE),
    "resuming, after the weights": ("jetrl.training.checkpoint:Checkpoints.load", AFTER),
    "resuming, while lines are cut off": ("jetrl.runs.writer:RunWriter.truncate_after", AFTER),
    "making the run directory": ("jetrl.runs.attempts:RunLock.__init__", BEFORE),
    "writing its settings": ("jetrl.runs.writer:write_atomically", AFTER),
    "exporting the model": ("jetrl.models.hf_save:publish_directory", BEFORE),
    "writing the report": ("jetrl.session.training_run:write_report", BEFORE),
}

# Points that a start of the program comes by once; the others are met later in a run as well.
ONCE = {
    *("resuming, after the weights", "resuming, while lines are cut off"),
    *("making the run directory", "writing its settings"),
    *("exporting the model", "writing the report"),
}

DISK_POINTS: dict[str, Point] = {
    "disk full in a metrics line": ("jetrl.runs.storage:JsonlWriter.write", half_a_line),
    "disk full in a rollouts file": ("jetrl.runs.writer:write_jsonl", BEFORE),
    "disk full in a checkpoint": ("jetrl.training.checkpoint_files:write_tensors", half_a_file),
}


def fill_disk(point: str, occurrence: int) -> None:
    """From its n-th time at a point on, this process finds the disk full there."""

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    wrap(DISK_POINTS[point], lambda seen: seen >= occurrence, full)


def poison(every: int, offset: int) -> None:
    """Make one gradient NaN in the steps with step % every == offset."""
    update, gradient_norm = Session.update, Optimizer.gradient_norm
    now = 0

    def noted(self: Any, step: Any) -> Any:
        nonlocal now
        now = step.number
        return update(self, step)

    def poisoned(self: Any) -> Any:
        if now % every == offset:
            next(p for p in self.masters.values() if p.grad is not None).grad.fill_(float("nan"))
        return gradient_norm(self)

    Session.update, Optimizer.gradient_norm = noted, poisoned  # type: ignore[method-assign]


def arm(point: str, occurrence: int) -> None:
    """This process ends when it comes by a point for the n-th time (from 1)."""
    wrap(POINTS[point], lambda seen: seen == occurrence, lambda: die())


def found(place: str) -> tuple[Any, str]:
    """Return what owns a place in the sources, and the name that it has there."""
    module, path = place.split(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name


def wrap(point: Point, now: Callable[[int], bool], fault: Callable[[], None]) -> None:
    """Bring a fault on at a point, when `now` says so of its count of calls."""
    place, moment = point
    owner, name = found(place)
    original = getattr(owner, name)
    seen = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        if moment != AFTER and now(seen):
            if callable(moment):
                moment(*args)
            fault()
        result = original(*args, **kwargs)
        if moment == AFTER and now(seen):
            fault()
        return result

    setattr(owner, name, wrapped)
