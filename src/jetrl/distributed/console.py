"""Console output of a rank. Does not import torch.

Only rank 0 writes to the console. Output of other ranks is dropped until the run directory has a
log for it (runs/writer.py).
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
_said = threading.Lock()  # held by the thread that prints how this process ends
_console = _STDERR  # for last words of a rank that rank 0 does not print


def keep_streams() -> None:
    """Open /dev/null in place of closed standard streams, whose descriptors files would get.

    A file that got descriptor 1 would receive all output. User code can close the streams at any
    time.
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
    """Redirect a stream to /dev/null from now on, including buffered output."""
    keep_streams()
    _open_null(descriptor)


def _open_null(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:  # equal if the descriptor was closed and is the lowest free one
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    os.set_inheritable(descriptor, True)


def tell(text: str) -> None:
    """Print a line on stderr about how the program ends, if stderr can be written."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def be_silent() -> None:
    """Drop all output of this process, from Python and from C."""
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
    """Exit immediately: a normal interpreter exit may wait forever for NCCL threads."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)
