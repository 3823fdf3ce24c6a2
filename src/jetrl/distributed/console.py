"""The console of a process that is one of several ranks, and its last line there.

Rank 0 speaks to the user. The other ranks of a command write nothing to the console: what they
print goes nowhere until the run directory has a log of theirs (runs/follower.py). This module
imports no torch.
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
_console = _STDERR  # where a rank other than the first prints what nobody prints for it


def tell(text: str) -> None:
    """Print a line on stderr about how the program ends, if stderr can be written.

    Where it cannot, the exit code alone says how the program ended, and stays what it is.
    """
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def be_silent() -> None:
    """Let this process print nothing, neither from Python nor from the libraries below it."""
    global _console
    sys.stdout.flush()
    sys.stderr.flush()
    _console = os.dup(_STDERR)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (_STDOUT, _STDERR):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def tell_once(text: str) -> None:
    """Print the message of this process's end, if no other thread has printed one."""
    if not _said.acquire(blocking=False):
        return
    if launched_rank() == 0:
        tell(text)
        return
    with contextlib.suppress(OSError):
        os.write(_console, f"{text}\n".encode())


def exit_now(code: int) -> NoReturn:
    """End the process at once, since Python's own end may wait for what never comes.

    Threads of NCCL wait for other ranks; threads that watch them would be killed within C++.
    """
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)
