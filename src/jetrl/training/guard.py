"""The guard on numbers: an update whose loss, gradient or FP8 scales are not finite is not applied.

The numbers that the guard watches are made on the device while the update runs, and read once,
together with the gradient norm that is read anyway. Two sums cover the rest: a logit that is NaN or
infinite makes the entropy so, and an FP8 scale that is not finite makes every value of its group
NaN, so what goes wrong anywhere in a forward or backward is seen in the loss or in the norm.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jetrl.distributed.agreement import UPDATE_IS_FINITE, agree
from jetrl.errors import NonFiniteError

if TYPE_CHECKING:
    from jetrl.models.model import Model

logger = logging.getLogger(__name__)

MOST_IN_A_ROW = 5  # skipped updates; after that something else than bad luck is at work


@dataclass(frozen=True)
class NonFiniteUpdate:
    """An update that was not applied because its loss or gradient is not finite.

    Attributes:
        index: The number of the update in its training step, from 0.
        micro_batches: The data of the update: `MicroBatch`es, or lists of a reward model's pairs.
    """

    index: int
    model: Model
    values: dict[str, float]
    parameters: list[str]
    micro_batches: Sequence[Any]
    repeat: Callable[[], None]

    def __str__(self) -> str:
        numbers = ", ".join(f"{n} is {v}" for n, v in self.values.items() if not math.isfinite(v))
        if not self.parameters:
            return f"{numbers}; every gradient is finite"
        names = ", ".join(self.parameters[:3]) + (", ..." if self.parameters[3:] else "")
        if len(self.parameters) == 1:
            return f"{numbers}; the gradient of {names} is not finite"
        count = len(self.parameters)
        return f"{numbers}; the gradients of {count} parameters are not finite ({names})"


class Guard:
    """Decides what becomes of each update of one model.

    Attributes:
        report: Called with each refused update before anything of it is forgotten; returns what was
            noticed and saved, in words.
    """

    def __init__(self, action: Literal["stop", "skip"], lr: str = "train.lr") -> None:
        self._action, self._lr = action, lr
        self._in_a_row = 0
        self.report: Callable[[NonFiniteUpdate], str] = lambda refused: ""

    def passes(self, values: Mapping[str, float]) -> bool:
        """Return whether the watched numbers of an update are all finite."""
        if not agree(UPDATE_IS_FINITE, all(map(math.isfinite, values.values()))):
            return False
        self._in_a_row = 0
        return True

    def refuse(self, update: NonFiniteUpdate) -> None:
        """Report an update that is not applied; return if the run continues without it.

        Raises:
            NonFiniteError: The run stops: that is the setting, or too many updates were skipped in
                a row.
        """
        self._in_a_row += 1
        problem = ". ".join(text for text in (str(update), self.report(update)) if text)
        if self._action == "stop":
            raise NonFiniteError(
                f"{problem}. The update was not applied and the last checkpoint is good. Lower "
                f"{self._lr} or train.grad_clip, or leave such updates out with "
                "train.on_nonfinite=skip"
            )
        if self._in_a_row >= MOST_IN_A_ROW:
            raise NonFiniteError(
                f"{problem}. This was update {self._in_a_row} in a row that was skipped: the run "
                "does not come out of it by itself; go back to an earlier checkpoint, with a "
                f"lower {self._lr}"
            )
        logger.warning("update skipped: %s", problem)

    def state(self) -> Any:
        """Return what a checkpoint keeps of the guard."""
        return {"in_a_row": self._in_a_row}

    def load_state(self, state: Any) -> None:
        """Take over what `state` returned in the run that is resumed."""
        self._in_a_row = state["in_a_row"]
