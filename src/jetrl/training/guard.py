"""The guard on numbers: an update whose loss, gradient or FP8 scales are not finite is not applied.

The numbers that are looked at are made on the device while the update runs, and read once, together
with the gradient norm that is read anyway. Two sums cover the rest: a logit that is NaN or infinite
makes the entropy so, and an FP8 scale that is not finite makes every value of its group NaN, so
what goes wrong anywhere in a forward or backward is seen in the loss or in the norm.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jetrl.errors import NonFiniteError
from jetrl.training.micro_batches import MicroBatch
from jetrl.training.optimizer import Optimizer, nonfinite_gradients

if TYPE_CHECKING:
    from jetrl.models.model import Model

logger = logging.getLogger(__name__)

MOST_IN_A_ROW = 5  # skipped updates; after that something else than bad luck is at work


@dataclass(frozen=True)
class NonFiniteUpdate:
    """An update that was not applied.

    index: its number in the step, from 0. model: what it was to change. values: the watched
    numbers, by name. parameters: masters with a gradient that is not finite. micro_batches: what it
    was made of (of a reward model's pairs none). repeat: runs its forwards and backwards again, and
    forgets the gradients.
    """

    index: int
    model: Model
    values: dict[str, float]
    parameters: list[str]
    micro_batches: Sequence[MicroBatch]
    repeat: Callable[[], None]

    @classmethod
    def of(
        cls,
        index: int,
        model: Model,
        optimizer: Optimizer,
        values: dict[str, float],
        accumulate: Callable[[], object],
        micro_batches: Sequence[MicroBatch] = (),
    ) -> NonFiniteUpdate:
        """The update whose gradients are there now, which are forgotten. accumulate: its forwards
        and backwards."""
        bad = nonfinite_gradients(model.named_masters())
        optimizer.zero_grad()

        def repeat() -> None:
            try:
                accumulate()
            finally:
                optimizer.zero_grad()

        return cls(index, model, values, bad, micro_batches, repeat)

    def __str__(self) -> str:
        bad = ", ".join(f"{n} is {v}" for n, v in self.values.items() if not math.isfinite(v))
        if not self.parameters:
            return f"{bad}; every gradient is finite"
        names = ", ".join(self.parameters[:3]) + (", ..." if self.parameters[3:] else "")
        if len(self.parameters) == 1:
            return f"{bad}; the gradient of {names} is not finite"
        return f"{bad}; the gradients of {len(self.parameters)} parameters are not finite ({names})"


class Guard:
    """Decides what becomes of an update.

    Args:
        action: train.on_nonfinite. lr: the setting of the learning rate that such updates have.

    Attributes:
        report: called with each refused update before anything is forgotten; returns what it found
            and saved, in words.
    """

    def __init__(self, action: Literal["stop", "skip"], lr: str = "train.lr") -> None:
        self._action, self._lr = action, lr
        self._in_a_row = 0
        self.report: Callable[[NonFiniteUpdate], str] = lambda refused: ""

    def passes(self, values: Mapping[str, float]) -> bool:
        """Whether the watched numbers of an update are all finite."""
        if not all(map(math.isfinite, values.values())):
            return False
        self._in_a_row = 0
        return True

    def refuse(self, update: NonFiniteUpdate) -> None:
        """Reports an update that is not applied. Returns if the run goes on without it.

        Raises:
            NonFiniteError: it does not: that is the setting, or too many were skipped in a row.
        """
        self._in_a_row += 1
        found = ". ".join(text for text in (str(update), self.report(update)) if text)
        if self._action == "stop":
            raise NonFiniteError(
                f"{found}. The update was not applied and the last checkpoint is good. Lower "
                f"{self._lr} or train.grad_clip, or leave such updates out with "
                "train.on_nonfinite=skip"
            )
        if self._in_a_row >= MOST_IN_A_ROW:
            raise NonFiniteError(
                f"{found}. This was update {self._in_a_row} in a row that was skipped: the run "
                "does not come out of it by itself; go back to an earlier checkpoint, with a "
                f"lower {self._lr}"
            )
        logger.warning("update skipped: %s", found)

    def state(self) -> Any:
        return {"in_a_row": self._in_a_row}

    def load_state(self, state: Any) -> None:
        self._in_a_row = state["in_a_row"]
