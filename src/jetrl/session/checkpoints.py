"""Checkpoints of a run: their contents, and resuming from them.

Components whose state must survive a crash register by name (`Components`): `state()`, with a
schema in `States`, is saved in every checkpoint and restored by `load_state`.

A checkpoint is copied to CPU memory and written by a background thread while training continues,
one at a time. A run that is interrupted before its checkpoint is complete resumes from the previous
one and reproduces the same bits. Every rank calls these methods at the same points and writes its
own rows; rank 0 inspects the disk.

    checkpoints/step_000050     after 50 RL steps; step_000000 is the end of the warm-up
    checkpoints/sft/step_000050 after 50 updates of the warm-up (removed at its end), or of a
                                reward model
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol, Self

from pydantic import Field, TypeAdapter, model_validator

from jetrl.distributed.agreement import Decision, agree
from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.files import Count, Finite, Seed, Step, Stored, checked
from jetrl.memory.cpu import available_bytes
from jetrl.models.hf_files import sync
from jetrl.models.model import Model
from jetrl.runs.metrics import is_eval_mean
from jetrl.runs.schemas import DigestRecord
from jetrl.runs.storage import storing
from jetrl.runs.writer import RunWriter
from jetrl.settings.loading import Settings
from jetrl.training.checkpoint import Background, Checkpoints, Loaded, Snapshot
from jetrl.training.extras import Learner
from jetrl.training.host_math import mean
from jetrl.training.optimizer import Optimizer
from jetrl.training.trainer import Trainer
from jetrl.types import FinishReason, Json, Metrics, StepStats

RandomKey = Annotated[int, Field(ge=0, lt=2**64)]
Positive = Annotated[int, Field(ge=1, lt=2**53)]
Ratio = Annotated[float, Field(gt=0, lt=2**53, allow_inf_nan=False)]
Tried = Annotated[float, Field(ge=0, lt=2**53, allow_inf_nan=False)]
PassRate = Annotated[list[Tried], Field(min_length=2, max_length=2)]
# JSON has no tuples, so the tuple itself is not strict; its elements are.
Member = Annotated[
    tuple[RandomKey, list[Count], list[Finite], FinishReason, str, list[Step]], Field(strict=False)
]
WaitingGroup = Annotated[tuple[str, list[Member]], Field(strict=False)]


class GuardState(Stored):
    """State of a guard against non-finite updates (`training.guard`)."""

    in_a_row: Count


class ClipState(Stored):
    """State of the clip calibration (`training.extras.calibration`)."""

    steps: Count
    low: Ratio
    high: Ratio


class MicroBatchState(Stored):
    """Micro-batch size in tokens, and the initial train.tokens_per_micro_batch."""

    tokens: Positive
    setting: Positive


Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
RolloutSizes = Annotated[list[Positive | None], Field(min_length=3, max_length=3)]


class RolloutSizesState(Stored):
    """Batch sizes of the rollout (`rollout.sizes`)."""

    asked: RolloutSizes
    now: Annotated[tuple[Positive, Positive, Positive | None], Field(strict=False)]


class TextState(Stored):
    """Digest of a text, and the place in it: epoch, span, document, token (`session.examples`)."""

    digest: Digest
    place: Annotated[list[Count], Field(min_length=4, max_length=4)]


class States(Stored):
    """States of all components, by registered name.

    `prompts` holds pass rates: [solved, tried] by prompt id.
    """

    data: Digest | None = None
    digest: DigestRecord | None = None
    prompts: dict[str, PassRate] = Field(default_factory=dict)
    partial_rollouts: list[WaitingGroup] = Field(default_factory=list, alias="partial rollouts")
    micro_batches: MicroBatchState | None = None
    rollout_sizes: RolloutSizesState | None = None
    guard: GuardState | None = None
    sft_guard: GuardState | None = None
    critic_guard: GuardState | None = None
    clip: ClipState | None = None
    text: TextState | None = None


class Extra(Stored):
    """Contents of `extra` in state.json; supervised updates have no metrics."""

    states: States
    metrics: dict[str, float] = Field(default_factory=dict)
    seed: Seed = 0

    @model_validator(mode="after")
    def _check_members(self) -> Self:
        for _, members in self.states.partial_rollouts:
            for _, token_ids, logprobs, _, _, versions in members:
                if len(token_ids) != len(logprobs) or len(versions) not in (0, len(token_ids)):
                    raise ValueError("states.partial rollouts has log-probs of other tokens")
        return self


NAMES = frozenset(field.alias or name for name, field in States.model_fields.items())
"""Names that components may register under."""
_EXTRA = TypeAdapter(Extra)


def check_extra(extra: Json, where: str) -> None:
    """Validate the component states of a checkpoint: `extra` in state.json."""
    checked(_EXTRA, extra, f"{where}: extra")


logger = logging.getLogger(__name__)

_FAILED = Decision[bool]("whether the checkpoint could not be written", any)
_FITS = Decision[bool]("whether a copy of the checkpoint fits in CPU memory", all)


class Stateful(Protocol):
    """A component with JSON state that persists across steps."""

    def state(self) -> Any:
        """Return the state to be saved."""

    def load_state(self, state: Any) -> str | None:
        """Restore a saved state; return a note for the user, if any."""


class Components:
    """Components with state that persists across steps, by name.

    Every checkpoint has the JSON states; a step checkpoint also has the tensors of `learners`, in
    NAME.safetensors.
    """

    def __init__(self) -> None:
        self.learners: dict[str, Learner] = {}
        self._stateful: dict[str, Stateful] = {}

    def register(self, name: str, component: Stateful) -> None:
        """Include a component's state in every checkpoint."""
        assert name not in self._stateful, name
        assert name in NAMES, f"{name}: its schema belongs in session/checkpoints.py"
        self._stateful[name] = component

    def states(self) -> Json:
        """Return the current states to be saved."""
        return {name: component.state() for name, component in self._stateful.items()}

    def load_states(self, saved: Json) -> list[str]:
        """Restore saved states; return notes for the user."""
        notes = []
        for name, component in self._stateful.items():
            if name in saved:
                notes.append(component.load_state(saved[name]))
        return [note for note in notes if note]

    def load_tensors(self, loaded: Loaded) -> None:
        """Restore this rank's part of the saved tensors."""
        for name, learner in self.learners.items():
            if name in loaded.tensors:
                learner.load_tensors(loaded.tensors[name].own(learner.shard_of))


