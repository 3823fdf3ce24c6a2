"""Out of memory: recognizing the error, trying again with less, saying what to change."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from jetrl.distributed.agreement import OUT_OF_MEMORY, agree
from jetrl.distributed.world import world
from jetrl.errors import OutOfMemoryStop

Result = TypeVar("Result")

_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the GPU's or the CPU's memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OutOfMemoryStop):  # It quotes the allocator, and is final.
        return False
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


def on_all_ranks(work: Callable[[], Result]) -> Result:
    """Return what `work` returns, and raise on all ranks where memory runs out on one.

    Args:
        work: Work of this rank alone, without a collective that others would wait in.

    Raises:
        MemoryError: Memory ran out on a rank of several.
    """
    if world().size == 1:
        return work()
    problem, results = "", []
    try:
        results.append(work())
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        problem = first_line(error)
    raise_on_all_ranks(problem)
    return results[0]


def raise_on_all_ranks(problem: str) -> None:
    """Raise on every rank where memory has run out on one; every rank calls this function.

    Args:
        problem: One line of the allocator's message; empty where memory has not run out here.

    Raises:
        MemoryError: Memory ran out on a rank.
    """
    problem = agree(OUT_OF_MEMORY, problem)
    if problem:
        raise MemoryError(problem)


def within_memory(
    attempt: Callable[[], Result], shrink: Callable[[str], None], together: bool = True
) -> Result:
    """Return what `attempt` returns, trying again with less work whenever memory runs out.

    Args:
        shrink: Makes the next attempt need less memory, or raises because it cannot; called with
            one line of the allocator's message.
        together: Whether all ranks try again when memory runs out on one; if not, `attempt` has no
            collective, and may be called on some ranks only.
    """
    while True:
        problem = ""
        try:
            result = attempt()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            problem = first_line(error)
        if together:
            problem = agree(OUT_OF_MEMORY, problem)
        if not problem:
            return result
        # Not inside the handler: until it ends, the traceback holds what the attempt had made.
        release()
        shrink(problem)


@contextlib.contextmanager
def explained(phase: str, advice: str) -> Iterator[None]:
    """Turn running out of memory, where nothing can be made smaller, into a clear end of the run.

    Raises:
        OutOfMemoryStop: Names the phase and what to change.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        problem = first_line(error)
    else:
        return
    raise OutOfMemoryStop(f"out of memory in {phase} ({problem}); {advice}")


def release() -> None:
    """Give back memory that nothing refers to, also what torch's allocator keeps for later."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def first_line(error: BaseException) -> str:
    """Return the start of torch's long message: how much was asked for, and how much is free."""
    text = str(error).strip() or type(error).__name__
    return ". ".join(text.splitlines()[0].split(". ")[:3])
