"""Requests to stop: Ctrl-C and the time limit. The loop asks after every step."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = "interrupted"


class Stops:
    """Why a run should stop, if it should: `reason` is "" while it should go on.

    Args:
        max_hours: the limit of wall time over all attempts; None: no limit.
        elapsed_s: wall time of the attempts before this one.
    """

    def __init__(self, max_hours: float | None, elapsed_s: float) -> None:
        self.reason = ""
        self._max_hours = max_hours
        self._began = time.monotonic() - elapsed_s

    @property
    def elapsed_s(self) -> float:
        """Wall time over all attempts."""
        return time.monotonic() - self._began

    @property
    def interrupted(self) -> bool:
        return self.reason == INTERRUPTED

    def check_time(self) -> None:
        """Asks to stop when the time limit is reached."""
        limit = self._max_hours
        if limit is not None and self.elapsed_s / 3600 >= limit and not self.reason:
            self.reason = f"run.max_hours = {limit} reached"

    @contextlib.contextmanager
    def signals(self, note: Callable[[str], None]) -> Iterator[None]:
        """The first Ctrl-C asks the loop to stop after this step, the second one leaves at once.
        `note` is told of the first."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.reason = INTERRUPTED
            note("stopping after this step; Ctrl-C again to leave at once")

        try:
            before = signal.signal(signal.SIGINT, stop)
        except ValueError:  # not the main thread: its owner handles signals
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
