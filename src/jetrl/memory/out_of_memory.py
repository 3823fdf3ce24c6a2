"""Out of memory: recognizing the error, trying again with less, saying what to change."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Self, TypeVar

import torch

from jetrl.distributed.agreement import OUT_OF_MEMORY, agree
from jetrl.distributed.world import world
from jetrl.errors import OutOfMemoryStop

Result = TypeVar("Result")

# Of torch's allocator for CPUs, and of CUDA itself, as when a graph is made.
_MESSAGES = ("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OutOfMemoryStop):  # It quotes the allocator, and is final.
        return False
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


class Attempt:
    """The context of work that may run out of memory; any other error passes.

    Memory of the work is freed only after the context, since the traceback holds it. `problem` is
    one line of the allocator's message, "" if the work was done.
    """

    def __init__(self, catches: bool = True) -> None:
        self._catches, self.problem = catches, ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is None or not self._catches or not is_out_of_memory(error):
            return False
        self.problem = first_line(error)
        return True


def on_all_ranks(work: Callable[[], Result]) -> Result:
    """Run work without collectives; raise a MemoryError on all ranks if memory runs out on one."""
    with Attempt(catches=world().size > 1) as attempt:
        result = work()
    raise_on_all_ranks(attempt.problem)
    return result


def raise_on_all_ranks(problem: str) -> None:
    """Raise a MemoryError on every rank if `problem` is not empty on one; a collective."""
    problem = agree(OUT_OF_MEMORY, problem)
    if problem:
        raise MemoryError(problem)


def within_memory(
    work: Callable[[], Result], shrink: Callable[[str], None], together: bool = True
) -> Result:
    """Return the result of `work`, and repeat it with less whenever memory runs out.

    `shrink` makes the next attempt smaller, or raises; it is called with the allocator's message.
    With `together` all ranks repeat when memory runs out on one. Without it `work` has no
    collective and may run on only some ranks.
    """
    while True:
        with Attempt() as attempt:
            result = work()
        problem = agree(OUT_OF_MEMORY, attempt.problem) if together else attempt.problem
        if not problem:
            return result
        release()
        shrink(problem)


@contextlib.contextmanager
def explained(phase: str, advice: str) -> Iterator[None]:
    """Turn running out of memory into an OutOfMemoryStop that names phase and advice."""
    with Attempt() as attempt:
        yield
    if attempt.problem:
        raise OutOfMemoryStop(f"out of memory in {phase} ({attempt.problem}); {advice}")


def release() -> None:
    """Free memory that nothing refers to, including the cache of torch's allocator."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def first_line(error: BaseException) -> str:
    """Return the start of torch's long message, with the requested and the free bytes."""
    text = str(error).strip() or type(error).__name__
    return ". ".join(text.splitlines()[0].split(". ")[:3])
