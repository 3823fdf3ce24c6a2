"""Watchdog: detects a hung run and ends it, with its stacks in hang.txt.

A run hangs if it is silent for longer than `watchdog.factor` times the longest silence of the phase
so far, and at least `watchdog.min_s`. In a phase's first run (when kernels compile) and in disk
phases, the limit is `watchdog.first_s`.

On a hang, hang.txt receives phase and step, the stack of every Python thread, the sequences being
sampled and GPU memory use; the process ends with exit code 5. This does not need the main thread,
which may be stuck in C code. If it also holds the GIL, timers that need no lock write the stacks
and end the process.

A rank waiting for slower ranks does not hang. When one of those hangs, the others write their
stacks and end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Self

import torch

from jetrl.distributed.peers import peers
from jetrl.errors import EXIT_HANG
from jetrl.memory.device import bytes_outside_torch
from jetrl.models.policy import Policy
from jetrl.rollout.engine import RolloutEngine
from jetrl.runs.storage import storing
from jetrl.settings.sections import WatchdogSettings

logger = logging.getLogger(__name__)

BETWEEN = "between phases"
DISK_PHASES = ("checkpoint", "export")  # disk speed may change at any time
TICK_S = 1.0
LAST_WORDS_S = 20.0  # for reporting that may itself hang: GPU state, file systems
STACKS_S = 5.0  # for faulthandler to write the stacks
_SIGEV_THREAD = 2


class Watchdog:
    """Phase observer that detects hangs, while open as a context manager."""

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
        self._silence = 0.0  # longest silence in the current phase
        self._longest: dict[str, float] = {}  # longest silence per completed phase
        self._over = threading.Event()
        self._file: IO[str] | None = None
        self._exit: ExitTimer | None = None

    def beat(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._silence = max(self._silence, now - self._last_sign)
            self._last_sign = now

    def end(self, phase: str, seconds: float) -> None:
        self.beat()
        self._longest[phase] = max(self._longest.get(phase, 0.0), self._silence)
        self.begin(BETWEEN, self._step)

    def limit_s(self, phase: str) -> float:
        """Return the seconds of silence that count as a hang in a phase."""
        if phase not in self._longest or phase in DISK_PHASES:
            return self._settings.first_s
        return max(self._settings.min_s, self._settings.factor * self._longest[phase])

    def __enter__(self) -> Self:
        if self._settings.enabled:
            with storing(self._path):
                self._file = open(self._path, "a", encoding="utf-8")
            try:
                self._exit = ExitTimer(EXIT_HANG)
            except (OSError, AttributeError) as error:  # may be forbidden in a container
                logger.warning("a hang that holds the GIL would exit with code 1: %s", error)
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is None:
            return
        with self._lock:
            self._over.set()
            faulthandler.cancel_dump_traceback_later()
            if self._exit is not None:
                self._exit.delete()
            self._file.close()
        with contextlib.suppress(OSError):  # a full disk has ended the run
            if self._path.stat().st_size == 0:
                self._path.unlink()

    def begin(self, phase: str, step: int) -> None:
        with self._lock:
            self._phase, self._step = phase, step
            self._last_sign, self._silence = time.monotonic(), 0.0
        peers().here("" if phase == BETWEEN else phase, step)

    def _watch(self) -> None:
        """Check for silence until the context ends; body of the watchdog thread."""
        # Short limits (in tests) need a shorter tick.
        tick = min(TICK_S, self._settings.min_s / 4, self._settings.first_s / 4)
        while not self._over.wait(tick):
            with self._lock:
                if self._over.is_set():
                    return
                phase, step = self._phase, self._step
                silent = time.monotonic() - self._last_sign
                limit = self.limit_s(phase)
                assert self._file is not None
                # If this thread is not scheduled in time, the GIL is held.
                self._end_later(max(limit - silent, 0.0) + LAST_WORDS_S, self._file)
            # A rank waiting for a slower one does not hang.
            if silent > limit and not peers().waits_for_others():
                self._end_process(phase, step, silent, limit)

    def _end_later(self, seconds: float, file: IO[str]) -> None:
        faulthandler.dump_traceback_later(seconds, exit=self._exit is None, file=file)
        if self._exit is not None:
            self._exit.set(seconds + STACKS_S)

    def _end_process(self, phase: str, step: int, silent: float, limit: float) -> None:
        """Write hang.txt and end the process, regardless of the main thread."""
        file = self._file
        assert file is not None
        why = f"hang in {phase} of step {step}: no sign of life for {silent:.1f} s"
        try:
            # The report itself may hang: set timers that end the process anyway.
            self._end_later(LAST_WORDS_S, file)
            before = self._longest.get(phase)
            longest = "it has never completed" if before is None else f"{before:.1f} s before"
            self._print_stacks(
                file, f"{why}\nlimit {limit:.1f} s; longest silence of this phase: {longest}"
            )
            # Report first what cannot hang, then what needs the disk, then GPU memory.
            self._give_up(f"{why}; the stacks are in {self._path}")
            print("\n".join(["", *self._state()]), file=file)
            file.flush()
            os.fsync(file.fileno())
            stopped = f"stopped: {why}; see {self._path}"
            print(stopped, file=sys.__stderr__, flush=True)
            peers().failed(stopped, EXIT_HANG, hangs=True)
        finally:
            os._exit(EXIT_HANG)

    def write_stacks(self, reason: str) -> None:
        """Write this rank's stacks when another rank hangs."""
        with self._lock:
            if self._file is not None and not self._over.is_set():
                self._print_stacks(self._file, reason)

    def _print_stacks(self, file: IO[str], why: str) -> None:
        print(f"==== {time.strftime('%Y-%m-%d %H:%M:%S %z')}  {why}", file=file)
        print(f"process {os.getpid()}; the stacks, of the main thread last:\n", file=file)
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def hang_state(engine: RolloutEngine, policy: Policy) -> list[str]:
    """Return lines for hang.txt on sequences and memory, without GPU calls, which may hang."""
    sequences = list(engine.sequences)
    num_finished = sum(sequence.finished for sequence in sequences)
    # A sequence waits for its environment, for KV pages or for its next forward.
    lines = [f"sequences: {len(sequences)}, of these {num_finished} finished"]
    for sequence in sequences:
        if sequence.finished:
            continue
        state = "waits for its environment" if sequence.awaiting else "runs"
        lines.append(
            f"  {sequence.index}: {state if sequence.pages else 'waits for pages'}; prompt "
            f"{len(sequence.prompt)} tokens, drawn {len(sequence.generated)} of "
            f"{sequence.rules.max_tokens}, computed {sequence.num_computed}, "
            f"{len(sequence.pages)} pages"
        )
    if policy.device.type == "cuda":
        lines += ["", torch.cuda.memory_summary(policy.device)]
        lines.append(f"KV pages and graphs, in addition: {bytes_outside_torch() / 2**30:.2f} GiB")
    return lines


