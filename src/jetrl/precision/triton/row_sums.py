"""`precision.exact.sum_of_rows` in plain Triton: float32 additions in a stated order.

blocks    128 rows, a part of the columns     their sum, row after row
in_order  a part of the columns               the sums of blocks, one after another
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.precision.triton.grid import wide
from jetrl.precision.triton.layout import cdiv

BLOCK_ROWS = 128  # rows per block
_COLUMNS, _COLUMN_WARPS, _AT_ONCE = 512, 4, 16  # columns per program; rows that are loaded at once
_FOLDED, _FOLDED_AT_ONCE = 32, 64  # columns per program; blocks that are loaded at once


@triton.jit(do_not_specialize=["num_rows"])
def _blocks_kernel(
    dy_ptr, x_ptr, inverse_ptr, sums_ptr, num_rows,
    NORM: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add the rows of dy, or of dy * n if NORM, of a block of 128: float32 [blocks, D]."""
    block = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < D
    total = tl.zeros([COLUMNS], tl.float32)
    rows = tl.minimum(num_rows - block * 128, 128)
    for start in range(0, rows, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            # Rows past the end add zeros, as in the reference.
            row = block * 128 + start + i
            used = row < num_rows
            mask = inside & used
            places = row.to(tl.int64) * D + columns
            dy = wide(dy_ptr + places, mask)
            if NORM:
                x = wide(x_ptr + places, mask)
                inverse = wide(inverse_ptr + row, used)
                normed = x * inverse
                dy = dy * normed
            total += dy
    places = block.to(tl.int64) * D + columns
    tl.store(sums_ptr + places, total, mask=inside)


@triton.jit(do_not_specialize=["num_blocks"])
def _in_order_kernel(
    sums_ptr, out_ptr, num_blocks,
    ROUND: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add float32 sums [blocks, D] in order; ROUND rounds the result to bfloat16 values."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < D
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, num_blocks, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            block = start + i
            places = block.to(tl.int64) * D + columns
            mask = inside & (block < num_blocks)
            total += wide(sums_ptr + places, mask)
    if ROUND:
        total = total.to(tl.bfloat16)
        total = total.to(tl.float32)
    tl.store(out_ptr + columns, total, mask=inside)


def sum_of_rows(dy: Tensor, x: Tensor | None = None, inverse_rms: Tensor | None = None) -> Tensor:
    """`precision.exact.sum_of_rows` of contiguous float32 or bfloat16 dy [N, D]: float32 [D].

    With x [N, D] and its inverse rms [N], that of dy * x * inverse_rms, in bfloat16 values.
    """
    assert dy.ndim == 2, f"{dy.shape}"
    assert dy.is_contiguous(), f"strides {dy.stride()}"
    num_rows, width = dy.shape
    blocks = cdiv(num_rows, BLOCK_ROWS)
    sums = torch.empty(blocks, width, dtype=torch.float32, device=dy.device)
    if blocks:
        # A kernel cannot take None, so any tensor is a placeholder for unused arguments.
        values = dy if x is None else x
        inverse = dy if inverse_rms is None else inverse_rms
        grid = blocks, cdiv(width, _COLUMNS)
        _blocks_kernel[grid](
            dy, values, inverse, sums, num_rows,
            x is not None, width, _COLUMNS, _AT_ONCE,
            num_warps=_COLUMN_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return sum_in_order(sums, rounded=x is not None)


def sum_in_order(sums: Tensor, rounded: bool) -> Tensor:
    """Return the sums of blocks, float32 [blocks, D], added in order, float32 [D].

    rounded: whether to round the result to bfloat16 values.
    """
    blocks, width = sums.shape
    out = torch.empty(width, dtype=torch.float32, device=sums.device)
    _in_order_kernel[(cdiv(width, _FOLDED),)](
        sums, out, blocks, rounded, width, _FOLDED, _FOLDED_AT_ONCE,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out
