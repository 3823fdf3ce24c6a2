"""Out of memory: recognizing the error, trying again with less, saying what to change."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from jetrl.distributed.agreement import OUT_OF_MEMORY, agree
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


def within_memory(attempt: Callable[[], Result], shrink: Callable[[str], None]) -> Result:
    """Return what `attempt` returns, trying again with less work whenever memory runs out.

    Args:
        attempt: The work, which can be begun again from the start.
        shrink: Makes the next attempt need less memory, or raises because it cannot; called with
            one line of the allocator's message.
    """
    while True:
        problem = ""
        try:
            result = attempt()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            problem = _first_line(error)
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
        problem = _first_line(error)
    else:
        return
    raise OutOfMemoryStop(f"out of memory in {phase} ({problem}); {advice}")


def release() -> None:
    """Give back memory that nothing refers to, also what torch's allocator keeps for later."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _first_line(error: BaseException) -> str:
    """Return the start of torch's long message: how much was asked for, and how much is free."""
    text = str(error).strip() or type(error).__name__
    return ". ".join(text.splitlines()[0].split(". ")[:3])