class ExitTimer:
    """Timer that ends the process with an exit code, unless reset or deleted before.

    A POSIX timer whose C-library thread calls `_exit`: it works even while the GIL is held forever.
    (faulthandler's timer only supports exit code 1.) Raises OSError or AttributeError if the system
    provides no timer.
    """

    def __init__(self, exit_code: int) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        function = ctypes.cast(self._library._exit, ctypes.c_void_p).value
        # glibc's struct sigevent: argument, no signal, notification type, function.
        event = struct.pack("PiiP40x", exit_code, 0, _SIGEV_THREAD, function)
        self._timer = ctypes.c_void_p()
        own = ctypes.byref(self._timer)
        _check(self._library.timer_create(time.CLOCK_MONOTONIC, event, own))

    def set(self, seconds: float) -> None:
        """End the process after this many seconds."""
        nanoseconds = max(1, round(1e9 * seconds))  # 0 would disarm the timer
        # struct itimerspec: seconds and nanoseconds of the interval (0), then of the delay.
        whole, rest = divmod(nanoseconds, 10**9)
        times = struct.pack("4l", 0, 0, whole, rest)
        _check(self._library.timer_settime(self._timer, 0, times, None))

    def delete(self) -> None:
        """Delete the timer."""
        _check(self._library.timer_delete(self._timer))


def _check(result: int) -> None:
    """Raise the error of a C-library timer function from its `result`."""
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"a timer of the system: {os.strerror(error)}")
