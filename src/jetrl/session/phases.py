"""The phases of a step: what runs now, and how long each took.

Whatever may take long runs inside `with phases.phase(NAME)`. Observers are told when a phase
begins, each time it shows a sign of life, and when it ends without an error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

from jetrl.memory.out_of_memory import explained

_ADVICE = "`jetrl train --dry-run` prints what is held and when. The last checkpoint is good"


class PhaseObserver(Protocol):
    """Who wants to know what a run is doing."""

    def begin(self, phase: str, step: int) -> None: ...

    def beat(self) -> None: ...

    def end(self, phase: str, seconds: float) -> None: ...


class Phases:
    """`timings`: seconds of each phase of the step so far, by name. `observers`: told in order.
    `step`: the one that runs, 0 before the first."""

    def __init__(self) -> None:
        self.timings: dict[str, float] = {}
        self.observers: list[PhaseObserver] = []
        self.step = 0
        self._step_began = time.monotonic()

    def start_step(self, step: int) -> None:
        """Forgets the timings of the step before."""
        self.step = step
        self.timings.clear()
        self._step_began = time.monotonic()

    @property
    def step_s(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._step_began

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """While a phase runs.

        Raises:
            OutOfMemoryStop: memory ran out where no part of the phase could make do with less.
        """
        for observer in self.observers:
            observer.begin(name, self.step)
        began = time.monotonic()
        with explained(f"the phase {name}", _ADVICE):
            yield
        self.timings[name] = time.monotonic() - began
        for observer in self.observers:
            observer.end(name, self.timings[name])

    def beat(self) -> None:
        """A sign of life of the phase that runs: a forward of the sampler, an update."""
        for observer in self.observers:
            observer.beat()
