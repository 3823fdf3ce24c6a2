"""Quantization of rotated queries to INT8, one scale per token and head.

It has the bits of `attention.integer._quantize_queries` with scales "fp32":

    r = max(max |x|, 2**-100)    scale = fl(r / 127)    code = rint(fl(x * fl(127 / r)))

A row with NaN or Inf has codes 0 and the scale NaN or Inf, except that values next to a single NaN
are 0 as well. A program quantizes a few rows of one head each.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.precision.quantize import AMAX_FLOOR, FORMATS, INT8_CODES

_VALUES_PER_PROGRAM = 4096
_MAGIC = tl.constexpr(1.5 * 2.0**23)  # adding it rounds to an integer, in the low bits
_MAXIMUM = tl.constexpr(FORMATS[INT8_CODES][1])
_FLOOR = tl.constexpr(AMAX_FLOOR)


@triton.jit
def query_codes(x):
    """Return rows x [R, D], bfloat16, as int8 codes [R, D] and float32 scales [R]."""
    x = x.to(tl.float32)
    # Bits of |x| as integers have the order of |x|, with NaN above Inf, so NaN propagates.
    largest = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1)
    amax = largest.to(tl.float32, bitcast=True)
    amax = tl.where(amax < _FLOOR, _FLOOR, amax)
    # A product is at most 127 and a rounding error, so it rounds to at most 127.
    scaled = x * tl.div_rn(_MAXIMUM, amax)[:, None]
    rounded = (tl.where(scaled == scaled, scaled, 0.0) + _MAGIC).to(tl.int32, bitcast=True)
    return rounded.to(tl.int8), tl.div_rn(amax, _MAXIMUM)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_kernel(
    q_ptr, codes_ptr, scales_ptr, num_rows,
    D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Quantize ROWS rows of q, bfloat16 [num_rows, D]; COLUMNS is a power of two, at least D."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    at = row[:, None] * D + column[None, :]
    inside = (row < num_rows)[:, None] & (column < D)[None, :]
    codes, scales = query_codes(tl.load(q_ptr + at, mask=inside, other=0.0))
    tl.store(codes_ptr + at, codes, mask=inside)
    tl.store(scales_ptr + row, scales, mask=row < num_rows)


def quantize_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotated queries, contiguous bfloat16 [T, H, D], as int8 codes and scales.

    Returns:
        codes, int8 [T, H, D], and scales, float32 [T, H].
    """
    assert (q.dtype, q.ndim, q.is_contiguous()) == (torch.bfloat16, 3, True), f"{q.dtype} {q.shape}"
    head_dim = q.shape[-1]
    codes = torch.empty_like(q, dtype=torch.int8)
    scales = q.new_empty(q.shape[:2], dtype=torch.float32)
    if q.numel():
        columns = triton.next_power_of_2(head_dim)
        rows = max(1, _VALUES_PER_PROGRAM // columns)
        _quantize_kernel[(triton.cdiv(scales.numel(), rows),)](
            q, codes, scales, scales.numel(), head_dim, columns, rows,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales
