"""An open attempt at a run: run directory, console, phases and checkpoints.

Everything that may take long runs inside `with phases.phase(NAME)`, observed by console, watchdog,
memory peaks and status file.
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
from jetrl.precision.plan import words_of
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
_SETTLE_S = 5.0  # to complete a multi-rank checkpoint after an error on one rank


class PhaseObserver(Protocol):
    """Observer of a run's phases; a failed phase has no end event."""

    def begin(self, phase: str, step: int) -> None:
        return

    def beat(self) -> None:
        return

    def end(self, phase: str, seconds: float) -> None:
        return


class Phases:
    """Timers of a run's phases.

    `timings` are seconds per phase in the current step, summed over repetitions. The current `step`
    is 0 before the first.
    """

    def __init__(self) -> None:
        self.timings: dict[str, float] = {}
        self.observers: list[PhaseObserver] = []
        self.start_step(0)

    def start_step(self, step: int) -> None:
        """Begin a step and reset its timings."""
        self.step = step
        self.timings.clear()
        self._step_began, self._waited_before = time.monotonic(), world().waited_s

    @property
    def step_s(self) -> float:
        """Seconds since the current step began."""
        return time.monotonic() - self._step_began

    @property
    def waited_s(self) -> float:
        """Seconds that this process waited for other ranks in the current step, on the host."""
        return world().waited_s - self._waited_before

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase and notify the observers."""
        for observer in self.observers:
            observer.begin(name, self.step)
        began = time.monotonic()
        with explained(f"the phase {name}", _ADVICE):
            yield
        keep_streams()  # user reward functions may have closed them
        seconds = time.monotonic() - began
        self.timings[name] = self.timings.get(name, 0.0) + seconds
        for observer in self.observers:
            observer.end(name, seconds)

    def beat(self) -> None:
        for observer in self.observers:
            observer.beat()


class Display(PhaseObserver):
    """Console output of one section of a run, opened on rank 0 at the first line."""

    def __init__(self, total_steps: int, elapsed_s: Callable[[], float]) -> None:
        self._elapsed_s = elapsed_s
        self._console: Console | None = None
        self._open: Callable[[], Console]
        self.show_steps(total_steps)

    def show_steps(self, total: int, first: int = 0) -> None:
        """Begin a section of `total` steps, with `first` completed by earlier attempts."""
        self.close()
        self._open = lambda: Console(total, first_step=first, elapsed_s=self._elapsed_s())

    def show_updates(self, title: str, total: int, first: int = 0) -> None:
        """Begin a section of supervised updates."""
        self.close()
        self._open = lambda: Console(
            total, first_step=first, title=title, samples_every=0, lines_every=25
        )

    def close(self) -> None:
        """Remove the progress bar; the next line restores it."""
        if self._console is not None:
            self._console.close()
            self._console = None

    def note(self, *notes: str) -> None:
        """Print notes, one per line."""

        def show(console: Console) -> None:
            for text in notes:
                console.note(text)

        if notes:
            self._show(show)

    def step(self, stats: StepStats) -> None:
        """Print the line of a step or supervised update."""
        self._show(lambda console: console.step(stats))

    def progress(self, progress: Progress) -> None:
        """Show rollout progress, of rank 0 only."""
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
    """Peak memory per phase: tensors, KV pages and CUDA graphs on a GPU; the process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._highest = 0
        self._phases: dict[str, int] = {}

    def begin(self, phase: str, step: int) -> None:
        # Allocations from before the phase count toward the step's peak.
        self._take()
        if self._device is not None:
            reset_peak(self._device)

    def end(self, phase: str, seconds: float) -> None:
        self._phases[phase] = max(self._take(), self._phases.get(phase, 0))

    def _take(self) -> int:
        """Return the peak since the last reset in bytes; 0 on the CPU."""
        if self._device is None:
            return 0
        peak = peak_bytes(self._device)
        self._highest = max(self._highest, peak)
        return peak

    def take_metrics(self) -> dict[str, float]:
        """Return the memory/* metrics of the phases since the last call."""
        self._take()
        if self._device is None:
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return {"memory/peak_gib": peak / GIB}
        peaks = {name: self._phases[name] for name in ("rollout", "update") if name in self._phases}
        self._phases.clear()
        metrics = {f"memory/{name}_peak_gib": peak / GIB for name, peak in peaks.items()}
        return {"memory/peak_gib": self._highest / GIB, **metrics}


def settings_of_attempt(settings: Settings, resume: bool) -> Settings:
    """Return the settings of an attempt; a resumed run uses its own, plus overrides."""
    own = RunDirectory.settings_of_resume
    return world().from_first("the run's settings", lambda: own(settings)) if resume else settings


