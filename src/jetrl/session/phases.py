"""Phases of a run and their observers.

Everything that may take long runs inside `with phases.phase(NAME)`. Observers are the console, the
peak memory, the status file (runs/attempts.py) and the watchdog.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from jetrl.distributed.console import keep_streams
from jetrl.distributed.world import world
from jetrl.memory.device import peak_bytes, reset_peak
from jetrl.memory.out_of_memory import explained
from jetrl.memory.plan import GIB
from jetrl.rollout.options import Progress
from jetrl.runs.console import Console
from jetrl.types import StepStats

_ADVICE = "`jetrl train --dry-run` prints the memory plan. The last checkpoint is intact"


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
