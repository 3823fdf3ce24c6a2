"""Decisions that every process of a run has to take alike.

A process that stops, halves a size or skips an update alone would leave the others waiting for it,
or train another model than they do. Each such decision is a `Decision`, which says how the answers
of all processes become one, and is taken by calling `agree`. A run of one process has one answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from jetrl.distributed.world import world
from jetrl.errors import RunStopped, UserError

Value = TypeVar("Value", bool, int, str)


@dataclass(frozen=True)
class Decision(Generic[Value]):
    """A question that all processes answer, and the rule that makes one answer of theirs.

    Attributes:
        combine: Maps the answers, one of each process in the order of ranks, to the common one. A
            single answer is its own result.
    """

    question: str
    combine: Callable[[Sequence[Value]], Value]


def _first_text(answers: Sequence[str]) -> str:
    """Return the first text that is not empty, or an empty one."""
    return next(filter(None, answers), "")


OUT_OF_MEMORY = Decision[str]("how memory ran out, empty where it did not", _first_text)
STOP = Decision[str]("why the run stops after this step, empty where it goes on", _first_text)
UPDATE_IS_FINITE = Decision[bool]("whether the numbers of an update are all finite", all)
LARGEST_SIZE = Decision[int]("the largest size of work that fits everywhere", min)


def agree(decision: Decision[Value], answer: Value) -> Value:
    """Return the answer that all processes of the run take.

    Every process calls this function, with the same decision.
    """
    return decision.combine(world().gather(decision.question, answer))


@contextlib.contextmanager
def ending_together(what: str, *others: type[BaseException]) -> Iterator[None]:
    """Let all processes leave the body in the same way: an error of one is raised by all.

    A body that ends early, by a UserError or by RunStopped, waits here for the other processes. The
    body itself may not wait for them.
    """
    if world().size == 1:
        yield
        return
    error: BaseException | None = None
    told: tuple[type[BaseException], ...] = (UserError, RunStopped, *others)
    try:
        yield
    except told as raised:
        error = raised
    errors = [one for one in world().gather(f"the end of {what}", error) if one is not None]
    if errors:
        raise errors[0]
