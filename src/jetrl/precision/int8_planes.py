"""The products of an output head in `int8x2`: its weight, hidden rows and dY in two INT8 planes.

Weight, hidden rows and dY have 15 bits, as two INT8 planes with a scale per row, so that a product
is two or three INT8 products, with integer sums that are exact in any order, on any device.
Operation by operation, in float32, each operation rounded:

    planes(x), a row of K values:
        a    = max(max |x|, 2**-100),  s = a / 32512,  r = 32512 / a
        code = rint(min(max(x * r, -32512), 32512)), ties to even; 0 for NaN
        high = (code + 128) >> 8,  low = code - 256 * high        INT8: -127..127, -128..127

    Weight  (c_w, s_w) = planes(rotate(w)) per token of the vocabulary, along D
    FProp   (c_x, s_x) = planes(rotate(x)) per hidden row, along D
            S = 65536 * sum(high_x * high_w) + 256 * (sum(high_x * low_w) + sum(low_x * high_w))
            y = (float32(S) * s_w) * s_x
    DGrad   t = 0;  for each block of 512 tokens of the vocabulary, in order (the last is smaller):
                (c, s) = planes(dy * (256 * s_w)) per hidden row, along the block
                S = 256 * sum(high * high_w) + sum(low * high_w)  over the block
                t = t + float32(S) * s
            dx = bfloat16(rotate(t))                              along D
    WGrad   (c, s) = planes(dy * s_x) per token of the vocabulary, along the rows of a chunk
            S = 65536 * sum(high * high_x) + 256 * (sum(high * low_x) + sum(low * high_x))
            dw = dw + rotate(float32(S) * s)                      along D; chunks in order

Sums of products are int32; S of DGrad is int32 too, the others int64, so all are exact, and
float32(S) is one rounding. D and the rows of a chunk are at most 65,536. A non-finite value makes
the scale of its row NaN or infinite, and the row's results NaN. The scales of w and of hidden rows
are folded into dY, so backward reads the codes of forward: neither is quantized again. DGrad reads
the high plane of w only, which is w in INT8: it needs no more bits than the linear layers before
it. The products of both low planes are left out: they would change FProp by about as much as the
rounding of its operands does, WGrad by less.

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
from jetrl.precision.quantize import AMAX_FLOOR, Planes, codes_as_float64, rotate

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


def planes_of_rows(x: Tensor, out: Planes | None = None) -> Planes:
    """Return rows [M, K], bfloat16 or float32, rotated and in two planes. K is a multiple of 64.

    The result is written to `out` if given.
    """
    if (arithmetic := arithmetic_of(x)) is not None:
        return arithmetic.planes_of_rows(x, out)
    return planes_of_rows_ref(x, out)


def planes_fprop(x: Planes, w: Planes) -> Tensor:
    """Return the logits, float32 [R, V], of hidden rows [R, D] and the weight [V, D]."""
    if (arithmetic := arithmetic_of(x.high)) is not None:
        return arithmetic.planes_fprop(x, w)
    return planes_fprop_ref(x, w)


def planes_dgrad(dy: Tensor, w: Planes) -> Tensor:
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


def planes_of_rows_ref(x: Tensor, out: Planes | None = None) -> Planes:
    """`planes_of_rows` in plain PyTorch."""
    out = Planes.empty(x.shape[0], x.shape[1], x.device) if out is None else out
    for piece in _slices(len(x), _TOKENS):
        made = planes(rotate(x[piece]))
        for part, values in zip(out.tensors(), made.tensors(), strict=True):
            part[piece] = values
    return out


def planes_fprop_ref(x: Planes, w: Planes) -> Tensor:
    """`planes_fprop` in plain PyTorch."""
    out = x.scales.new_empty(x.shape[0], w.shape[0])
    for piece in _slices(w.shape[0], _TOKENS):
        part = w.rows(piece)
        out[:, piece] = _three_products(x, part) * part.scales.mT * x.scales
    return out


def planes_dgrad_ref(dy: Tensor, w: Planes) -> Tensor:
    """`planes_dgrad` in plain PyTorch."""
    total = dy.new_zeros(len(dy), w.shape[1])
    for block in _slices(w.shape[0], _BLOCK):
        made = planes(dy[:, block] * (256.0 * w.scales[block]).mT)
        sums = made.codes() @ codes_as_float64(w.high[block])  # below 2**53: exact
        total += sums.float() * made.scales
    return rotate(total).bfloat16()


def add_planes_wgrad_ref(total: Tensor, dy: Tensor, x: Planes) -> None:
    """`add_planes_wgrad` in plain PyTorch."""
    turned = Planes(x.high.mT, x.low.mT, x.scales)
    for piece in _slices(len(total), _TOKENS):
        made = planes((dy[:, piece] * x.scales).mT.contiguous())
        total[piece] += rotate(_three_products(made, turned) * made.scales)


def _three_products(a: Planes, b: Planes) -> Tensor:
    """Return S, float32 [M, N], of integers [M, K] and [N, K]: without low * low."""
    high, low = codes_as_float64(b.high).mT, codes_as_float64(b.low).mT
    # Below 2**53, so exact.
    return (256.0 * (a.codes() @ high + codes_as_float64(a.high) @ low)).float()


def _slices(vocabulary: int, size: int) -> Iterator[slice]:
    for start in range(0, vocabulary, size):
        yield slice(start, start + size)
