"""The search for the operation of a forward or backward that first gave a value that is not finite.

`watch` looks at the output of every operation of the decoder, as `parity.locate` does, and at the
gradient of each output and of every master weight on the way back. It waits for the device at each:
it is for the repetition of an update that went wrong, not for a run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jetrl.models.model import Model


@dataclass(frozen=True)
class NonFiniteValue:
    """A tensor with values that are not finite.

    Attributes:
        what: The operation, and whether the tensor is its output, the gradient of its output, or a
            weight.
        row: The first token of the batch with such a value; of a weight, the first row.
    """

    what: str
    row: int
    count: int
    size: int

    def __str__(self) -> str:
        return f"{self.what}, first in row {self.row} ({self.count} of {self.size} values)"


class Watch:
    """Looks at the tensors of a model's forwards and backwards.

    Attributes:
        first: The first value that was not finite, in the order of computation; None so far.
    """

    def __init__(self, model: Model) -> None:
        self.first: NonFiniteValue | None = None
        self._model = model
        self._in_backward = False

    def weights(self) -> None:
        """Look at the master weights and at the scales of the quantized weights."""
        for name, master in self._model.master_weights().items():
            self._look(f"master weight {name}", master)
        for name, scales in self._model.weight_scales().items():
            self._look(f"FP8 scales of {name}", scales)

    def output(self, name: str, value: Tensor) -> None:
        """Look at the output of an operation, and later at its gradient: the decoder's trace."""
        if name == "embed":  # the first operation of a forward
            self._in_backward = False
        if self._in_backward:  # a layer that is computed again says nothing new
            return
        self._look(f"output of {name}", value)
        if value.requires_grad:
            value.register_hook(partial(self.gradient, f"the output of {name}"))

    def gradient(self, of: str, gradient: Tensor) -> None:
        self._in_backward = True
        self._look(f"gradient of {of}", gradient)

    def _look(self, what: str, value: Tensor) -> None:
        """Keep a tensor's name and place if it is the first that is not finite."""
        if self.first is not None:
            return
        finite = torch.isfinite(value.detach().float())
        if bool(finite.all()):
            return
        rows = (~finite).reshape(len(finite), -1).any(1) if finite.dim() else ~finite[None]
        self.first = NonFiniteValue(
            what, int(rows.nonzero()[0]), int((~finite).sum()), finite.numel()
        )


@contextlib.contextmanager
def watch(model: Model) -> Iterator[Watch]:
    """Look at the weights of a model now, and at everything that it computes within the context."""
    seen = Watch(model)
    seen.weights()
    decoder = model.decoder
    hooks = [
        master.register_hook(partial(seen.gradient, name))
        for name, master in model.master_weights().items()
        if master.requires_grad
    ]
    decoder.trace = seen.output
    try:
        yield seen
    finally:
        decoder.trace = None
        for hook in hooks:
            hook.remove()
