"""Activations saved for backward as INT8 codes (`precision.saved = int8`).

A layer that saves a matrix x [T, K] for backward saves codes instead, and backward reads the values
that they stand for:

    q  = quantize(x, (1, 128), "int8")      not rotated: an outlier coarsens only its own group
    x' = bfloat16(float32(code) * scale)

Forward reads x, so its bits do not change. Gradients are those at x': WGrad quantizes x' again,
along tokens. `docs/precision.md` lists the matrices.

A saved matrix is one int8 tensor [T, K + 4 * ceil(K / 128)]: a row has its codes, then the bytes of
its float32 scales.

Legend: T tokens, K columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jetrl.precision.backend import arithmetic_of
from jetrl.precision.plan import PrecisionPlan
from jetrl.precision.quantize import FP8_BLOCK, INT8_CODES, QTensor, dequantize, quantize

_SCALE = 4  # bytes of a scale


def saves_codes(plan: PrecisionPlan) -> bool:
    """Return whether a forward that runs now saves codes: not without gradients."""
    return plan.saved == INT8_CODES and torch.is_grad_enabled()


def saved_codes(x: Tensor) -> Tensor:
    """Return bfloat16 x [T, K], with contiguous rows, as a saved matrix; K is a multiple of 64."""
    tokens, width = x.shape
    groups = -(-width // FP8_BLOCK)
    saved = torch.empty(tokens, width + _SCALE * groups, dtype=torch.int8, device=x.device)
    q = _parts(saved)
    if (arithmetic := arithmetic_of(x)) is not None:
        arithmetic.save_codes(x, q)
        return saved
    made = quantize(x, q.block, INT8_CODES)
    q.codes.copy_(made.codes)
    q.scales.copy_(made.scales)
    return saved


def saved_values(saved: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the values x' of a saved matrix, bfloat16 [T, K], written to `out` if given.

    A matrix that was saved as it is, in BF16, is returned.
    """
    if saved.dtype != torch.int8:
        return saved
    q = _parts(saved)
    if (arithmetic := arithmetic_of(saved)) is not None:
        if out is None:
            out = torch.empty(q.shape, dtype=torch.bfloat16, device=saved.device)
        arithmetic.load_values(q, out)
        return out
    values = dequantize(q).bfloat16()
    return values if out is None else out.copy_(values)


def gradient_at(f: Callable[[Tensor], Tensor], x: Tensor, again: Tensor, y: Tensor) -> Tensor:
    """Return y = f(x) with the gradients that f has at `again`, a value of x: the reference."""
    return _Instead.apply(f(_Instead.apply(x, again)), y.detach())


def gradient_at_codes(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """`gradient_at` the values of the codes of x [T, ...]."""
    again = saved_values(saved_codes(x.detach().flatten(1))).view(x.shape)
    return gradient_at(f, x, again, y)


def _parts(saved: Tensor) -> QTensor:
    """Return views of the codes and scales of a saved matrix."""
    groups = -(-saved.shape[1] // (FP8_BLOCK + _SCALE))
    width = saved.shape[1] - _SCALE * groups
    scales = saved[:, width:].view(torch.float32)
    return QTensor(saved[:, :width], scales, (1, FP8_BLOCK))


class _Instead(torch.autograd.Function):
    """`value` in place of x, with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
