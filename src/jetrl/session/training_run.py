"""An open attempt at a run: run directory, trackers, phases and checkpoints."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jetrl.distributed.board import Trouble
from jetrl.distributed.peers import peers
from jetrl.distributed.world import world
from jetrl.errors import (
    RankLost,
    RunStopped,
    StorageError,
    Terminated,
    TimeLimitReached,
    UserError,
    ending,
)
from jetrl.memory.plan import GIB, shown
from jetrl.precision.backend import backend_for
from jetrl.precision.plan import words_of
from jetrl.rollout.options import Progress
from jetrl.runs.attempts import StatusFile
from jetrl.runs.digest import Digest
from jetrl.runs.directory import settings_of_resume
from jetrl.runs.history import summary_of
from jetrl.runs.report import write_report
from jetrl.runs.schemas import Phase
from jetrl.runs.storage import storing
from jetrl.runs.trackers import Trackers, open_trackers
from jetrl.runs.writer import FOLDER, open_run_directory
from jetrl.session.checkpoints import RunCheckpoints
from jetrl.session.digest import RunDigest
from jetrl.session.open import TrainingContext
from jetrl.session.phases import Display, MemoryPeaks, Phases
from jetrl.session.prompt_order import PromptDigest
from jetrl.session.stop_signals import StopSignals
from jetrl.session.watchdog import Watchdog
from jetrl.settings.loading import Settings
from jetrl.training.trainer import Trainer
from jetrl.types import Metrics, Sample, StepStats

logger = logging.getLogger(__name__)

_SETTLE_S = 5.0  # to complete a multi-rank checkpoint after an error on one rank


def settings_of_attempt(settings: Settings, resume: bool) -> Settings:
    """Return the settings of an attempt; a resumed run uses its own, plus overrides."""
    if not resume:
        return settings
    return world().from_first("the run's settings", lambda: settings_of_resume(settings))


@dataclass(frozen=True)
class RunResult:
    """Outcome of a run, and why it `stopped` early; paths are None if nothing was written.

    `chats`: True if it trained on chat prompts rather than plain text. `digest`: of all its steps,
    64 hex digits (runs/digest.py); "" if it has none. `best_path`: the kept checkpoint with the
    highest score, with checkpoint.keep_best.
    """

    run_path: Path
    report_path: Path | None
    checkpoint_path: Path | None
    model_path: Path | None
    steps: int
    stopped: str = ""
    chats: bool = False
    digest: str = ""
    best_path: Path | None = None


class TrainingRun:
    """An attempt at a run, from construction until its stack is closed.

    The stack closes in reverse order: settle the checkpoints, close the trackers, record the end of
    the attempt, then write the report.
    """

    def __init__(
        self,
        context: TrainingContext,
        stack: contextlib.ExitStack,
        resume: bool,
        began: float,
        hang_state: Callable[[], list[str]] = list,
    ) -> None:
        self.settings, self.context = context.settings, context
        self._open_directory(stack, resume)
        self._open_trackers(stack)
        earlier_s = world().from_first(
            "the time of earlier attempts", lambda: self.directory.history().elapsed_s
        )
        # Earlier attempts count toward the displayed hours, but not toward run.max_hours.
        self.stops = StopSignals(self.settings.run.max_hours, earlier_s, began)
        self.display = Display(self.settings.loop.steps, lambda: self.stops.elapsed_s)
        self.memory_peaks = MemoryPeaks(context.model.device)
        self.phases = Phases()
        self._observe_phases(stack, hang_state)
        self.checkpoints = RunCheckpoints(self.directory, self.settings, self.trackers.log)
        self.checkpoints.components.register("data", PromptDigest(context.prompts))
        self.digest = RunDigest()
        self.checkpoints.components.register("digest", self.digest)
        stack.enter_context(self.stops.handled())
        stack.callback(self.display.close)
        stack.push(lambda _, error, __: self._settle(error))
        self._show_plan()

    def _open_directory(self, stack: contextlib.ExitStack, resume: bool) -> None:
        """Open the run directory and record the start of the attempt."""
        context, model = self.context, self.context.model
        self.directory = open_run_directory(self.settings, model.plan.to_dict(), resume)
        self.directory.notes += context.notes
        if own := words_of(model.plan.sampler_only):
            self.directory.notes.append(f"the sampler deviates on purpose: {own}")
        # `settings_of_resume` keeps the log-probs of an older run.
        key = "rollout.truncated_logprobs"
        if self.directory.changed_settings.get(key) == (None, False):
            self.directory.notes.append(
                f"{key} = false: this run began before that setting, with log-probs of all tokens; "
                f"resume with {key}=true to train the distribution that is sampled from"
            )
        # Written last, once the run's end is recorded.
        if self.settings.report.enabled and world().is_first:
            stack.push(lambda _, error, __: _report(self.directory.path, error))
        # Hold the run's lock from here on, so that no second process writes.
        stack.enter_context(self.directory)
        if context.task.reading and world().is_first:
            self.directory.write_reading(context.task.reading)
        # Record the start in attempts.jsonl now, and the end when the stack closes.
        facts = {"plan": model.plan.name, "device": str(model.device)}
        facts["backend"] = backend_for(model.device).name
        if resume and not model.plan.defined:
            self._note_other_bits(facts)
        self.attempt = stack.enter_context(self.directory.attempt(sys.argv, facts))

    def _note_other_bits(self, facts: Mapping[str, str]) -> None:
        """Note that a resumed run has other bits than before, on another kind of device."""
        before = dict(facts)
        for attempt in self.directory.attempts():
            before |= attempt.notes
        was, now = (
            f"{notes['device'].partition(':')[0]} with backend {notes['backend']}"
            for notes in (before, facts)
        )
        if was != now:
            self.directory.notes.append(
                f"this run was on {was}, and continues on {now}: with other bits from here on than "
                f"a run that was not stopped, under plan {facts['plan']}"
            )

    def _open_trackers(self, stack: contextlib.ExitStack) -> None:
        """Open the trackers on rank 0; all ranks raise its errors."""
        self.trackers = Trackers({})

        def open_all() -> None:
            settings = self.settings.model_dump(mode="json")
            self.trackers = open_trackers(self.settings.trackers, self.directory.path, settings)

        world().from_first("the trackers", open_all)
        stack.callback(lambda: self.trackers.close(lambda: summary_of(self.directory.history())))

    def _observe_phases(
        self, stack: contextlib.ExitStack, hang_state: Callable[[], list[str]]
    ) -> None:
        """Add the observers of phases, and a handler for lost ranks."""
        self.phases.observers += [self.display, self.memory_peaks]
        if world().is_first:
            status = StatusFile(self.directory.path)
            stack.callback(status.close)
            self.phases.observers.append(status)
        # The watchdog is the last observer, so that it includes the time of the others.
        end_attempt = self.directory.end_attempt_for_hang
        watchdog = Watchdog(
            self.settings.watchdog, self.directory.hang_file, hang_state, end_attempt
        )
        stack.enter_context(watchdog)
        self.phases.observers.append(watchdog)

        # Called from a thread if another rank is lost while the main thread is stuck.
        def at_end(trouble: Trouble) -> None:
            end_attempt(trouble.reason)
            self.display.close()

        peers().attach(self.directory.path / FOLDER, watchdog.write_stacks, at_end)

    def _show_plan(self) -> None:
        """Log the memory plan, and print the notes; on a GPU, also print the plan."""
        context = self.context
        lines = [f"{context.loading}; memory plan", *shown(context.memory.plan).splitlines()]
        if context.memory.free is not None:
            lines.append(f"  of {context.memory.free / GIB:.1f} GiB that was free")
        logger.info("%s", "\n".join(lines))
        on_gpu = lines if context.model.device.type == "cuda" else []
        reading = context.task.reading
        to_read = [f"in this task {reading}"] if reading else []
        self.display.note(*on_gpu, *self.directory.notes, *to_read)

    def note_micro_batches(self, tokens: int) -> None:
        """Report the micro-batch size if it is not train.tokens_per_micro_batch."""
        setting, planned = self.settings.train.tokens_per_micro_batch, self.context.memory.tokens
        why = ""
        if tokens != planned:
            why = f", as before the interruption; the memory plan has {planned}"
        elif tokens < setting:
            why = f": train.tokens_per_micro_batch = {setting} does not fit"
        if why:
            self.display.note(f"micro-batches of up to {tokens} tokens{why}")

    def write_line(
        self,
        step: int,
        metrics: Metrics,
        samples: Sequence[Sample] = (),
        phase: Phase = "rl",
        digest: Digest | None = None,
    ) -> None:
        stats = StepStats(step, metrics, samples)
        self.directory.write_step(stats, phase, digest)
        self.display.step(stats)
        self.trackers.log(step, metrics)

    def show_progress(self, progress: Progress) -> None:
        """Show the progress of a rollout or evaluation and reset the watchdog."""
        self.phases.beat()
        self.display.progress(progress)

    def save(self, step: int, trainer: Trainer, metrics: Metrics) -> None:
        """Begin to write the checkpoint of a step, as the phase of that name."""
        with self.phases.phase("checkpoint"):
            self.checkpoints.save(step, trainer, metrics)

    def save_stopped(
        self, step: int, trainer: Trainer, metrics: Metrics, samples: Sequence[Sample]
    ) -> None:
        """Write the rollouts of the last complete step, and its checkpoint if missing."""
        if samples:  # rollout.keep_every may have skipped them
            self.directory.write_rollouts(step, samples)
        with self.phases.phase("checkpoint"):
            self.checkpoints.wait()
            saved = self.checkpoints.good_step
            if saved is None or saved < step:
                self.checkpoints.save(step, trainer, metrics)
                self.checkpoints.wait()
        self.display.note(f"stopped after step {step}: {self.stops.reason}")

    def export(self, dtype: Literal["bfloat16", "float32"], out: str | Path | None) -> Path:
        """Export the model as a Hugging Face directory, also to `out`; return the run's own one."""
        path = self.directory.path / "model"
        with self.phases.phase("export"):
            self.context.model.save_pretrained(path, dtype=dtype, overwrite=True)
            if out is not None:
                self.context.model.save_pretrained(out, dtype=dtype)
            self.checkpoints.wait()
        self.display.close()
        return path

    def result(
        self,
        model_path: Path,
        steps: int,
        stopped: str = "",
        chats: bool = False,
        best_path: Path | None = None,
    ) -> RunResult:
        """Return the outcome of a run after `export`."""
        path = self.directory.path
        return RunResult(
            run_path=path,
            report_path=path / "report.html" if self.settings.report.enabled else None,
            checkpoint_path=self.checkpoints.last_path,
            model_path=model_path,
            steps=steps,
            stopped=stopped,
            chats=chats,
            digest=self.digest.text,
            best_path=best_path,
        )

    def _settle(self, error: BaseException | None) -> None:
        """After an error, complete the pending checkpoint and inform the other ranks."""
        if error is None:
            return
        # If all ranks stop together, the others need no alarm.
        lost = isinstance(error, RankLost)
        alike = isinstance(error, KeyboardInterrupt | Terminated | TimeLimitReached)
        if alike:
            peers().leaving()
        # A multi-rank checkpoint cannot complete without the lost rank.
        if not (lost or self.stops.at_once):
            try:
                self.checkpoints.wait(None if alike or world().size == 1 else _SETTLE_S)
            except RunStopped as failure:  # the first error is raised, this one only logged
                logger.warning("%s", failure)
        if not (lost or alike):
            words, code = ending(error)
            peers().failed(words, code)


def _report(path: Path, error: BaseException | None) -> None:
    """Write a run's report at its end, with or without an error."""
    if isinstance(error, RankLost):  # all ranks must exit within seconds, for a restart
        return
    try:
        with storing(path / "report.html"):
            write_report(path)
    except (StorageError, UserError) as failure:  # UserError if the directory is gone
        if error is None:
            raise
        logger.warning("%s", failure)  # do not hide the error that ended the run
