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

_STDOUT, _STDERR = 1, 2
_said = threading.Lock()  # taken by the thread that prints how this process ends
_console = _STDERR  # for a rank other than 0 whose last words rank 0 does not print


def tell(text: str) -> None:
    """Print a line on stderr about how the program ends, if stderr can be written."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def be_silent() -> None:
    """Drop what this process prints, from Python and from C."""
    global _console
    sys.stdout.flush()
    sys.stderr.flush()
    _console = os.dup(_STDERR)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (_STDOUT, _STDERR):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


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
