"""The output head in `int8x2`: logits of integer products, and log-probs with their gradient.

Forward keeps hidden rows, and logits unless layers are recomputed; then backward computes them
again. Rows are split into chunks of `rows_per_chunk`, from the first on. Backward adds the product
of each chunk to the head's FP32 gradient in this order.

Legend: R hidden rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.logprob import exact_logits_gradient, exact_logprobs
from jetrl.precision.backend import backend_of
from jetrl.precision.formats import GEMMInput
from jetrl.precision.int8_planes import (
    add_planes_wgrad,
    planes_dgrad,
    planes_fprop,
    planes_of_rows,
    rows_per_chunk,
)
from jetrl.precision.linear import Linear
from jetrl.precision.plan import Side
from jetrl.precision.quantize import Planes


class PlanesHead(Linear):
    """A head that multiplies hidden rows by a weight [V, D], both in two INT8 planes.

    `forward` has no gradient: training calls `head_logprobs`.
    """

    def planes(self, side: Side) -> Planes:
        """Return the weight on one side."""
        weight = self.operand(side)
        assert isinstance(weight, Planes), "the weight is in two planes"
        return weight

    @torch.no_grad()
    def forward(self, x: GEMMInput, side: Side) -> Tensor:
        """Return the logits, float32 [R, V], of hidden rows, bfloat16 [R, D]."""
        assert isinstance(x, Tensor), "a head reads the final norm's output"
        return planes_fprop(planes_of_rows(x), self.planes(side))


def head_logprobs(
    hidden: Tensor,
    chosen: Tensor,
    temperature: float,
    head: PlanesHead,
    logits: Callable[[Tensor], Tensor],
    kept: Callable[[Tensor, Tensor], Tensor],
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of chosen tokens, float32 [R], differentiable, and moments, float32 [2, R].

    Args:
        hidden: Decoder output, bfloat16 [R, D].
        chosen: int64 [R].
        logits: Returns the head's logits, float32 [n, V], of some hidden rows.
        kept: Returns logits of (logits, chosen) with -inf for excluded tokens.
        recompute: True if backward computes logits again.
    """
    per_row = torch.full((len(chosen), 1), temperature, device=hidden.device)
    row_logits = lambda rows, ids: kept(logits(rows), ids)  # noqa: E731
    again = kept if recompute or not torch.is_grad_enabled() else None
    return _HeadLogprobs.apply(hidden, head.weight, chosen, per_row, head, row_logits, again)


class _HeadLogprobs(torch.autograd.Function):
    """Log-probs from hidden rows; the master weight is an input only for its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        master: Tensor,
        chosen: Tensor,
        temperature: Tensor,
        head: PlanesHead,
        row_logits: Callable[[Tensor, Tensor], Tensor],
        again: Callable[[Tensor, Tensor], Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.head, ctx.master, ctx.again = head, master, again
        # A row's bits do not depend on the others, so memory may choose the rows at once.
        vocabulary = head.planes("train").shape[0]
        size = max(1, backend_of(hidden).logits_at_once // vocabulary)
        if again is None:
            size = rows_per_chunk(vocabulary)  # the chunks of backward, which reads them
        parts, saved = [], []
        for rows, ids, divisors in zip(
            hidden.split(size), chosen.split(size), temperature.split(size), strict=True
        ):
            chunk = row_logits(rows, ids)
            parts.append(exact_logprobs(chunk, ids, divisors))
            if again is None:
                saved.append(chunk)
            del chunk  # before the next one
        logprobs, moments, softmax = (torch.cat(list(x), -1) for x in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, chosen, temperature, softmax, *saved)
        ctx.mark_non_differentiable(moments)
        return logprobs, moments

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, chosen, temperature, softmax, *saved = ctx.saved_tensors
        weight = ctx.head.planes("train")
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        total = returned = None
        if ctx.needs_input_grad[1]:
            total, returned = ctx.head.gradients.buffer(ctx.master)
        size = rows_per_chunk(weight.shape[0])
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            x = planes_of_rows(hidden[rows])
            logits = saved.pop(0) if saved else ctx.again(planes_fprop(x, weight), chosen[rows])
            dlogits = exact_logits_gradient(
                logits, chosen[rows], temperature[rows], softmax[:, rows], grads[0][rows]
            )
            del logits
            if dhidden is not None:
                dhidden[rows] = planes_dgrad(dlogits, weight)
            if total is not None:
                add_planes_wgrad(total, dlogits, x)
            del dlogits  # before the logits of the next chunk
        return dhidden, returned, None, None, None, None, None