class RunCheckpoints:
    """Checkpoints of a run: when they are written, where, and how a run resumes from them.

    `good_step` is the newest step loaded or written in this attempt, if any. `ending_s` is the time
    reserved for the last checkpoint and the export: twice the longest checkpoint write so far; 0
    before the first one. `restored` gets the step and metrics of a line that only a checkpoint has.
    """

    def __init__(
        self,
        run: RunWriter,
        settings: Settings,
        restored: Callable[[int, Metrics], object] | None = None,
    ) -> None:
        self._run, self._settings, self._restored = run, settings.checkpoint, restored
        self._seed = settings.run.seed
        self._evaluates = settings.eval.every > 0
        keep_last, keep_best = self._settings.keep_last, self._settings.keep_best
        self._ranks = ranks = world().channel()
        # A separate channel: the writer thread must not interleave with the loop's collectives.
        self._steps = Checkpoints(run.checkpoints_dir, keep_last, keep_best, ranks)
        self._supervised = Checkpoints(run.checkpoints_dir / "sft", keep_last, ranks=ranks)
        world().from_first("what a crash left", self._steps.put_back)
        self._background = Background()
        self.good_step: int | None = None
        self.ending_s = 0.0
        self.components = Components()

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint is due after a step or supervised update."""
        return bool(self._settings.every) and step % self._settings.every == 0

    def save(self, step: int, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Write the checkpoint of a step; it is complete once `wait` returns.

        `metrics` are for `keep_best`, and restore the metrics line if the run is interrupted before
        writing it.
        """
        self._save(
            self._steps,
            step,
            trainer.policy,
            trainer.optimizer,
            extra={"metrics": dict(metrics)},
            score=_score(metrics, self._evaluates),
            parts=self.components.learners,  # for a critic or draft head, only this rank's rows
        )

    def save_supervised(self, update: int, model: Model, optimizer: Optimizer) -> None:
        """Write the checkpoint after a supervised update, like `save`."""
        self._save(self._supervised, update, model, optimizer, extra={})

    def _save(
        self,
        checkpoints: Checkpoints,
        step: int,
        model: Model,
        optimizer: Optimizer,
        extra: Json,
        score: float | None = None,
        parts: Mapping[str, Learner] | None = None,
    ) -> None:
        """Write a checkpoint, in the background if its copy fits in CPU memory."""
        self._background.wait()  # before allocating memory for the next copy
        # Collect states now: components change while the thread writes.
        extra = {**extra, "seed": self._seed, "states": self.components.states()}
        snapshot = checkpoints.snapshot(
            step, model, optimizer, extra=extra, score=score, parts=parts
        )
        available = available_bytes()
        # Ranks on a machine copy about the same number of bytes into shared host memory.
        needed = snapshot.num_bytes * world().local_size
        fits = agree(_FITS, available is None or needed < 0.8 * available)
        if self._settings.background and not fits:
            logger.warning(
                "the checkpoint of step %d is written before training continues: a copy of %.1f "
                "GiB does not fit in the %.1f GiB of free CPU memory",
                snapshot.step,
                needed / 2**30,
                (available or 0) / 2**30,
            )
        if self._settings.background and fits:
            snapshot = snapshot.copied()
            self._background.start(lambda: self._finish(checkpoints, snapshot), "checkpoint")
        else:
            self._finish(checkpoints, snapshot)

    def _finish(self, checkpoints: Checkpoints, snapshot: Snapshot) -> None:
        """Write a snapshot to disk, after the metrics and rollouts of its step."""
        began = time.monotonic()
        self._ranks.from_first("the run's lines", lambda: _flush_lines(self._run))
        checkpoints.write(snapshot)
        self.ending_s = max(self.ending_s, 2 * (time.monotonic() - began))
        if self._ranks.is_first:
            with storing(self._run.checkpointed_file):
                self._run.checkpointed_file.touch()
        # Once a step has a checkpoint, the warm-up is over and its checkpoints are not needed.
        if checkpoints is self._steps:
            self.good_step = snapshot.step
            if self._ranks.is_first:
                shutil.rmtree(self._supervised.directory, ignore_errors=True)

    def check(self) -> None:
        """Raise the error of the background checkpoint, if any, without waiting."""
        # If only one rank failed, the others would keep waiting.
        if agree(_FAILED, self._background.has_failed):
            self._background.wait()

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until the pending checkpoint is complete, for at most `limit_s`."""
        self._background.wait(limit_s)

    @property
    def last_step(self) -> int | None:
        """Step of the newest checkpoint, intact or damaged; None if there is none."""
        steps = world().from_first("the checkpoints", self._steps.steps)
        return steps[-1] if steps else None

    @property
    def last_path(self) -> Path | None:
        """Folder of the newest checkpoint, intact or damaged; None if there is none."""
        step = self.last_step
        return None if step is None else self._steps.path(step)

    @property
    def best_path(self) -> Path | None:
        """Folder of the best checkpoint; None without checkpoint.keep_best, or without scores."""
        step = world().from_first("the best checkpoint", self._steps.best)
        return None if step is None else self._steps.path(step)

    def load_best(self, trainer: Trainer) -> str:
        """Load the best checkpoint into the trainer of a run that has ended; return a note."""
        path = self.best_path
        if path is None:
            return (
                "checkpoint.export = best: no checkpoint has a score; the last weights are exported"
            )
        loaded = self._steps.load(path, trainer.policy, trainer.optimizer)
        return f"the exported model is the best checkpoint's, of step {loaded.step}"

    @property
    def in_supervised_updates(self) -> bool:
        """True if the run was interrupted during supervised updates, after a checkpoint."""
        steps = world().from_first("the supervised checkpoints", self._supervised.steps)
        return self.last_step is None and bool(steps)

    def start_over(self) -> list[str]:
        """Discard the metrics of a run without a checkpoint, which restarts from scratch."""

        def forget() -> None:
            if self._run.had_checkpoint():
                raise UserError(
                    f"no checkpoint in {self._run.checkpoints_dir}, but the run had one: "
                    "restore it, or choose another run.name"
                )
            self._run.truncate_after(-1, "sft")

        world().from_first("whether the run may start over", forget)
        return ["no checkpoint yet: the run starts over"]

    def load(self, trainer: Trainer) -> tuple[int, list[str]]:
        """Resume from the last intact checkpoint, drop later metrics; return steps and notes."""
        path, loaded, notes = self._load(self._steps, trainer.policy, trainer.optimizer, "step")
        self.components.load_tensors(loaded)
        self.good_step = loaded.step
        # Remove later checkpoints: they are damaged or stale.
        self._steps.tidy(loaded.step)

        def go_back() -> list[str]:
            lost = self._run.truncate_after(loaded.step)
            last = max((r["step"] for r in self._run.metrics("rl")), default=-1)
            metrics = loaded.extra.get("metrics")
            if last < loaded.step and metrics:  # interrupted between checkpoint and metrics line
                try:
                    digest = loaded.extra["states"].get("digest")
                    self._run.write_step(StepStats(loaded.step, metrics), digest=digest)
                except ValueError as error:
                    raise UserError(f"{path}/state.json: extra.metrics: {error}") from None
                if self._restored is not None:
                    self._restored(loaded.step, metrics)
            return lost

        return loaded.step, notes + world().from_first("the run's lines", go_back)

    def load_supervised(self, model: Model, optimizer: Optimizer) -> tuple[int, list[str]]:
        """Resume supervised updates, like `load`; returns 0 updates without a checkpoint."""
        if not self.in_supervised_updates:
            return 0, []
        _, loaded, notes = self._load(self._supervised, model, optimizer, "supervised update")
        run, step = self._run, loaded.step
        notes += world().from_first("the run's lines", lambda: run.truncate_after(step, "sft"))
        return step, notes

    def _load(
        self, checkpoints: Checkpoints, model: Model, optimizer: Optimizer, unit: str
    ) -> tuple[Path, Loaded, list[str]]:
        """Load weights, optimizer and states of the last intact checkpoint."""
        began = time.monotonic()
        latest = checkpoints.latest()
        loaded = checkpoints.load(latest.path, model, optimizer)
        logger.info("%s: checked and read in %.1f s", latest.path, time.monotonic() - began)
        check_extra(loaded.extra, f"{latest.path}/state.json")
        # Notes for the user: skipped damaged checkpoints, a changed number of ranks.
        notes = [*latest.notes, f"resumed after {unit} {loaded.step}"]
        notes += self.components.load_states({"digest": None, **loaded.extra["states"]})
        size = world().size
        if loaded.ranks != size:
            notes.append(f"resumed on {size} rank{'s' * (size > 1)}, was {loaded.ranks}")
        return latest.path, loaded, notes


def _score(metrics: Mapping[str, float], evaluates: bool) -> float | None:
    """Return the score for `keep_best`; None if the step has none."""
    if not evaluates:
        return metrics.get("reward/mean")
    # A run with evaluation compares only eval rewards, averaged over tasks.
    means = [value for name, value in metrics.items() if is_eval_mean(name)]
    return mean(means) if means else None


def _flush_lines(run: RunWriter) -> None:
    """Put metrics and rollouts on disk before the checkpoint that follows them."""
    for path in (run.metrics_file, run.rollouts_dir, run.path):
        with storing(path):
            sync(path)
