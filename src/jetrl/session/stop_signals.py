"""Requests to stop: Ctrl-C, SIGTERM and the time limit. The loop asks after every step.

| | during sampling and scoring of a step | else |
| --- | --- | --- |
| Ctrl-C | the step is finished | the step is finished |
| SIGTERM | the step is given up: nothing has changed yet [1] | the step is finished |
| a second one | leaves at once | leaves at once |

[1] With partial rollouts (rollout.oversample) something has: the step is finished.

Then the checkpoint and the report are written. Who leaves at once leaves the last checkpoint as it
is: it is complete, or it has another name.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from jetrl.errors import Terminated

_STEPS_LOOKED_AT = 10  # for the time that the next one may take
_STDERR = 2


class StopSignals:
    """Why a run should stop, if it should: `reason` is "" while it should go on. `at_once`: without
    writing another checkpoint.

    Args:
        max_hours: wall time that this attempt may take; None: no limit.
        elapsed_s: wall time of the attempts before this one.
        began: when this one did, by time.monotonic: before its models were loaded.
    """

    def __init__(self, max_hours: float | None, elapsed_s: float, began: float) -> None:
        self.reason = ""
        self.at_once = False
        self._end: type[KeyboardInterrupt] | type[Terminated] | None = None
        self._may_give_up = False
        self._max_hours = max_hours
        self._elapsed_before = elapsed_s
        self._began = began
        self._step_times: deque[float] = deque(maxlen=_STEPS_LOOKED_AT)

    @property
    def elapsed_s(self) -> float:
        """Wall time over all attempts."""
        return self._elapsed_before + time.monotonic() - self._began

    def raise_signal(self) -> None:
        """KeyboardInterrupt or Terminated, if a signal asked to stop."""
        if self._end is not None:
            raise self._end

    def check_time(self, step_s: float, ending_s: float) -> None:
        """Asks to stop when a step as long as the longest of the last ones, and what follows the
        last one, would not end in time.

        Args:
            step_s: seconds of the step that just ended. ending_s: of the last checkpoint and the
                export; 0: not known yet.
        """
        self._step_times.append(step_s)
        if self._max_hours is None or self.reason:
            return
        longest = max(self._step_times)
        left = 3600 * self._max_hours - (time.monotonic() - self._began)
        if longest + ending_s > left:
            ending = f", and to write the model {ending_s:.0f} s" if ending_s >= 1 else ""
            self.reason = (
                f"run.max_hours = {self._max_hours}: {max(left, 0):.0f} s are left, and a step "
                f"took up to {longest:.0f} s{ending}"
            )

    @contextlib.contextmanager
    def giving_up(self, lasting: bool = False) -> Iterator[None]:
        """Work that SIGTERM may cut, by Terminated. lasting: it may not, since something of the
        work stays for the next step (partial rollouts), and a checkpoint of the step before must
        not know of it."""
        self._may_give_up = not lasting
        try:
            yield
        finally:
            self._may_give_up = False

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Handles Ctrl-C and SIGTERM meanwhile, in the main thread; elsewhere its owner does."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = [
            (signal.SIGINT, signal.signal(signal.SIGINT, self._interrupt)),
            (signal.SIGTERM, signal.signal(signal.SIGTERM, self._terminate)),
        ]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._end is not None:
            self._leave(KeyboardInterrupt)
        self._end, self.reason = KeyboardInterrupt, "interrupted by Ctrl-C"
        _say("stopping after this step; Ctrl-C again to leave at once")

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self._end is Terminated:
            self._leave(Terminated)
        self._end, self.reason = Terminated, "terminated by SIGTERM"
        if self._may_give_up:
            self._may_give_up = False
            _say("SIGTERM: this step is given up, the checkpoint is written")
            raise Terminated
        _say("SIGTERM: stopping after this step")

    def _leave(self, end: type[BaseException]) -> NoReturn:
        self.at_once = True
        raise end


def _say(text: str) -> None:
    # Not print: the signal may have come in the middle of one, which cannot be entered again.
    # Where nobody can be told (Ctrl-C has ended `| tee` as well) it stops all the same.
    with contextlib.suppress(OSError):
        os.write(_STDERR, f"\n{text}\n".encode())