class TrainingRun:
    """An attempt at a run, from construction until its stack is closed."""

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

        # Run directory with the record of this attempt, and trackers.
        first = world().is_first
        self.directory = open_run_directory(settings, model.plan.to_dict(), resume)
        self.directory.notes += context.notes
        if own := words_of(model.plan.sampler_only):
            self.directory.notes.append(f"the sampler deviates on purpose: {own}")
        path = self.directory.path
        # The stack closes in reverse order: settle checkpoints, close trackers, then write the
        # report.
        if settings.report.enabled and first:
            # Written last, once the run's end is recorded.
            stack.push(lambda _, error, __: _report(path, error))
        # Hold the run's lock from here on, so that no second process writes.
        stack.enter_context(self.directory)
        if (reading := context.task.reading) and first:
            self.directory.write_reading(reading)
        # Record the start in attempts.jsonl now, and the end when the stack closes.
        facts = {"plan": model.plan.name, "device": str(model.device)}
        self.attempt = stack.enter_context(self.directory.attempt(sys.argv, facts))
        self.trackers = Trackers({})

        def open_all() -> None:
            self.trackers = open_trackers(settings.trackers, path, settings.model_dump(mode="json"))

        world().from_first("the trackers", open_all)  # all ranks raise rank 0's error
        stack.callback(lambda: self.trackers.close(lambda: summary_of(self.directory.history())))

        # Signals, console, and phase observers.
        elapsed_s = world().from_first(
            "the time of earlier attempts", lambda: self.directory.history().elapsed_s
        )
        # Earlier attempts count toward the shown hours, but not toward run.max_hours.
        self.stops = StopSignals(settings.run.max_hours, elapsed_s, began)
        self.display = Display(settings.loop.steps, lambda: self.stops.elapsed_s)
        self.phases, self.memory_peaks = Phases(), MemoryPeaks(model.device)
        self.phases.observers += [self.display, self.memory_peaks]
        if first:
            status = StatusFile(path)
            stack.callback(status.close)
            self.phases.observers.append(status)
        # The watchdog is the last observer, so that it includes the time of the others.
        hang_file, end_attempt = self.directory.hang_file, self.directory.end_attempt_for_hang
        watchdog = Watchdog(settings.watchdog, hang_file, hang_state, end_attempt)
        stack.enter_context(watchdog)
        self.phases.observers.append(watchdog)

        # If another rank is lost while the main thread is stuck, a thread runs this.
        def at_end(trouble: Trouble) -> None:
            end_attempt(trouble.reason)
            self.display.close()

        peers().attach(path / FOLDER, watchdog.write_stacks, at_end)

        # Cleanup on exit; the pending checkpoint comes first.
        self.checkpoints = RunCheckpoints(self.directory, settings)
        self.checkpoints.register("data", PromptDigest(context.prompts))
        stack.enter_context(self.stops.handled())
        stack.callback(self.display.close)
        stack.push(lambda _, error, __: self._settle(error))
        # Always log the plan; print it if a GPU can run out of memory.
        lines = [f"{context.loading}; memory plan", *shown(context.memory.plan).splitlines()]
        if context.memory.free is not None:
            lines.append(f"  of {context.memory.free / GIB:.1f} GiB that were free")
        logger.info("%s", "\n".join(lines))
        on_gpu = lines if model.device.type == "cuda" else []
        to_read = [f"in this task {reading}"] if reading else []
        self.display.note(*on_gpu, *self.directory.notes, *to_read)

    def note_micro_batches(self, tokens: int) -> None:
        """Report the micro-batch size if it is not train.tokens_per_micro_batch."""
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
        """Export the model as a Hugging Face directory, also to `out`; return the run's own one."""
        path = self.directory.path / "model"
        with self.phases.phase("export"):
            self.context.model.save_pretrained(path, dtype=dtype, overwrite=True)
            if out is not None:
                self.context.model.save_pretrained(out, dtype=dtype)
            self.checkpoints.wait()
        self.display.close()
        return path

    def _settle(self, error: BaseException | None) -> None:
        """After an error, complete the pending checkpoint, unless exiting immediately."""
        if error is None:
            return
        # A common stop of all ranks is no alarm for the others.
        lost = isinstance(error, RankLost)
        alike = isinstance(error, KeyboardInterrupt | Terminated | TimeLimitReached)
        if alike:
            peers().leaving()
        # A multi-rank checkpoint cannot complete without the lost rank.
        if not (lost or self.stops.at_once):
            self.checkpoints.settle(None if alike or world().size == 1 else _SETTLE_S)
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
