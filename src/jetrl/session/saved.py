"""The checkpoints of a run: what is in them, and how a run goes on from one.

Whatever is not a function of (seed, step) and must outlive a crash is registered here by name: its
`state()` goes into every checkpoint, and comes back through `load_state` when the run is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from jetrl.runs import RunDirectory
from jetrl.training import Checkpoints, Trainer
from jetrl.types import StepStats


class Stateful(Protocol):
    """A part of a run that carries something from step to step, as JSON values."""

    def state(self) -> Any: ...

    def load_state(self, state: Any) -> None: ...


class Saved:
    """What a run has saved.

    Args:
        run: its directory. keep_last: checkpoints kept. seed: noted in them.
    """

    def __init__(self, run: RunDirectory, keep_last: int, seed: int) -> None:
        self._run, self._seed = run, seed
        self._checkpoints = Checkpoints(run.checkpoints_dir, keep_last)
        self._parts: dict[str, Stateful] = {}

    def register(self, name: str, part: Stateful) -> None:
        """Puts a part's state into every checkpoint, under a name of its own."""
        assert name not in self._parts, name
        self._parts[name] = part

    def save(self, step: int, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """The checkpoint after a step, with the metrics of that step's line, which is written
        after it.

        Raises:
            RunStopped: it could not be written.
        """
        extra = {
            "metrics": dict(metrics),
            "seed": self._seed,
            "states": {name: part.state() for name, part in self._parts.items()},
        }
        self._checkpoints.save(step, trainer.policy, trainer.optimizer, extra)

    @property
    def last_step(self) -> int | None:
        """The step of the newest checkpoint, good or damaged; None if there is none."""
        steps = self._checkpoints.steps()
        return steps[-1] if steps else None

    @property
    def last_path(self) -> Path | None:
        step = self.last_step
        return None if step is None else self._checkpoints.path(step)

    def begin_anew(self) -> list[str]:
        """Forgets a run that has no checkpoint. Returns notes."""
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
        latest = self._checkpoints.latest()
        loaded = self._checkpoints.load(latest.path, trainer.policy, trainer.optimizer)
        for name, part in self._parts.items():
            if name in loaded.extra["states"]:
                part.load_state(loaded.extra["states"][name])
        self._run.truncate_after(loaded.step)
        last = max((r["step"] for r in self._run.metrics("rl")), default=-1)
        if last < loaded.step:  # the run was cut between the checkpoint and its line
            self._run.write_step(StepStats(loaded.step, loaded.extra["metrics"]))
        return loaded.step, [*latest.notes, f"resumed after step {loaded.step}"]
