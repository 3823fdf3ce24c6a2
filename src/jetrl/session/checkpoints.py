"""The checkpoints of a run: what is in them, and how a run goes on from one.

Whatever is not a function of (seed, step) and must outlive a crash is registered here by name: its
`state()` goes into every checkpoint, and comes back through `load_state` when the run is resumed.
Tensors go through `register_tensors` in the same way.

A checkpoint is copied to CPU memory and written by another thread while training goes on; there is
at most one on its way. A run that is cut before it is complete goes on from the one before, and
writes the lines since then again with the same bits, so nothing waits for the disk.

    checkpoints/step_000050     after 50 RL steps; step_000000 is the end of the warm-up
    checkpoints/sft/step_000050 after 50 updates of the warm-up; removed when it has ended
                                (of a reward model: they stay)
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from jetrl.errors import StorageError, UserError
from jetrl.memory.cpu import available_bytes
from jetrl.models.hf_files import sync
from jetrl.models.model import Model
from jetrl.runs import RunDirectory
from jetrl.runs.storing import storing
from jetrl.settings.loading import Settings
from jetrl.training import Checkpoints, Optimizer, Trainer
from jetrl.training.background import Background
from jetrl.training.checkpoint import Snapshot
from jetrl.types import StepStats

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """A part of a run that carries something from step to step, as JSON values."""

    def state(self) -> Any: ...

    def load_state(self, state: Any) -> None: ...


class StatefulTensors(Protocol):
    """A part of a run with tensors of its own: a critic, its optimizer."""

    def state_tensors(self) -> Mapping[str, torch.Tensor]: ...

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None: ...


class RunCheckpoints:
    """What a run has saved, and what it saves."""

    def __init__(self, run: RunDirectory, settings: Settings) -> None:
        self._run, self._settings = run, settings.checkpoint
        self._seed = settings.run.seed
        self._evaluates = settings.eval.every > 0
        keep_last, keep_best = self._settings.keep_last, self._settings.keep_best
        self._steps = Checkpoints(run.checkpoints_dir, keep_last, keep_best)
        self._warm_up = Checkpoints(run.checkpoints_dir / "sft", keep_last)
        self._background = Background()
        self._good_step: int | None = None
        self._longest_write_s = 0.0
        self._states: dict[str, Stateful] = {}
        self._tensors: dict[str, StatefulTensors] = {}

    def register(self, name: str, part: Stateful) -> None:
        """Puts a part's state into every checkpoint, under a name of its own."""
        assert name not in self._states, name
        self._states[name] = part

    def register_tensors(self, name: str, part: StatefulTensors) -> None:
        """Puts a part's tensors into every checkpoint of a step, into NAME.safetensors."""
        assert name not in self._tensors, name
        self._tensors[name] = part

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after a step, or after an update of the warm-up."""
        return bool(self._settings.every) and step % self._settings.every == 0

    def save(self, step: int, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """The checkpoint after a step, with the metrics of that step's line. It may be complete
        only later: `wait` says when.

        Raises:
            StorageError: it could not be written, or the one before could not.
        """
        self._background.wait()  # before memory is taken for the next copy
        extra = {
            "metrics": dict(metrics),
            "seed": self._seed,
            "states": self._state(),
        }
        others = {name: part.state_tensors() for name, part in self._tensors.items()}
        snapshot = self._steps.snapshot(
            step, trainer.policy, trainer.optimizer, extra, self._score(metrics), others
        )
        self._write(self._steps, snapshot)

    def save_warm_up(self, update: int, model: Model, optimizer: Optimizer) -> None:
        """The checkpoint after an update of the warm-up, or of a reward model.

        Raises:
            StorageError: as `save`.
        """
        self._background.wait()
        extra = {"seed": self._seed, "states": self._state()}
        snapshot = self._warm_up.snapshot(update, model, optimizer, extra)
        self._write(self._warm_up, snapshot)

    def masters_after(self, step: int, rl: bool) -> Path | None:
        """The file with the weights after a step (of RL, or of the warm-up), if it is saved."""
        path = (self._steps if rl else self._warm_up).path(step) / "masters.safetensors"
        return path if path.is_file() else None

    def _state(self) -> dict[str, Any]:
        return {name: part.state() for name, part in self._states.items()}

    def _load_state(self, states: Mapping[str, Any]) -> None:
        for name, part in self._states.items():
            if name in states:
                part.load_state(states[name])

    def _score(self, metrics: Mapping[str, float]) -> float | None:
        """What keep_best goes by: the held-out mean reward (of several tasks, their mean) of a step
        that measured one; the step's own reward in a run that never does."""
        if not self._evaluates:
            return metrics.get("reward/mean")
        means = [metrics[n] for n in metrics if n.startswith("eval/") and n.endswith("/mean")]
        return sum(means) / len(means) if means else None

    def _write(self, checkpoints: Checkpoints, snapshot: Snapshot) -> None:
        available = available_bytes()
        fits = available is None or snapshot.num_bytes < 0.8 * available
        if self._settings.background and not fits:
            logger.warning(
                "the checkpoint of step %d is written before training goes on: a copy of %.1f GiB "
                "does not fit in the %.1f GiB of CPU memory that are free",
                *(snapshot.step, snapshot.num_bytes / 2**30, (available or 0) / 2**30),
            )
        if self._settings.background and fits:
            snapshot = snapshot.copied()
            self._background.start(lambda: self._finish(checkpoints, snapshot), "checkpoint")
        else:
            self._finish(checkpoints, snapshot)

    @property
    def ending_s(self) -> float:
        """Seconds that the last checkpoint and the export may take, by the longest that the writing
        of a checkpoint has taken; 0 before the first."""
        return 2 * self._longest_write_s

    def _finish(self, checkpoints: Checkpoints, snapshot: Snapshot) -> None:
        began = time.monotonic()
        # What a resume from it does not write again must outlive a power cut as it does.
        for path in (self._run.metrics_file, self._run.rollouts_dir, self._run.path):
            with storing(path):
                sync(path)
        checkpoints.write(snapshot)
        self._longest_write_s = max(self._longest_write_s, time.monotonic() - began)
        if checkpoints is self._steps:
            self._good_step = snapshot.step
            shutil.rmtree(self._warm_up.directory, ignore_errors=True)

    def check(self) -> None:
        """Raises what went wrong with a checkpoint on its way, without waiting for it."""
        self._background.check()

    def wait(self) -> None:
        """Returns when the checkpoint on its way is complete.

        Raises:
            StorageError: it could not be written.
        """
        self._background.wait()

    def settle(self) -> None:
        """`wait`, where something else has ended the run: that is what to say, and what goes wrong
        with the checkpoint is logged."""
        try:
            self.wait()
        except StorageError as failure:
            logger.warning("%s", failure)

    @property
    def last_step(self) -> int | None:
        """The step of the newest checkpoint, good or damaged; None if there is none."""
        steps = self._steps.steps()
        return steps[-1] if steps else None

    @property
    def good_step(self) -> int | None:
        """The step of the newest checkpoint that this attempt has loaded or written, None if it did
        neither. A newer one can be there, damaged."""
        return self._good_step

    @property
    def last_path(self) -> Path | None:
        step = self.last_step
        return None if step is None else self._steps.path(step)

    @property
    def in_warm_up(self) -> bool:
        """Whether the run was cut in its warm-up, after a checkpoint."""
        return self.last_step is None and bool(self._warm_up.steps())

    def begin_anew(self) -> list[str]:
        """Forgets a run that has no checkpoint. Returns notes.

        Raises:
            UserError: it has had one: its steps are not forgotten because that is gone.
        """
        every, _ = self._run.changed_settings.get("checkpoint.every", (self._settings.every, None))
        if self._run.had_checkpoint(every):
            raise UserError(
                f"no checkpoint in {self._run.checkpoints_dir}, where there has been one: put it "
                "back from a copy, or start a new run under another run.name. To begin this one "
                f"anew, delete {self._run.path}"
            )
        self._run.truncate_after(-1, "sft")
        return ["no checkpoint yet: the run begins anew"]

    def load(self, trainer: Trainer) -> tuple[int, list[str]]:
        """Goes on from the last good checkpoint: weights, optimizer, states; what the run wrote
        after it is forgotten.

        Returns:
            The steps done, and notes about what was found.

        Raises:
            UserError: every checkpoint is damaged, or it does not fit the settings.
        """
        began = time.monotonic()
        latest = self._steps.latest()
        checked = time.monotonic()
        loaded = self._steps.load(latest.path, trainer.policy, trainer.optimizer)
        logger.info(
            "%s: checksums compared in %.1f s, read in %.1f s",
            *(latest.path, checked - began, time.monotonic() - checked),
        )
        self._load_state(loaded.extra["states"])
        for name, owner in self._tensors.items():
            if name in loaded.tensors:
                owner.load_tensors(loaded.tensors[name])
        self._good_step = loaded.step
        self._steps.tidy(loaded.step)
        self._run.truncate_after(loaded.step)
        last = max((r["step"] for r in self._run.metrics("rl")), default=-1)
        metrics = loaded.extra["metrics"]
        if last < loaded.step and metrics:  # cut between the checkpoint and its line
            self._run.write_step(StepStats(loaded.step, metrics))
        return loaded.step, [*latest.notes, f"resumed after step {loaded.step}"]

    def load_warm_up(self, model: Model, optimizer: Optimizer) -> tuple[int, list[str]]:
        """Goes on in the warm-up, as `load`; 0 updates if it has no checkpoint."""
        if not self.in_warm_up:
            return 0, []
        latest = self._warm_up.latest()
        loaded = self._warm_up.load(latest.path, model, optimizer)
        self._load_state(loaded.extra["states"])
        self._run.truncate_after(loaded.step, "sft")
        return loaded.step, [*latest.notes, f"resumed after supervised update {loaded.step}"]
