"""An attempt at a run while it is open: directory, console, phases, stop signals, checkpoints.

Every kind of training has one: reinforcement learning with its supervised warm-up, supervised
training alone, and the training of a reward model.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from jetrl.distributed.peers import Trouble, peers
from jetrl.distributed.world import world
from jetrl.errors import (
    RankLost,
    StorageError,
    Terminated,
    TimeLimitReached,
    UserError,
    ending,
)
from jetrl.runs import open_trackers, summary_of, write_report
from jetrl.runs.attempts import StatusFile
from jetrl.runs.follower import FOLDER, open_run_directory
from jetrl.runs.storage import storing
from jetrl.runs.trackers import Trackers
from jetrl.session.checkpoints import RunCheckpoints
from jetrl.session.display import Display, SilentDisplay
from jetrl.session.memory_peaks import MemoryPeaks, memory_plan_notes, micro_batch_notes
from jetrl.session.open import TrainingContext
from jetrl.session.phases import Phases
from jetrl.session.prompt_order import PromptDigest
from jetrl.session.rank_progress import RankProgress
from jetrl.session.stop_signals import StopSignals
from jetrl.session.watchdog import Watchdog
from jetrl.settings.loading import Settings
from jetrl.types import Sample, StepStats

logger = logging.getLogger(__name__)

_SETTLE_S = 5.0  # for a checkpoint of several ranks, of which one has met an error


class TrainingRun:
    """An attempt at a run, begun when this object is made and ended when its stack is closed.

    Raises:
        UserError: The run directory cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        context: TrainingContext,
        stack: contextlib.ExitStack,
        resume: bool,
        began: float,
        trackers: Sequence[str] = (),
        hang_state: Callable[[], list[str]] = list,
    ) -> None:
        self.settings, self.context = settings, context
        model = context.model

        # The run directory, with the record of this attempt, and trackers beside it.
        first = world().is_first
        self.directory = open_run_directory(settings, model.plan.to_dict(), resume)
        self.directory.notes += context.notes
        if model.plan.deviation:
            self.directory.notes.append(f"the sampler deviates on purpose: {model.plan.deviation}")
        path = self.directory.path
        if settings.report.enabled and first:
            # Written last, when the run's end is recorded.
            stack.push(lambda _, error, __: _report(path, error))
        stack.enter_context(self.directory)
        reading = context.task.reading
        if reading and first:
            self.directory.write_reading(reading)
        facts = {"plan": model.plan.name, "device": str(model.device)}
        self.attempt = stack.enter_context(self.directory.attempt(sys.argv, facts))
        values = settings.model_dump(mode="json")
        project = settings.trackers.project
        self.trackers = world().from_first_alone(
            "the trackers", lambda: open_trackers(trackers, project, path, values), Trackers({})
        )
        stack.callback(lambda: self.trackers.close(lambda: summary_of(self.directory.history())))

        # Signals, the console, and who hears of the phases.
        elapsed_s = world().from_first(
            "the time of earlier attempts", lambda: self.directory.history().elapsed_s
        )
        self.stops = StopSignals(settings.run.max_hours, elapsed_s, began)
        display = Display if first else SilentDisplay
        self.display = display(settings.loop.steps, lambda: self.stops.elapsed_s)
        self.phases, self.memory_peaks = Phases(), MemoryPeaks(model.device)
        self.rank_progress = RankProgress()
        self.phases.observers += [self.display, self.memory_peaks, self.rank_progress]
        if first:
            status = StatusFile(path)
            stack.callback(status.close)
            self.phases.observers.append(status)
        hang_file, end_attempt = self.directory.hang_file, self.directory.end_attempt_for_hang
        watchdog = Watchdog(settings.watchdog, hang_file, hang_state, end_attempt)
        stack.enter_context(watchdog)
        self.phases.observers.append(watchdog)
        if world().size > 1:
            self._expect_losses()

        # What is still done when the run is left: the checkpoint that is being written comes first.
        self.checkpoints = RunCheckpoints(self.directory, settings)
        self.checkpoints.register("data", PromptDigest(context.prompts))
        stack.enter_context(self.stops.handled())
        stack.callback(self.display.close)
        stack.push(lambda _, error, __: self._settle(error))
        plan = memory_plan_notes(context.memory, context.loading, model.device)
        self.display.note(
            *plan, *self.directory.notes, *([f"in this task {reading}"] if reading else [])
        )

    def note_micro_batches(self, tokens: int) -> None:
        """Show the tokens of a micro-batch, where they are not train.tokens_per_micro_batch."""
        setting = self.settings.train.tokens_per_micro_batch
        self.display.note(*micro_batch_notes(self.context.memory, tokens, setting))

    def write_line(
        self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample] = ()
    ) -> None:
        stats = StepStats(step, metrics, samples)
        self.directory.write_step(stats)
        self.display.step(stats)
        self.trackers.log(step, metrics)

    def export(self, dtype: Literal["bfloat16", "float32"], out: str | Path | None) -> Path:
        """Write the trained model as a Hugging Face directory; return the one in the run directory.

        Args:
            out: A second directory to write; None: none.
        """
        path = self.directory.path / "model"
        with self.phases.phase("export"):
            self.context.model.save_pretrained(path, dtype=dtype, overwrite=True)
            if out is not None:
                self.context.model.save_pretrained(out, dtype=dtype)
            self.checkpoints.wait()
        self.display.close()
        return path

    def _settle(self, error: BaseException | None) -> None:
        """Complete the checkpoint that is being written after an error, unless left at once."""
        if error is None:
            return
        lost = isinstance(error, RankLost)
        alike = isinstance(error, KeyboardInterrupt | Terminated | TimeLimitReached)
        if alike:
            peers().leaving()
        if not (lost or self.stops.at_once):
            self.checkpoints.settle(None if alike or world().size == 1 else _SETTLE_S)
        if not (lost or alike):
            peers().failed(*ending(error))

    def _expect_losses(self) -> None:
        """Say what is left behind when another rank is lost and this one's main thread is stuck."""

        def end(trouble: Trouble) -> None:
            self.directory.end_attempt_for_hang(trouble.reason)
            self.display.close()

        peers().records_in(self.directory.path / FOLDER)
        peers().before_leaving(end)


def _report(path: Path, error: BaseException | None) -> None:
    """Write the report of a run directory when the run has ended, by an error or without one."""
    if isinstance(error, RankLost):  # all ranks are to be gone in seconds, as for a restart
        return
    try:
        with storing(path / "report.html"):
            write_report(path)
    except (StorageError, UserError) as failure:  # UserError: the directory is gone
        if error is None:
            raise
        logger.warning("%s", failure)  # what ended the run is what to say
