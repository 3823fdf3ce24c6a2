"""An attempt at a run while it is open: run directory, console, phases and checkpoints.

Whatever may take long runs inside `with phases.phase(NAME)`, which console, watchdog, memory peaks
and status file observe.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch

from jetrl.distributed.console import keep_streams
from jetrl.distributed.peers import Trouble, peers
from jetrl.distributed.world import world
from jetrl.errors import RankLost, StorageError, Terminated, TimeLimitReached, UserError, ending
from jetrl.memory.device import peak_bytes, reset_peak
from jetrl.memory.fitting import shown
from jetrl.memory.out_of_memory import explained
from jetrl.memory.plan import GIB
from jetrl.rollout.options import Progress
from jetrl.runs.attempts import StatusFile
from jetrl.runs.console import Console
from jetrl.runs.directory import RunDirectory
from jetrl.runs.follower import FOLDER, open_run_directory
from jetrl.runs.history import summary_of
from jetrl.runs.report import write_report
from jetrl.runs.schemas import Phase
from jetrl.runs.storage import storing
from jetrl.runs.trackers import Trackers, open_trackers
from jetrl.session.checkpoints import RunCheckpoints
from jetrl.session.open import TrainingContext
from jetrl.session.prompt_order import PromptDigest
from jetrl.session.stop_signals import StopSignals
from jetrl.session.watchdog import Watchdog
from jetrl.settings.loading import Settings
from jetrl.types import Sample, StepStats

logger = logging.getLogger(__name__)

_ADVICE = "`jetrl train --dry-run` prints what is held and when. The last checkpoint is good"
_SETTLE_S = 5.0  # for a checkpoint of several ranks, of which one has met an error


class PhaseObserver(Protocol):
    """An object that hears what a run is doing; a phase that fails has no end."""

    def begin(self, phase: str, step: int) -> None:
        return

    def beat(self) -> None:
        return

    def end(self, phase: str, seconds: float) -> None:
        return


class Phases:
    """The clock of a run's phases.

    `timings` are the seconds per phase of the current step, summed if a phase ran several times.
    The current `step` is 0 before the first.
    """

    def __init__(self) -> None:
        self.timings: dict[str, float] = {}
        self.observers: list[PhaseObserver] = []
        self.start_step(0)

    def start_step(self, step: int) -> None:
        """Begin a step, without the timings of the step before."""
        self.step = step
        self.timings.clear()
        self._step_began, self._waited_before = time.monotonic(), world().waited_s

    @property
    def step_s(self) -> float:
        """Seconds since the current step began."""
        return time.monotonic() - self._step_began

    @property
    def waited_s(self) -> float:
        """Seconds of the current step in which this process waited for other ranks, on the host."""
        return world().waited_s - self._waited_before

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the body of the `with` as a phase, and tell the observers."""
        for observer in self.observers:
            observer.begin(name, self.step)
        began = time.monotonic()
        with explained(f"the phase {name}", _ADVICE):
            yield
        keep_streams()  # a user's reward function may have closed them
        seconds = time.monotonic() - began
        self.timings[name] = self.timings.get(name, 0.0) + seconds
        for observer in self.observers:
            observer.end(name, seconds)

    def beat(self) -> None:
        for observer in self.observers:
            observer.beat()


