"""The product of a router in integers, for plans that are defined on every machine (docs/bits.md).

The router's weight is stored in BF16. Both operands are rotated and put in two INT8 planes
(`precision.int8_planes`), so a product is four INT8 products with integer sums, which are exact in
any order. Operation by operation, in float32, each rounded; c are the 15-bit integers:

    FProp   (c_x, s_x) = planes(rotate(x)) per token,  (c_w, s_w) = planes(rotate(w)) per expert
            l = (float32(sum(c_x * c_w)) * s_x) * s_w             over D, in the dtype of logits
    DGrad   (c, s) = planes(dl * s_w) per token, along the experts
            dx = bfloat16(rotate(float32(sum(c * c_w)) * s))      over the experts
    WGrad   (c, s) = planes(dl * s_x) per expert, along the tokens of a chunk of 65,536
            dw = dw + rotate(float32(sum(c * c_x)) * s)           over the chunk; chunks in order

Sums are below 2**53 in units of the integers.

Legend: T tokens, D hidden size, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl.precision.gradients import Gradients
from jetrl.precision.int8_planes import planes, planes_of_rows
from jetrl.precision.linear import Linear
from jetrl.precision.plan import Side
from jetrl.precision.quantize import rotate

_CHUNK_TOKENS = 65536


def router_logits(x: Tensor, router: Linear, side: Side) -> Tensor:
    """Return logits [T, E] of x [T, D] in the router's output dtype.

    Under a plan that is defined, they are computed in integers.
    """
    if not router.plan.defined:
        return router(x, side)
    weight = router.operand(side)
    assert isinstance(weight, Tensor), "a router is not in codes"
    logits = _RouterProduct.apply(x, router.weight, weight, router.out_dtype, router.gradients)
    return logits


class _RouterProduct(torch.autograd.Function):
    """The three products; the master weight is an input only for its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master: Tensor,
        weight: Tensor,
        out_dtype: torch.dtype,
        gradients: Gradients,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.master, ctx.gradients = master, gradients
        of_x, of_w = planes_of_rows(x), planes_of_rows(weight)
        sums = of_x.codes() @ of_w.codes().mT
        return (sums.float() * of_x.scales * of_w.scales.mT).to(out_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dlogits, dx, returned = grads[0].float(), None, None
        if ctx.needs_input_grad[0]:
            of_w = planes_of_rows(weight)
            made = planes(dlogits * of_w.scales.mT)
            dx = rotate((made.codes() @ of_w.codes()).float() * made.scales).to(x.dtype)
        if ctx.needs_input_grad[1]:
            total, returned = ctx.gradients.buffer(ctx.master)
            of_x = planes_of_rows(x)
            for start in range(0, len(x), _CHUNK_TOKENS):
                rows = slice(start, start + _CHUNK_TOKENS)
                made = planes((dlogits[rows] * of_x.scales[rows]).mT.contiguous())
                sums = made.codes() @ of_x.codes()[rows]
                total += rotate(sums.float() * made.scales)
        return dx, returned, None, None, None
