"""Stop requests: Ctrl-C, SIGTERM and the time limit.

| | while a step samples or scores | otherwise |
| --- | --- | --- |
| Ctrl-C | finish the step | finish the step |
| SIGTERM | abandon the step: no state has changed yet [1] | finish the step |
| second signal | exit immediately | exit immediately |

[1] With rollout.oversample some state has changed: finish the step.

All ranks stop after the same step, regardless of which one received the signal. Then checkpoint and
report are written. An immediate exit leaves the last checkpoint unchanged.
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

from jetrl.distributed.agreement import STOP, agree
from jetrl.distributed.peers import peers
from jetrl.errors import Terminated

_STEPS_LOOKED_AT = 10  # to estimate the duration of the next step
_STDERR = 2
_CTRL_C, _SIGTERM = "interrupted by Ctrl-C", "terminated by SIGTERM"


class StepGivenUp(Terminated):
    """SIGTERM during sampling or scoring: the run ends after the previous step."""


_RAISED: dict[str, type[BaseException]] = {_CTRL_C: KeyboardInterrupt, _SIGTERM: Terminated}
"""Exception for each reason, raised once the run is saved."""


class StopSignals:
    """Stop requests for a run, and their `reason` ("": the run continues).

    `at_once`: a second signal ended the run, without another checkpoint.
    """

    def __init__(self, max_hours: float | None, elapsed_s: float, began: float) -> None:
        self.reason, self.at_once, self._may_give_up = "", False, False
        self._received: type[BaseException] | None = None  # first signal of this process
        self._max_hours, self._elapsed_before, self._began = max_hours, elapsed_s, began
        self._step_times: deque[float] = deque(maxlen=_STEPS_LOOKED_AT)

    @property
    def elapsed_s(self) -> float:
        """Wall time of all attempts, in seconds."""
        return self._elapsed_before + time.monotonic() - self._began

    def decide(self) -> bool:
        """Decide on all ranks together if the run stops here; `reason` tells why."""
        agreed = agree(STOP, self.reason)
        self.reason = agreed or self.reason  # a signal may have arrived during the collective
        return bool(agreed)

    def raise_signal(self) -> None:
        """Raise KeyboardInterrupt or Terminated if a signal asked to stop."""
        if self.reason in _RAISED:
            raise _RAISED[self.reason]

    def check_time(self, step_s: float, ending_s: float) -> None:
        """Request a stop if another step plus `ending_s` would exceed the time limit."""
        # Use the slowest of the last steps, since completion lengths vary.
        self._step_times.append(step_s)
        if self._max_hours is None or self.reason:
            return
        longest = max(self._step_times)
        left = 3600 * self._max_hours - (time.monotonic() - self._began)
        if longest + ending_s > left:
            ending = f", and writing the model {ending_s:.0f} s" if ending_s >= 1 else ""
            self.reason = (
                f"run.max_hours = {self._max_hours}: {max(left, 0):.0f} s are left, and a step "
                f"took up to {longest:.0f} s{ending}"
            )

    @contextlib.contextmanager
    def giving_up(self, possible: bool = True) -> Iterator[None]:
        """Let SIGTERM raise StepGivenUp within this context, if `possible`."""
        # The handler raises only here, while no state has changed.
        self._may_give_up = possible
        try:
            yield
        finally:
            self._may_give_up = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle Ctrl-C and SIGTERM within this context, on the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        interrupt = signal.signal(signal.SIGINT, self._interrupt)
        terminate = signal.signal(signal.SIGTERM, self._terminate)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, interrupt)
            signal.signal(signal.SIGTERM, terminate)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Request a stop after the step; exit immediately on a second signal."""
        if self._received is not None:
            self.at_once = True
            raise KeyboardInterrupt
        self._received, self.reason = KeyboardInterrupt, _CTRL_C
        _say("stopping after this step; Ctrl-C again to exit immediately")

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """Abandon the step or stop after it; exit immediately on a second SIGTERM."""
        # torchrun sends SIGTERM when a rank is lost: then report the lost rank.
        if peers().interrupted():
            return
        if self._received is Terminated:
            self.at_once = True
            raise Terminated
        self._received, self.reason = Terminated, _SIGTERM
        if self._may_give_up:
            self._may_give_up = False
            _say("SIGTERM: abandoning this step and writing the checkpoint")
            raise StepGivenUp
        _say("SIGTERM: stopping after this step")


def _say(text: str) -> None:
    """Write a line to standard error from a signal handler."""
    # Do not use print, which is not reentrant. If nobody reads stderr (Ctrl-C also ended `| tee`),
    # the run still stops.
    with contextlib.suppress(OSError):
        os.write(_STDERR, f"\n{text}\n".encode())