class Display(PhaseObserver):
    """The console of a stretch of a run, opened by rank 0 with the stretch's first line."""

    def __init__(self, total_steps: int, elapsed_s: Callable[[], float]) -> None:
        self._elapsed_s = elapsed_s
        self._console: Console | None = None
        self._open: Callable[[], Console]
        self.show_steps(total_steps)

    def show_steps(self, total: int, first: int = 0) -> None:
        """Begin the stretch of `total` steps, of which earlier attempts did `first`."""
        self.close()
        self._open = lambda: Console(total, first_step=first, elapsed_s=self._elapsed_s())

    def show_updates(self, title: str, total: int, first: int = 0) -> None:
        """Begin a stretch of supervised updates."""
        self.close()
        self._open = lambda: Console(
            total, first_step=first, title=title, samples_every=0, lines_every=25
        )

    def close(self) -> None:
        """Take the bar away; the next line opens it again."""
        if self._console is not None:
            self._console.close()
            self._console = None

    def note(self, *notes: str) -> None:
        """Show notes, a line each."""

        def show(console: Console) -> None:
            for text in notes:
                console.note(text)

        if notes:
            self._show(show)

    def step(self, stats: StepStats) -> None:
        """Show the line of a step or of a supervised update."""
        self._show(lambda console: console.step(stats))

    def progress(self, progress: Progress) -> None:
        """Show the progress of a rollout; of several ranks, that of rank 0."""
        done, total = progress.sequences_done, progress.sequences_total
        pages = progress.pages_in_use, progress.pages_total
        self._show(lambda c: c.progress(done, total, progress.tokens_per_s, pages, progress.eta_s))

    def begin(self, phase: str, step: int) -> None:
        self._show(lambda console: console.phase(phase))

    def _show(self, what: Callable[[Console], object]) -> None:
        if world().is_first:
            self._console = self._console or self._open()
            what(self._console)


class MemoryPeaks(PhaseObserver):
    """The peak memory per phase: tensors, KV pages and CUDA graphs; on the CPU the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._highest = 0
        self._phases: dict[str, int] = {}

    def begin(self, phase: str, step: int) -> None:
        # What was allocated before the phase belongs to the peak of the whole step.
        self._take()
        if self._device is not None:
            reset_peak(self._device)

    def end(self, phase: str, seconds: float) -> None:
        self._phases[phase] = max(self._take(), self._phases.get(phase, 0))

    def _take(self) -> int:
        """Return the peak since the last reset, in bytes; 0 on the CPU."""
        if self._device is None:
            return 0
        peak = peak_bytes(self._device)
        self._highest = max(self._highest, peak)
        return peak

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics memory/* of the phases since the last call."""
        self._take()
        if self._device is None:
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return {"memory/peak_gib": peak / GIB}
        peaks = {name: self._phases[name] for name in ("rollout", "update") if name in self._phases}
        self._phases.clear()
        metrics = {f"memory/{name}_peak_gib": peak / GIB for name, peak in peaks.items()}
        return {"memory/peak_gib": self._highest / GIB, **metrics}


def settings_of_attempt(settings: Settings, resume: bool) -> Settings:
    """Return the settings of an attempt: a run that is resumed has its own, with some changed."""
    own = RunDirectory.settings_of_resume
    return world().from_first("the run's settings", lambda: own(settings)) if resume else settings


