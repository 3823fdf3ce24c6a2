"""The products of an output head in `int8x2`: hidden rows and dY in two INT8 planes.

The weight is stored as that of an INT8 linear layer (`precision.int8`): rotated rows w with a scale
s_w each. Hidden rows and dY have 15 bits, as two INT8 planes, so that each product is two INT8
products or more, with integer sums that are exact in any order, on any device. Operation by
operation, in float32, each operation rounded:

    planes(x), a row of K values:
        a    = max(max |x|, 2**-100),  s = a / 32512,  r = 32512 / a
        code = rint(min(max(x * r, -32512), 32512)), ties to even; 0 for NaN
        high = (code + 128) >> 8,  low = code - 256 * high        INT8: -127..127, -128..127

    FProp   (c_x, s_x) = planes(rotate(x)) per hidden row, along D
            S = 256 * sum(high * w) + sum(low * w)                over D
            y = (float32(S) * s_x) * s_w
    DGrad   t = 0;  for each block of 512 tokens of the vocabulary, in order (the last is smaller):
                (c, s) = planes(dy * s_w) per hidden row, along the block
                S = 256 * sum(high * w) + sum(low * w)            over the block
                t = t + float32(S) * s
            dx = bfloat16(rotate(t))                              along D
    WGrad   (c, s) = planes(dy * s_x) per token of the vocabulary, along the rows of a chunk
            S = 65536 * sum(high * high_x) + 256 * (sum(high * low_x) + sum(low * high_x))
            dw = dw + rotate(float32(S) * s)                      along D; chunks in order

Sums of products are int32; S of DGrad is int32 too, the others int64, so all are exact, and
float32(S) is one rounding. A non-finite value makes the scale of its row
NaN or infinite, and the row's results NaN. The scales of w and of hidden rows are folded into dY,
so backward reads the codes of forward: neither is quantized again. The products of both low planes
would change WGrad by less than dY's own rounding, and are left out.

DGrad has a scale per block because rows of W share a large common vector, which cancels in the true
product: dY sums to 0 over V. With one scale per row of dY, codes of the many small probabilities
would be 0, their sum would not, and the common vector would stay.

The scales of WGrad depend on the rows of a chunk. `rows_per_chunk` is a function of the vocabulary
only, never of free memory.

Legend: R hidden rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from jetrl.precision.backend import arithmetic_of
from jetrl.precision.quantize import AMAX_FLOOR, Planes, QTensor, codes_as_float64, rotate

_MAXIMUM = 32512.0  # 127 * 256, so that the high plane fits in INT8
_MOST_ROWS = 65536  # an int32 sum of low * high + high * low is below 2**31
_BLOCK = 512  # tokens of a block of DGrad: 32512 * 127 * 512 is below 2**31
_CHUNK_LOGITS = 2**28  # 1 GiB in float32; each chunk reads and writes the gradient of the weight
_TOKENS = 8192  # of the vocabulary that the references multiply at once


def rows_per_chunk(vocabulary: int) -> int:
    """Return the rows of logits whose WGrad has one scale per token of the vocabulary."""
    return min(_MOST_ROWS, max(64, _CHUNK_LOGITS // vocabulary // 64 * 64))


def planes(x: Tensor) -> Planes:
    """Return float32 x [M, K] in two planes, with a scale per row."""
    amax = x.abs().amax(-1, keepdim=True)
    amax = torch.maximum(amax, amax.new_tensor(AMAX_FLOOR))
    # Divide by a tensor: for a Python number torch multiplies by a rounded reciprocal.
    top = amax.new_tensor(_MAXIMUM)
    codes = (x * (top / amax)).clamp(-_MAXIMUM, _MAXIMUM).nan_to_num(nan=0.0).round().int()
    high = (codes + 128) >> 8
    return Planes(high.to(torch.int8), (codes - 256 * high).to(torch.int8), amax / top)


def planes_of_hidden(x: Tensor) -> Planes:
    """Return hidden rows [R, D], bfloat16, rotated and in two planes. D is a multiple of 64."""
    if (arithmetic := arithmetic_of(x)) is not None:
        return arithmetic.planes_of_hidden(x)
    return planes_of_hidden_ref(x)


def planes_fprop(x: Planes, w: QTensor) -> Tensor:
    """Return the logits, float32 [R, V], of hidden rows [R, D] and the weight [V, D]."""
    if (arithmetic := arithmetic_of(x.high)) is not None:
        return arithmetic.planes_fprop(x, w)
    return planes_fprop_ref(x, w)


def planes_dgrad(dy: Tensor, w: QTensor) -> Tensor:
    """Return dX, bfloat16 [R, D], of the logits' gradient, float32 [R, V]."""
    if (arithmetic := arithmetic_of(dy)) is not None:
        return arithmetic.planes_dgrad(dy, w)
    return planes_dgrad_ref(dy, w)


def add_planes_wgrad(total: Tensor, dy: Tensor, x: Planes) -> None:
    """Add dW = dY^T X of one chunk of rows to `total`, float32 [V, D], in place.

    dY is float32 [R, V]; R is at most `rows_per_chunk(V)`.
    """
    assert len(dy) <= rows_per_chunk(len(total)), "the rows of one chunk"
    if (arithmetic := arithmetic_of(dy)) is not None:
        arithmetic.add_planes_wgrad(total, dy, x)
    else:
        add_planes_wgrad_ref(total, dy, x)


def planes_of_hidden_ref(x: Tensor) -> Planes:
    """`planes_of_hidden` in plain PyTorch."""
    return planes(rotate(x))


def planes_fprop_ref(x: Planes, w: QTensor) -> Tensor:
    """`planes_fprop` in plain PyTorch."""
    codes, out = x.codes(), x.scales.new_empty(len(x.high), w.shape[0])
    for piece in _slices(w.shape[0], _TOKENS):
        sums = codes @ codes_as_float64(w.codes[piece]).mT  # below 2**53: exact
        out[:, piece] = sums.float() * x.scales * w.scales[piece].mT
    return out


def planes_dgrad_ref(dy: Tensor, w: QTensor) -> Tensor:
    """`planes_dgrad` in plain PyTorch."""
    total = dy.new_zeros(len(dy), w.shape[1])
    for block in _slices(w.shape[0], _BLOCK):
        made = planes(dy[:, block] * w.scales[block].mT)
        sums = made.codes() @ codes_as_float64(w.codes[block])
        total += sums.float() * made.scales
    return rotate(total).bfloat16()


def add_planes_wgrad_ref(total: Tensor, dy: Tensor, x: Planes) -> None:
    """`add_planes_wgrad` in plain PyTorch."""
    x_codes, x_low = x.codes(), codes_as_float64(x.low)
    for piece in _slices(len(total), _TOKENS):
        made = planes((dy[:, piece] * x.scales).mT.contiguous())
        # All four products, less the one of both low planes.
        sums = made.codes() @ x_codes - codes_as_float64(made.low) @ x_low
        total[piece] += rotate(sums.float() * made.scales)


def _slices(vocabulary: int, size: int) -> Iterator[slice]:
    for start in range(0, vocabulary, size):
        yield slice(start, start + size)
