"""Which operation of a forward or backward first gave a value that is not finite.

`watch` looks at the output of every operation of the decoder, as `parity.locate` does, and at the
gradient of each of them and of every master on the way back. It waits for the device at each: it is
for the repetition of what went wrong, not for a run.
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
    """Where it was. what: the operation and whether it is its output, the gradient of its output,
    or a weight. row: the first token of the batch with such a value (of a weight: row). values: how
    many of the elements are not finite."""

    what: str
    row: int
    values: int
    of: int

    def __str__(self) -> str:
        return f"{self.what}, first in row {self.row} ({self.values} of {self.of} values)"


class Watch:
    """first: the first value that was not finite, in the order in which things were computed."""

    def __init__(self, model: Model) -> None:
        self.first: NonFiniteValue | None = None
        self._model = model
        self._seen: set[str] = set()
        self._in_backward = False

    def weights(self) -> None:
        """Looks at the masters and at the FP8 copies of them."""
        for name, master in self._model.named_masters().items():
            self._look(f"master weight {name}", master)
        for name, scales in self._model.weight_scales().items():
            self._look(f"FP8 scales of {name}", scales)

    def output(self, name: str, value: Tensor) -> None:
        """The decoder's trace: an operation and its output."""
        if name == "embed":  # the first operation of a forward
            self._in_backward = False
        if self._in_backward:  # a layer that is computed again says nothing new
            return
        self._look(f"output of {name}", value)
        if value.requires_grad:
            value.register_hook(partial(self._gradient, f"gradient of the output of {name}"))

    def gradient_of_master(self, name: str, gradient: Tensor) -> None:
        self._gradient(f"gradient of {name}", gradient)

    def _gradient(self, what: str, gradient: Tensor) -> None:
        self._in_backward = True
        self._look(what, gradient)

    def _look(self, what: str, value: Tensor) -> None:
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
    """While it is open, everything that the model computes is looked at."""
    seen = Watch(model)
    seen.weights()
    decoder = model.decoder
    hooks = [
        master.register_hook(partial(seen.gradient_of_master, name))
        for name, master in model.named_masters().items()
        if master.requires_grad
    ]
    decoder.trace = seen.output
    try:
        yield seen
    finally:
        decoder.trace = None
        for hook in hooks:
            hook.remove()
