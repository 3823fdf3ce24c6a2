"""Requests to stop a run: Ctrl-C, SIGTERM and the time limit.

| | during sampling and scoring of a step | else |
| --- | --- | --- |
| Ctrl-C | the step is finished | the step is finished |
| SIGTERM | the step is given up: nothing has changed yet [1] | the step is finished |
| a second one | leaves at once | leaves at once |

[1] With partial rollouts (rollout.oversample) something has: the step is finished.

All ranks stop after the same step, whichever rank the signal came to. Then the checkpoint and the
report are written. A run that is left at once leaves the last checkpoint as it was.
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

_STEPS_LOOKED_AT = 10  # for the time that the next one may take
_STDERR = 2
_CTRL_C, _SIGTERM = "interrupted by Ctrl-C", "terminated by SIGTERM"


class StepGivenUp(Terminated):
    """SIGTERM while a step was sampled or scored: the run ends after the step before."""


_RAISED: dict[str, type[BaseException]] = {_CTRL_C: KeyboardInterrupt, _SIGTERM: Terminated}
"""What each reason raises when the run has been saved."""


class StopSignals:
    """The requests to stop a run after its current step, and the `reason` ("": it continues).

    `at_once`: a second signal has ended the run, without another checkpoint.
    """

    def __init__(self, max_hours: float | None, elapsed_s: float, began: float) -> None:
        self.reason, self.at_once, self._may_give_up = "", False, False
        self._received: type[BaseException] | None = None  # this process's own first signal
        self._max_hours, self._elapsed_before, self._began = max_hours, elapsed_s, began
        self._step_times: deque[float] = deque(maxlen=_STEPS_LOOKED_AT)

    @property
    def elapsed_s(self) -> float:
        """The wall time of all attempts, in seconds."""
        return self._elapsed_before + time.monotonic() - self._began

    def decide(self) -> bool:
        """Decide, alike in all processes, whether the run stops here; `reason` says why."""
        agreed = agree(STOP, self.reason)
        self.reason = agreed or self.reason  # a signal may have come while the others answered
        return bool(agreed)

    def raise_signal(self) -> None:
        """Raise KeyboardInterrupt or Terminated, if a signal asked to stop."""
        if self.reason in _RAISED:
            raise _RAISED[self.reason]

    def check_time(self, step_s: float, ending_s: float) -> None:
        """Ask to stop if a step, and `ending_s` for checkpoint and export, would end too late."""
        # The slowest of the last steps, since lengths of completions vary.
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
    def giving_up(self, possible: bool = True) -> Iterator[None]:
        """Let SIGTERM cut the body of the `with`, by StepGivenUp, unless that is not `possible`."""
        # The handler raises only here, where nothing has changed yet.
        self._may_give_up = possible
        try:
            yield
        finally:
            self._may_give_up = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle Ctrl-C and SIGTERM in the body of the `with`, if this is the main thread."""
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
        """Ask to stop after the step; leave at once if any signal asked before."""
        if self._received is not None:
            self.at_once = True
            raise KeyboardInterrupt
        self._received, self.reason = KeyboardInterrupt, _CTRL_C
        _say("stopping after this step; Ctrl-C again to leave at once")

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """Give the step up or ask to stop after it; leave at once on a second SIGTERM."""
        # torchrun sends SIGTERM when a rank is lost: then that is what ends this one.
        if peers().interrupted():
            return
        if self._received is Terminated:
            self.at_once = True
            raise Terminated
        self._received, self.reason = Terminated, _SIGTERM
        if self._may_give_up:
            self._may_give_up = False
            _say("SIGTERM: this step is given up, the checkpoint is written")
            raise StepGivenUp
        _say("SIGTERM: stopping after this step")


def _say(text: str) -> None:
    """Write a line to standard error from within a signal handler."""
    # Not print: the signal may have come in the middle of one, which cannot be entered again.
    # Where nobody reads (Ctrl-C has ended `| tee` as well) the run stops all the same.
    with contextlib.suppress(OSError):
        os.write(_STDERR, f"\n{text}\n".encode())
