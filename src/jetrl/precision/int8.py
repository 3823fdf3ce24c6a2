"""The operands and products of the `int8` plan: rotated INT8 with one scale per row along K.

    Y [M, N] = float32(sum over K of qa * qb) * scale_a * scale_b

The sums are integers of at most 127**2 * K, so they are exact in any order, with any tiling or
split of K, on any device. A row of a product depends only on that row and on B.

    FProp   Y [T, N]  = X  [T, K]   W   [N, K]
    DGrad   dX [T, K] = dY [T, N]   W^T [K, N]    made from W's codes, since FProp reads these
    WGrad   dW [N, K] = dY^T [N, T] X^T [K, T]    rotated along tokens, one scale per feature

These DGrad and WGrad need `grad_output=int8`; by default the `int8` plan has FP8 gradients
(`precision.linear`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from jetrl.errors import UserError
from jetrl.precision.backend import arithmetic_of
from jetrl.precision.quantize import (
    FP8_BLOCK,
    INT8_CODES,
    ROTATION,
    QTensor,
    codes_as_float64,
    dequantize,
    quantize,
    rotate,
)

_MOST_TERMS = (2**31 - 1) // 127**2


def int8_rows(x: Tensor, out: QTensor | None = None) -> QTensor:
    """Return x [M, K] as the left operand of a product along K, or as a weight.

    x is bfloat16 or float32, K a multiple of 64. The result is written to `out` if given.
    """
    if (arithmetic := arithmetic_of(x)) is not None:
        return arithmetic.int8_rows(x, out)
    made = quantize(rotate(x), (1, x.shape[-1]), INT8_CODES)
    if out is None:
        return replace(made, rotated=True)
    out.codes.copy_(made.codes)
    out.scales.copy_(made.scales)
    return out


def int8_tokens(x: Tensor) -> QTensor:
    """Return x [T, N] as an operand of a product along tokens, T padded to a multiple of 64.

    The tokens of a feature are contiguous and share a scale; padding is zeros.
    """
    if (arithmetic := arithmetic_of(x)) is not None:
        return arithmetic.int8_tokens(x)
    return int8_rows(pad(x.mT, (0, -len(x) % ROTATION))).mT


def int8_turned(w: QTensor, experts: int = 1) -> QTensor:
    """Return the transpose [K, N] of a weight [N, K] for DGrad, rounded from its codes' values.

    With several experts, whose matrices are stacked along rows, each is transposed: [E * K, N].
    """
    if (arithmetic := arithmetic_of(w.codes)) is not None:
        return arithmetic.int8_turned(w, experts)
    return int8_rows(dequantize(w).unflatten(0, (experts, -1)).mT.flatten(0, 1))


def int8_squares_turned(w: QTensor, experts: int = 1) -> QTensor:
    """Return a weight's transpose for DGrad in E4M3 (128 x 128), from its codes' values.

    Of several experts, whose matrices [N, K] are stacked along rows, it is [K, E * N'], with N
    padded with zeros to a multiple of 128: groups do not cross experts.
    """
    if (arithmetic := arithmetic_of(w.codes)) is not None:
        return arithmetic.int8_squares_turned(w, experts)
    values = dequantize(w)
    if experts > 1:
        padding = (0, 0, 0, -(len(w.codes) // experts) % FP8_BLOCK)
        values = pad(values.unflatten(0, (experts, -1)), padding).flatten(0, 1)
    return quantize(values, (FP8_BLOCK, FP8_BLOCK)).mT


def check_terms(number: int) -> None:
    """Raise UserError if an int32 sum of so many products may overflow."""
    if number > _MOST_TERMS:
        raise UserError(
            f"INT8 sums over at most {_MOST_TERMS:,} values, not {number:,}: lower "
            "train.tokens_per_micro_batch"
        )


def int8_matmul(a: QTensor, b: QTensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a @ b^T of [M, K] and [N, K], both with a scale per row: [M, N].

    Raises UserError if int32 sums may overflow, because K (such as a micro-batch's tokens) is too
    large.
    """
    check_terms(a.shape[1])
    if (arithmetic := arithmetic_of(a.codes)) is not None:
        return arithmetic.int8_matmul(a, b, out_dtype)
    sums = codes_as_float64(a.codes) @ codes_as_float64(b.codes).mT  # below 2**53: exact
    return (sums.float() * a.scales * b.scales.mT).to(out_dtype)
