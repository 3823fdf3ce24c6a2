"""Decisions that all processes of a run make together.

A process that stopped, halved a size or skipped an update on its own would leave the others
waiting, or would train a different model.
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
    """A question answered by all processes, and how their answers, by rank, are combined."""

    question: str
    combine: Callable[[Sequence[Value]], Value]


def _first_text(answers: Sequence[str]) -> str:
    """Return the first non-empty text, or ""."""
    return next(filter(None, answers), "")


OUT_OF_MEMORY = Decision[str]("how memory ran out, empty if it did not", _first_text)
STOP = Decision[str]("why the run stops after this step, empty if it continues", _first_text)
UPDATE_IS_FINITE = Decision[bool]("whether the numbers of an update are all finite", all)
FIRST_NONFINITE = Decision[str]("the first value that was not finite, empty if none", _first_text)
LARGEST_SIZE = Decision[int]("the largest size of work that fits everywhere", min)


def agree(decision: Decision[Value], answer: Value) -> Value:
    """Return the common answer; every process calls this with the same decision."""
    return decision.combine(world().gather(decision.question, answer))


@contextlib.contextmanager
def ending_together(what: str, *others: type[BaseException]) -> Iterator[None]:
    """Raise one process's UserError or RunStopped in all; the body must not use collectives."""
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
