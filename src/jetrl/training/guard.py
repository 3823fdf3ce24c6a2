"""Guard: skips updates whose loss, gradient or FP8 scales are not finite.

The watched values are computed on the device during the update and read once. They cover every
fault: a NaN or infinite logit reaches the entropy, and a bad FP8 scale makes its group NaN, which
reaches the loss or the gradient norm.

`watch` finds the first operation whose output or gradient is not finite. It synchronizes with the
device after every operation, so it is used only to repeat a failed update.

AdamW can produce a NaN from finite gradients. `nonfinite` checks its results, with one read from
the device, before a checkpoint is saved.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from jetrl.distributed.agreement import UPDATE_IS_FINITE, agree
from jetrl.distributed.world import world
from jetrl.errors import NonFiniteError
from jetrl.models.model import Model
from jetrl.types import Metrics

logger = logging.getLogger(__name__)

MOST_IN_A_ROW = 5  # maximum consecutive skipped updates


@dataclass(frozen=True)
class NonFiniteUpdate:
    """A skipped update, `index` within its step from 0; `repeat` reruns forward and backward."""

    index: int
    model: Model
    values: Metrics
    parameters: list[str]
    repeat: Callable[[], None]

    def __str__(self) -> str:
        numbers = ", ".join(f"{n} is {v}" for n, v in self.values.items() if not math.isfinite(v))
        if not self.parameters:
            return f"{numbers}; every gradient is finite"
        names = ", ".join(self.parameters[:3]) + (", ..." if self.parameters[3:] else "")
        return f"{numbers}; {len(self.parameters)} gradients are not finite ({names})"


class Guard:
    """Skips non-finite updates; `report` describes an update before its data is dropped."""

    def __init__(self, action: Literal["stop", "skip"], lr: str = "train.lr") -> None:
        self._action, self._lr = action, lr
        self._in_a_row = 0
        self.report: Callable[[NonFiniteUpdate], str] = lambda refused: ""

    def passes(self, values: Metrics) -> bool:
        # If one rank skips, all ranks skip, so that they do not diverge.
        if not agree(UPDATE_IS_FINITE, all(map(math.isfinite, values.values()))):
            return False
        self._in_a_row = 0
        return True

    def refuse(self, update: NonFiniteUpdate) -> None:
        """Report a skipped update; return if the run continues without it, else raise."""
        # Create the report first, since the error includes it.
        self._in_a_row += 1
        problem = ". ".join(text for text in (str(update), self.report(update)) if text)
        if self._action == "stop":
            raise NonFiniteError(
                f"{problem}. The update was not applied and the last checkpoint is good. Lower "
                f"{self._lr} or train.grad_clip, or skip such updates with "
                "train.on_nonfinite=skip"
            )
        if self._in_a_row >= MOST_IN_A_ROW:
            raise NonFiniteError(
                f"{problem}. This was update {self._in_a_row} in a row that was skipped: the run "
                "will not recover by itself; resume from an earlier checkpoint with a lower "
                f"{self._lr}"
            )
        logger.warning("update skipped: %s", problem)

    def state(self) -> Any:
        return {"in_a_row": self._in_a_row}

    def load_state(self, state: Any) -> None:
        self._in_a_row = state["in_a_row"]


def nonfinite(tensors: Mapping[str, Tensor]) -> str:
    """Return the names of tensors with a NaN or infinity, abbreviated; "" if all are finite.

    A collective, with one host-device synchronization.
    """
    # Integers cannot be NaN: counters, and codes of compact states.
    values = {n: t for n, t in tensors.items() if t.is_floating_point() and t.dim() and len(t)}
    # Compare maximum magnitudes: NaN propagates, and finite values cannot overflow as in a sum.
    peaks = torch._foreach_norm(list(values.values()), math.inf) if values else ()
    largest = torch.stack([peak.double() for peak in peaks]).tolist() if peaks else []
    own = [name for name, peak in zip(values, largest, strict=True) if not math.isfinite(peak)]
    found = set().union(*world().gather("the tensors that are not finite", own))
    names = [name for name in tensors if name in found]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


class Watch:
    """Checks tensors of a model; `first` names the first non-finite one, if any."""

    def __init__(self, model: Model) -> None:
        self.first = ""
        self._model = model
        self._in_backward = False

    def weights(self) -> None:
        """Check master weights, and scales of quantized weights."""
        for name, master in self._model.master_weights().items():
            self._look(f"master weight {name}", master)
        for name, scales in self._model.weight_scales().items():
            self._look(f"FP8 scales of {name}", scales)

    def output(self, name: str, value: Tensor) -> None:
        """Check the output of a traced decoder operation, and later its gradient."""
        if name == "embed":  # the first operation of a forward
            self._in_backward = False
        if self._in_backward:  # skip recomputed layers
            return
        self._look(f"output of {name}", value)
        if value.requires_grad:
            value.register_hook(partial(self.gradient, f"the output of {name}"))

    def gradient(self, of: str, gradient: Tensor) -> None:
        self._in_backward = True
        self._look(f"gradient of {of}", gradient)

    def _look(self, what: str, value: Tensor) -> None:
        if self.first:
            return
        finite = torch.isfinite(value.detach().float())
        if bool(finite.all()):
            return
        # Compute the first row and the count only once per search.
        rows = (~finite).reshape(len(finite), -1).any(1) if finite.dim() else ~finite[None]
        self.first = (
            f"{what}, first in row {int(rows.nonzero()[0])} ({int((~finite).sum())} of "
            f"{finite.numel()} values)"
        )


@contextlib.contextmanager
def watch(model: Model) -> Iterator[Watch]:
    """Check a model's weights now, and everything that it computes within the context."""
    seen = Watch(model)
    seen.weights()
    decoder = model.decoder
    hooks = [
        master.register_hook(partial(seen.gradient, name))
        for name, master in model.master_weights().items()
        if master.requires_grad
    ]
    # Forwards report the output of each operation; hooks report its gradient.
    decoder.trace = seen.output
    try:
        yield seen
    finally:
        decoder.trace = None
        for hook in hooks:
            hook.remove()
