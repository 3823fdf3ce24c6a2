"""The process that goes through a run's launches, and has the kernels compiled by its own copies.

It is a copy of the run's process (`os.fork`), which has all modules and begins at once; it uses no
GPU. A copy of this copy compiles one kernel, exactly as the launch would have, and ends. There are
at most as many at a time as there are cores, and all end with the run, however it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from jetrl.compiling.launches import Work, go_through
from jetrl.distributed.world import ONE_PROCESS, set_world

if TYPE_CHECKING:
    from jetrl.compiling.stand_in_hopper import Kernel

_MOST_PROCESSES = 16
MOST_TOLD = 2000  # Characters of a problem.
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


class Copies:
    """The copies of this process that compile, each one kernel."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._running: dict[int, str] = {}
        self.failed: list[str] = []
        self.started = 0

    def compile(self, kernel: Kernel) -> None:
        """Give a kernel to a copy, and wait for another's end where there are too many."""
        while len(self._running) >= self.most:
            self._wait()
        self.started += 1
        copy = os.fork()
        if copy == 0:
            os._exit(_compile(kernel))
        self._running[copy] = kernel.name

    def finish(self) -> None:
        while self._running:
            self._wait()

    def _wait(self) -> None:
        """Wait for the end of a copy."""
        copy, status = os.wait()
        name = self._running.pop(copy, "")
        if status:
            self.failed.append(f"{name} was not compiled ahead")


def _compile(kernel: Kernel) -> int:
    """Compile a kernel and return the exit status of the copy."""
    end_with_parent()
    try:
        kernel.compile()
    except BaseException:  # A copy must never return into the work of its original.
        return 1
    return 0


def end_with_parent() -> None:
    """Let this process be killed when the one that started it ends, however it ends."""
    ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)


def run_apart(compile_kernels: Callable[[], dict[str, Any]], answers: int) -> NoReturn:
    """Have the kernels of a run compiled, report, and end: all that this copy of the run does."""
    try:
        os.setsid()  # so that the run can end this copy with its own, and Ctrl-C is for the run
        end_with_parent()
        os.nice(5)  # The run itself, which reads weights meanwhile, goes first.
        _forget_the_run()
        report = compile_kernels()
        with os.fdopen(answers, "w", encoding="utf-8") as pipe:
            json.dump(report, pipe)
    finally:  # Nothing of the run may be done twice.
        os._exit(0)


def compile_all(work: Work) -> dict[str, Any]:
    """Compile the kernels of a run, and return a report; this process is of no other use then."""
    began = time.monotonic()
    copies = Copies(min(_MOST_PROCESSES, len(os.sched_getaffinity(0))))
    copies.failed += list_launches(work, copies.compile)
    listed_s = time.monotonic() - began
    copies.finish()
    return {
        "kernels": copies.started,
        "processes": copies.most,
        "failed": copies.failed,
        "listed_s": round(listed_s, 2),
        "seconds": round(time.monotonic() - began, 2),
    }


def list_launches(
    work: Work,
    hand_over: Callable[[Kernel], None],
    multiplied: Callable[[int, int, int], object] = lambda *_: None,
) -> list[str]:
    """Go through the launches of a run without a GPU, and return what went wrong."""
    from jetrl.compiling.stand_in_hopper import stand_in

    try:
        with stand_in(work.multiprocessors, hand_over, multiplied):
            go_through(work)
    except Exception as error:  # What was gone through is compiled, the rest where it is launched.
        told = "".join(traceback.format_exception(error))
        return [f"the launches end early: {told[-MOST_TOLD:]}"]
    return []


def _forget_the_run() -> None:
    """Let this copy be a process by itself: one rank, one thread, silent, unmoved by signals."""
    set_world(ONE_PROCESS)
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nowhere, standard)