class TrainingRun:
    """An attempt at a run, begun when this object is made and ended when its stack is closed."""

    def __init__(
        self,
        settings: Settings,
        context: TrainingContext,
        stack: contextlib.ExitStack,
        resume: bool,
        began: float,
        hang_state: Callable[[], list[str]] = list,
    ) -> None:
        self.settings, self.context = settings, context
        model = context.model

        # The run directory, with the record of this attempt, and trackers next to it.
        first = world().is_first
        self.directory = open_run_directory(settings, model.plan.to_dict(), resume)
        self.directory.notes += context.notes
        if model.plan.deviation:
            self.directory.notes.append(f"the sampler deviates on purpose: {model.plan.deviation}")
        path = self.directory.path
        # The stack closes in reverse order: checkpoints settle, trackers close, the report is last.
        if settings.report.enabled and first:
            # Written last, when the run's end is recorded.
            stack.push(lambda _, error, __: _report(path, error))
        # The lock of the run is held from here on, so no second process writes.
        stack.enter_context(self.directory)
        if (reading := context.task.reading) and first:
            self.directory.write_reading(reading)
        # attempts.jsonl gets the start now and the end when the stack closes.
        facts = {"plan": model.plan.name, "device": str(model.device)}
        self.attempt = stack.enter_context(self.directory.attempt(sys.argv, facts))
        self.trackers = Trackers({})

        def open_all() -> None:
            self.trackers = open_trackers(settings.trackers, path, settings.model_dump(mode="json"))

        world().from_first("the trackers", open_all)  # every rank raises an error of rank 0's
        stack.callback(lambda: self.trackers.close(lambda: summary_of(self.directory.history())))

        # Signals, the console, and who hears of the phases.
        elapsed_s = world().from_first(
            "the time of earlier attempts", lambda: self.directory.history().elapsed_s
        )
        # Hours of earlier attempts are shown, and do not count against run.max_hours.
        self.stops = StopSignals(settings.run.max_hours, elapsed_s, began)
        self.display = Display(settings.loop.steps, lambda: self.stops.elapsed_s)
        self.phases, self.memory_peaks = Phases(), MemoryPeaks(model.device)
        self.phases.observers += [self.display, self.memory_peaks]
        if first:
            status = StatusFile(path)
            stack.callback(status.close)
            self.phases.observers.append(status)
        # The watchdog comes last among the observers: it measures what the others take, too.
        hang_file, end_attempt = self.directory.hang_file, self.directory.end_attempt_for_hang
        watchdog = Watchdog(settings.watchdog, hang_file, hang_state, end_attempt)
        stack.enter_context(watchdog)
        self.phases.observers.append(watchdog)

        # If another rank is lost and this one's main thread is stuck, a thread leaves this behind.
        def at_end(trouble: Trouble) -> None:
            end_attempt(trouble.reason)
            self.display.close()

        peers().attach(path / FOLDER, watchdog.write_stacks, at_end)

        # What is still done when the run is left: the checkpoint that is being written comes first.
        self.checkpoints = RunCheckpoints(self.directory, settings)
        self.checkpoints.register("data", PromptDigest(context.prompts))
        stack.enter_context(self.stops.handled())
        stack.callback(self.display.close)
        stack.push(lambda _, error, __: self._settle(error))
        # The plan is in the log always, on the console where a GPU can run out.
        lines = [f"{context.loading}; memory plan", *shown(context.memory.plan).splitlines()]
        if context.memory.free is not None:
            lines.append(f"  of {context.memory.free / GIB:.1f} GiB that were free")
        logger.info("%s", "\n".join(lines))
        on_gpu = lines if model.device.type == "cuda" else []
        to_read = [f"in this task {reading}"] if reading else []
        self.display.note(*on_gpu, *self.directory.notes, *to_read)

    def note_micro_batches(self, tokens: int) -> None:
        """Show the tokens of a micro-batch, where they are not train.tokens_per_micro_batch."""
        setting, planned = self.settings.train.tokens_per_micro_batch, self.context.memory.tokens
        why = ""
        if tokens != planned:
            why = f", as before the run was cut; the memory plan is for {planned}"
        elif tokens < setting:
            why = f": there is no room for train.tokens_per_micro_batch = {setting}"
        if why:
            self.display.note(f"micro-batches of up to {tokens} tokens{why}")

    def write_line(
        self,
        step: int,
        metrics: Mapping[str, float],
        samples: Sequence[Sample] = (),
        phase: Phase = "rl",
    ) -> None:
        stats = StepStats(step, metrics, samples)
        self.directory.write_step(stats, phase)
        self.display.step(stats)
        self.trackers.log(step, metrics)

    def export(self, dtype: Literal["bfloat16", "float32"], out: str | Path | None) -> Path:
        """Write the model as a Hugging Face directory, also to `out`; return the run's own one."""
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
        # A stop that all ranks make alike does not alarm the others.
        lost = isinstance(error, RankLost)
        alike = isinstance(error, KeyboardInterrupt | Terminated | TimeLimitReached)
        if alike:
            peers().leaving()
        # A checkpoint of several ranks cannot complete without the lost one.
        if not (lost or self.stops.at_once):
            self.checkpoints.settle(None if alike or world().size == 1 else _SETTLE_S)
        if not (lost or alike):
            words, code = ending(error)
            peers().failed(words, code)


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
