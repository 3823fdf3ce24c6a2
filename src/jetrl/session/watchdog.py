"""The watchdog: a run that shows no sign of life is ended, and what it was doing is written down.

Every phase begins, may show signs of life (each forward of the sampler is one), and ends. The
longest silence of a phase that came to its end is what it is judged by: `watchdog.factor` times
that, and at least `watchdog.min_s`, is a hang. Before a phase has ended once (kernels are compiled
then), and always where a phase waits for a disk, the limit is `watchdog.first_s`.

On a hang, hang.txt of the run directory gets the phase and step, the stack of every Python thread,
the sequences being sampled and the memory of the GPU; the attempt is noted as failed, and the
process ends with exit code 5. Nothing of the main thread is needed for it: that may be inside C
code that never returns. Should it hold the interpreter's lock as well, so that no other thread of
Python runs, a timer of faulthandler, which needs none, writes the stacks, and one of the system
ends the process with the same exit code (where there is none: faulthandler's, with 1).
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from jetrl.errors import EXIT_HANG
from jetrl.runs.storing import storing
from jetrl.session.exit_timer import ExitTimer
from jetrl.settings import WatchdogSettings

logger = logging.getLogger(__name__)

BETWEEN = "between phases"
DISK_PHASES = ("checkpoint", "export")  # one that took no time says nothing about the next
TICK_S = 1.0
LAST_WORDS_S = 20.0  # for what may itself hang: the state of a GPU, a file system
STACKS_S = 5.0  # for the stacks that faulthandler writes


class Watchdog:
    """Watches the phases of a run, as their observer, while it is open as a context.

    Args:
        file: hang.txt; it is removed at the end if nothing was written.
        state: more lines for it: sequences, memory. give_up: told why, before the process ends.
    """

    def __init__(
        self,
        settings: WatchdogSettings,
        file: Path,
        state: Callable[[], list[str]],
        give_up: Callable[[str], None],
    ) -> None:
        self._settings, self._path = settings, file
        self._state, self._give_up = state, give_up
        self._lock = threading.Lock()
        self._phase, self._step = BETWEEN, 0
        self._last_sign = time.monotonic()
        self._silence = 0.0  # the longest of the present phase
        self._longest: dict[str, float] = {}  # of each phase that has ended once
        self._over = threading.Event()
        self._file: IO[str] | None = None
        self._exit: ExitTimer | None = None

    def begin(self, phase: str, step: int) -> None:
        self._change(phase, step)

    def beat(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._silence = max(self._silence, now - self._last_sign)
            self._last_sign = now

    def end(self, phase: str, seconds: float) -> None:
        self.beat()
        self._longest[phase] = max(self._longest.get(phase, 0.0), self._silence)
        self._change(BETWEEN, self._step)

    def limit_s(self, phase: str) -> float:
        """Seconds of silence that are a hang in a phase."""
        if phase not in self._longest or phase in DISK_PHASES:
            return self._settings.first_s
        return max(self._settings.min_s, self._settings.factor * self._longest[phase])

    def __enter__(self) -> Self:
        if self._settings.enabled:
            with storing(self._path):
                self._file = open(self._path, "a", encoding="utf-8")
            self._exit = _exit_timer()
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is None:
            return
        with self._lock:
            self._over.set()
            faulthandler.cancel_dump_traceback_later()
            if self._exit is not None:
                self._exit.delete()
            self._file.close()
        with contextlib.suppress(OSError):  # a disk that takes nothing any more has ended the run
            if self._path.stat().st_size == 0:
                self._path.unlink()

    def _change(self, phase: str, step: int) -> None:
        with self._lock:
            self._phase, self._step = phase, step
            self._last_sign, self._silence = time.monotonic(), 0.0

    def _watch(self) -> None:
        tick = min(TICK_S, self._settings.min_s / 4, self._settings.first_s / 4)
        while not self._over.wait(tick):
            with self._lock:
                if self._over.is_set():
                    return
                phase, step = self._phase, self._step
                silent = time.monotonic() - self._last_sign
                limit = self.limit_s(phase)
                assert self._file is not None
                # Should this thread not come by again in time, the interpreter's lock is held.
                self._end_later(max(limit - silent, 0.0) + LAST_WORDS_S, self._file)
            if silent > limit:
                self._end_process(phase, step, silent, limit)

    def _end_later(self, seconds: float, file: IO[str]) -> None:
        """Writes the stacks and ends the process, unless it is put off before."""
        faulthandler.dump_traceback_later(seconds, exit=self._exit is None, file=file)
        if self._exit is not None:
            self._exit.set(seconds + STACKS_S)

    def _end_process(self, phase: str, step: int, silent: float, limit: float) -> None:
        file = self._file
        assert file is not None
        why = f"hang in {phase} of step {step}: no sign of life for {silent:.1f} s"
        try:
            self._end_later(LAST_WORDS_S, file)
            date = time.strftime("%Y-%m-%d %H:%M:%S %z")
            learnt = self._longest.get(phase)
            longest = "it had not ended before" if learnt is None else f"{learnt:.1f} s before"
            print(f"==== {date}  {why}", file=file)
            print(f"limit {limit:.1f} s; longest silence of this phase: {longest}", file=file)
            print(f"process {os.getpid()}; the stacks, of the main thread last:\n", file=file)
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            self._give_up(f"{why}; the stacks are in {self._path}")
            print("\n".join(["", *self._state()]), file=file)
            file.flush()
            os.fsync(file.fileno())
            print(f"stopped: {why}; see {self._path}", file=sys.__stderr__, flush=True)
        finally:
            os._exit(EXIT_HANG)


def _exit_timer() -> ExitTimer | None:
    if not ExitTimer.is_there():
        return None
    try:
        return ExitTimer(EXIT_HANG)
    except OSError as error:  # a container may allow none
        logger.warning("a hang that holds the interpreter's lock would end with code 1: %s", error)
        return None
