"""The phases of a training step: which one runs now, and how long each took.

Whatever may take long runs inside `with phases.phase(NAME)`. Observers hear when a phase begins,
each time it shows a sign of life, and when it ends without an error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

from jetrl.distributed.world import world
from jetrl.memory.out_of_memory import explained

_ADVICE = "`jetrl train --dry-run` prints what is held and when. The last checkpoint is good"


class PhaseObserver(Protocol):
    """An object that hears what a run is doing."""

    def begin(self, phase: str, step: int) -> None:
        """Hear that a phase of a step begins."""

    def beat(self) -> None:
        """Hear that the present phase shows a sign of life."""

    def end(self, phase: str, seconds: float) -> None:
        """Hear that a phase has ended without an error."""


class Phases:
    """The clock of a run's phases.

    Attributes:
        timings: The seconds of each phase of the present step, by name: the sum where a phase ran
            several times.
        observers: The observers, in the order in which they hear of a phase.
        step: The number of the present step, 0 before the first.
    """

    def __init__(self) -> None:
        self.timings: dict[str, float] = {}
        self.observers: list[PhaseObserver] = []
        self.step = 0
        self._step_began, self._waited_before = time.monotonic(), world().waited_s

    def start_step(self, step: int) -> None:
        """Begin a step, without the timings of the step before."""
        self.step = step
        self.timings.clear()
        self._step_began, self._waited_before = time.monotonic(), world().waited_s

    @property
    def step_s(self) -> float:
        """The seconds since the present step began."""
        return time.monotonic() - self._step_began

    @property
    def waited_s(self) -> float:
        """The seconds of the present step in which this process waited for others, on the host."""
        return world().waited_s - self._waited_before

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the body of the `with` as a phase, and tell the observers.

        Raises:
            OutOfMemoryStop: Memory ran out where no part of the phase could do with less.
        """
        for observer in self.observers:
            observer.begin(name, self.step)
        began = time.monotonic()
        with explained(f"the phase {name}", _ADVICE):
            yield
        seconds = time.monotonic() - began
        self.timings[name] = self.timings.get(name, 0.0) + seconds
        for observer in self.observers:
            observer.end(name, seconds)

    def beat(self) -> None:
        """Show a sign of life of the present phase: a forward of the sampler, an update."""
        for observer in self.observers:
            observer.beat()
