"""Ends the process at a time, without the interpreter: a timer of the system whose thread calls C's
`_exit`.

For what holds the interpreter's lock for good: no thread of Python runs then, no signal handler of
Python either, and faulthandler's timer, which does run, knows one exit code alone. POSIX has the
timer (timer_create with SIGEV_THREAD); it costs a thread of the C library, which sleeps.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

_SIGEV_THREAD = 2


class _Event(ctypes.Structure):
    """glibc's struct sigevent: 64 bytes."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_byte * 32),
    ]


class _Times(ctypes.Structure):
    """struct itimerspec: seconds and nanoseconds of the interval (none), then until it is due."""

    _fields_ = [
        ("interval", ctypes.c_long * 2),
        ("due", ctypes.c_long * 2),
    ]


class ExitTimer:
    """Ends the process with an exit code, unless it is set again or deleted before.

    Raises:
        OSError: the system gives none.
    """

    def __init__(self, exit_code: int) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        function = ctypes.cast(self._library._exit, ctypes.c_void_p)
        event = _Event(exit_code, 0, _SIGEV_THREAD, function)
        self._timer = ctypes.c_void_p()
        clock = ctypes.c_int(time.CLOCK_MONOTONIC)
        self._check(
            self._library.timer_create(clock, ctypes.byref(event), ctypes.byref(self._timer))
        )

    @staticmethod
    def is_there() -> bool:
        """Whether this system's C library is known to have it as it is called here."""
        return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "timer_create")

    def set(self, seconds: float) -> None:
        """The process ends this long from now."""
        nanoseconds = max(1, round(1e9 * seconds))  # 0 would stop the timer
        times = _Times((0, 0), divmod(nanoseconds, 10**9))
        self._check(self._library.timer_settime(self._timer, 0, ctypes.byref(times), None))

    def delete(self) -> None:
        self._check(self._library.timer_delete(self._timer))

    def _check(self, result: int) -> None:
        if result != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"a timer of the system: {os.strerror(error)}")
