"""The console of a process that is one of several ranks. Imports no torch.

Only rank 0 writes to it. Other ranks' output is dropped until the run directory has a log for it
(runs/follower.py).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import NoReturn

from jetrl.distributed.world import launched_rank

_STDIN, _STDOUT, _STDERR = 0, 1, 2
_STREAMS = {"stdin": "r", "stdout": "w", "stderr": "w"}
_said = threading.Lock()  # taken by the thread that prints how this process ends
_console = _STDERR  # for a rank other than 0 whose last words rank 0 does not print


def keep_streams() -> None:
    """Open the null device in place of closed standard streams, whose numbers files would get.

    A file with number 1 gets all that is printed. A user's code can close the streams at any time.
    """
    for descriptor, (name, mode) in zip((_STDIN, _STDOUT, _STDERR), _STREAMS.items(), strict=True):
        try:
            os.fstat(descriptor)
        except OSError:
            _open_null(descriptor)
        stream = getattr(sys, name)
        if stream is None or stream.closed:
            stream = open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def drop_output(descriptor: int = _STDOUT) -> None:
    """Send what is printed there from now on to the null device, also what is in a buffer."""
    keep_streams()
    _open_null(descriptor)


def _open_null(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:  # equal if the descriptor was closed and the lowest one free
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    os.set_inheritable(descriptor, True)


def tell(text: str) -> None:
    """Print a line on stderr about how the program ends, if stderr can be written."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def be_silent() -> None:
    """Drop what this process prints, from Python and from C."""
    global _console
    keep_streams()
    sys.stdout.flush()
    sys.stderr.flush()
    _console = os.dup(_STDERR)
    drop_output(_STDOUT)
    drop_output(_STDERR)


def tell_once(text: str) -> None:
    """Print why this process ends, unless another thread has printed it."""
    if not _said.acquire(blocking=False):
        return
    if launched_rank() == 0:
        tell(text)
        return
    with contextlib.suppress(OSError):
        os.write(_console, f"{text}\n".encode())


def exit_now(code: int) -> NoReturn:
    """End the process at once: Python's own exit may wait forever for threads of NCCL."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)
