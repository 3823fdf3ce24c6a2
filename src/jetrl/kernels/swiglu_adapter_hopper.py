"""SwiGLU on Hopper behind a product that its adapters have yet to be added to, and its backward.

    x = product + u B^T         rounded as `precision.adapter` does; never written
    y = swiglu(x)               as `kernels.swiglu_hopper`

Where many rows are multiplied by a library, the adapters' product would be a pass of its own over
the widest array of a layer. Here it is made of u and B, which are narrow, wherever x is read: once
in forward and once in backward, which keeps the product and not x.

Backward takes the two parts of the gradient of y, that of the base and that of the adapter behind
y, and makes in one pass the gradient of x, in BF16 for the adapters' own gradients and as codes for
DGrad, and y again, which the gradient of the next A needs.

Legend: T tokens, F features of y, R rank of the adapters of x, S rank of the adapter that reads y.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.swiglu_hopper import LOG2_E, check_backward, sigmoid
from jetrl.precision.hopper.adapter_epilogue import AdapterOperands
from jetrl.precision.hopper.launch import OVERLAPPED, let_next_start, wait_for_previous
from jetrl.precision.hopper.quantize import (
    load_tile,
    round_to_bfloat16,
    rule,
    store_row_groups,
)
from jetrl.precision.layout import cdiv, empty_row_groups
from jetrl.precision.plan import FP8_BLOCK
from jetrl.precision.quantize import FORMATS, QTensor

_ROWS = 32  # of a tile; in 8 warps no register is spilled, and two programs share a multiprocessor
_FEW_ROWS = 256  # a decode step: more programs of fewer rows share the latency


@triton.jit
def _load_adapted(
    x_ptr, u_ptr, b_ptr, columns_ptr, rows, column, num_rows, num_columns, u_stride,
    ROWS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Return ROWS rows and 128 columns of product + u B^T, float32 with the bits of bfloat16.

    Args:
        x_ptr: bfloat16 [num_rows, num_columns], the product.
        u_ptr: bfloat16 [num_rows, u_stride].
        b_ptr: bfloat16 [num_columns, RANK].
        columns_ptr: int32 [num_columns / 64], the first column of u for 64 rows of B, or -1.
        rows: int32 [ROWS], row numbers.
        column: which 128 columns.
        num_rows: tokens.
        num_columns: of the product.
        u_stride: columns of u.
        ROWS: how many rows.
        RANK: columns of B, a multiple of 16.
    """
    x = load_tile(x_ptr, rows, column, num_rows, num_columns, num_columns)
    first = tl.load(columns_ptr + column * 2)
    start = tl.maximum(first, 0) // 16 * 16
    outputs = column * 128 + tl.arange(0, 128)
    added = tl.zeros([ROWS, 128], tl.float32)
    for rank in tl.static_range(0, RANK, 16):
        ranks = rank + tl.arange(0, 16)
        places = rows.to(tl.int64)[:, None] * u_stride + (start + ranks)[None, :]
        u = tl.load(u_ptr + places, mask=(rows < num_rows)[:, None], other=0.0)
        b = tl.load(b_ptr + outputs.to(tl.int64)[:, None] * RANK + ranks[None, :])
        added = tl.dot(u, b.T, added)
    both = round_to_bfloat16(x + added.to(tl.bfloat16).to(tl.float32))
    return tl.where(first >= 0, both, x)


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def swiglu_adapted_kernel(
    x_ptr, u_ptr, b_ptr, columns_ptr, y_ptr, codes_ptr, scales_ptr, num_rows, width, u_stride,
    scale_stride, column_blocks,
    ROWS: tl.constexpr, RANK: tl.constexpr, LOG2_E: tl.constexpr,
    MAXIMUM: tl.constexpr, FLOOR_BITS: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """Make y of ROWS rows and 128 columns, and write it and its groups.

    Args:
        x_ptr: bfloat16 [num_rows, 2 * width], the gate's columns first, without the adapters.
        u_ptr: bfloat16 [num_rows, u_stride], as of `_load_adapted`.
        b_ptr: bfloat16 [2 * width, RANK].
        columns_ptr: int32, as of `_load_adapted`.
        y_ptr: bfloat16 [num_rows, width], written.
        codes_ptr: FP8 [num_rows, width], written.
        scales_ptr: float32, one line of rows for each 128 columns, written.
        num_rows: tokens.
        width: a multiple of 128.
        u_stride: columns of u.
        scale_stride: from one line of scales to the next.
        column_blocks: width / 128.
        ROWS: at least 16. No bit depends on it.
        RANK: columns of B.
        LOG2_E: as of `kernels.swiglu_hopper.sigmoid`.
        MAXIMUM: as of `precision.hopper.quantize.rule`.
        FLOOR_BITS: as of `precision.hopper.quantize.rule`.
        POW2: as of `precision.hopper.quantize.rule`.
    """
    block, column = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    rows = block * ROWS + tl.arange(0, ROWS)
    wait_for_previous()
    let_next_start()
    gate = _load_adapted(
        x_ptr, u_ptr, b_ptr, columns_ptr, rows, column, num_rows, 2 * width, u_stride, ROWS, RANK
    )
    up = _load_adapted(
        x_ptr, u_ptr, b_ptr, columns_ptr, rows, column_blocks + column, num_rows, 2 * width,
        u_stride, ROWS, RANK,
    )  # fmt: skip
    y = round_to_bfloat16(gate * sigmoid(gate, LOG2_E) * up)
    store_row_groups(
        y, rows, column, num_rows, width, codes_ptr, scales_ptr, scale_stride,
        MAXIMUM, FLOOR_BITS, POW2,
    )  # fmt: skip
    places = rows.to(tl.int64)[:, None] * width + (column * 128 + tl.arange(0, 128))[None, :]
    tl.store(y_ptr + places, y.to(tl.bfloat16), mask=(rows < num_rows)[:, None])


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def swiglu_adapted_backward_kernel(
    dy_ptr, du_ptr, a_ptr, x_ptr, u_ptr, b_ptr, columns_ptr, y_ptr, dx_ptr, codes_ptr, scales_ptr,
    num_rows, width, u_stride, scale_stride, column_blocks,
    ROWS: tl.constexpr, RANK: tl.constexpr, NEXT: tl.constexpr, LOG2_E: tl.constexpr,
    MAXIMUM: tl.constexpr, FLOOR_BITS: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """Make the gradients of ROWS rows of 128 columns of the gate and of up, and y again.

    Args:
        dy_ptr: bfloat16 [num_rows, width], the base's part of the gradient of y.
        du_ptr: bfloat16 [num_rows, NEXT]: with a_ptr the other part, du A.
        a_ptr: bfloat16 [NEXT, width].
        x_ptr: as of `swiglu_adapted_kernel`, and so are u_ptr, b_ptr and columns_ptr.
        u_ptr: see x_ptr.
        b_ptr: see x_ptr.
        columns_ptr: see x_ptr.
        y_ptr: bfloat16 [num_rows, width], written with NEXT.
        dx_ptr: bfloat16 [num_rows, 2 * width], written.
        codes_ptr: FP8 [num_rows, 2 * width], written.
        scales_ptr: float32, one line of rows for each 128 columns, written.
        num_rows: tokens.
        width: a multiple of 128.
        u_stride: columns of u.
        scale_stride: from one line of scales to the next.
        column_blocks: width / 128.
        ROWS: at least 16.
        RANK: columns of B; 0 where x has no adapters.
        NEXT: rows of A, a multiple of 16; 0 where no adapter reads y.
        LOG2_E: as of `kernels.swiglu_hopper.sigmoid`.
        MAXIMUM: as of `precision.hopper.quantize.rule`.
        FLOOR_BITS: as of `precision.hopper.quantize.rule`.
        POW2: as of `precision.hopper.quantize.rule`.
    """
    block, column = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    rows = block * ROWS + tl.arange(0, ROWS)
    columns = column * 128 + tl.arange(0, 128)
    wide_rows = rows.to(tl.int64)[:, None]
    mask = (rows < num_rows)[:, None]
    dy = load_tile(dy_ptr, rows, column, num_rows, width, width)
    if NEXT > 0:
        added = tl.zeros([ROWS, 128], tl.float32)
        for rank in tl.static_range(0, NEXT, 16):
            ranks = rank + tl.arange(0, 16)
            du = tl.load(du_ptr + wide_rows * NEXT + ranks[None, :], mask=mask, other=0.0)
            a = tl.load(a_ptr + ranks.to(tl.int64)[:, None] * width + columns[None, :])
            added = tl.dot(du, a, added)
        dy = round_to_bfloat16(dy + added)
    gate = _load_adapted(
        x_ptr, u_ptr, b_ptr, columns_ptr, rows, column, num_rows, 2 * width, u_stride, ROWS, RANK
    )
    up = _load_adapted(
        x_ptr, u_ptr, b_ptr, columns_ptr, rows, column_blocks + column, num_rows, 2 * width,
        u_stride, ROWS, RANK,
    )  # fmt: skip
    share = sigmoid(gate, LOG2_E)
    silu = gate * share
    if NEXT > 0:
        tl.store(y_ptr + wide_rows * width + columns[None, :], (silu * up).to(tl.bfloat16), mask)
    # silu(g) = g * s with s = sigmoid(g), so d silu / dg = s + g * s * (1 - s).
    dgate = round_to_bfloat16(dy * up * (share + silu * (1.0 - share)))
    dup = round_to_bfloat16(dy * silu)
    places = wide_rows * 2 * width + columns[None, :]
    tl.store(dx_ptr + places, dgate.to(tl.bfloat16), mask)
    store_row_groups(
        dgate, rows, column, num_rows, 2 * width, codes_ptr, scales_ptr, scale_stride,
        MAXIMUM, FLOOR_BITS, POW2,
    )  # fmt: skip
    tl.store(dx_ptr + places + width, dup.to(tl.bfloat16), mask)
    store_row_groups(
        dup, rows, column_blocks + column, num_rows, 2 * width, codes_ptr, scales_ptr,
        scale_stride, MAXIMUM, FLOOR_BITS, POW2,
    )  # fmt: skip


def swiglu_adapted(
    product: Tensor, adapter: AdapterOperands, scales: str = "fp32"
) -> tuple[QTensor, Tensor]:
    """Return quantize(swiglu(product + u B^T)), and swiglu's BF16 result, from one pass.

    Args:
        product: bfloat16 [T, 2F] contiguous, the gate's columns first, F a multiple of 128.
        adapter: the adapters' product with A, and their B [2F, R].
        scales: "fp32" or "pow2", the quantizer's scales.

    Returns:
        1 x 128 groups of [T, F], and bfloat16 [T, F], as `swiglu_hopper`'s
        `swiglu_quantize_with_values` of the sum.
    """
    num_rows, width = len(product), product.shape[1] // 2
    y = torch.empty(num_rows, width, dtype=torch.bfloat16, device=product.device)
    check_backward("swiglu_adapted", y, product)
    adapter.check(num_rows, 2 * width)
    rows = empty_row_groups(num_rows, width, FORMATS["e4m3"][0], product.device)
    height, column_blocks = 16 if num_rows <= _FEW_ROWS else _ROWS, width // FP8_BLOCK
    if num_rows:
        swiglu_adapted_kernel[(cdiv(num_rows, height) * column_blocks,)](
            product, adapter.u, adapter.up, adapter.columns, y, rows.codes, rows.scales, num_rows,
            width, adapter.u.stride(0), rows.scales.stride(1), column_blocks,
            height, adapter.up.shape[1], LOG2_E, **rule("e4m3", scales),
            num_warps=4 if height == 16 else 8, enable_fp_fusion=False, **OVERLAPPED,
        )  # fmt: skip
    return rows, y


def swiglu_adapted_backward(
    dy: Tensor,
    behind: tuple[Tensor, Tensor] | None,
    product: Tensor,
    adapter: AdapterOperands,
    scales: str = "fp32",
) -> tuple[QTensor, Tensor, Tensor]:
    """Return the gradient of product + u B^T as codes and as values, and swiglu's result again.

    Args:
        dy: bfloat16 [T, F] contiguous, the base's part of the gradient of swiglu's result.
        behind: the other part as du [T, S] and A [S, F], both bfloat16, or None.
        product: bfloat16 [T, 2F] contiguous, as of `swiglu_adapted`.
        adapter: as of `swiglu_adapted`.
        scales: "fp32" or "pow2", the quantizer's scales.

    Returns:
        1 x 128 groups of [T, 2F], bfloat16 [T, 2F], and bfloat16 [T, F], or without `behind` dy.
    """
    check_backward("swiglu_adapted_backward", dy, product)
    num_rows, width = dy.shape
    adapter.check(num_rows, 2 * width)
    rows = empty_row_groups(num_rows, 2 * width, FORMATS["e4m3"][0], dy.device)
    dx, y = torch.empty_like(product), dy if behind is None else torch.empty_like(dy)
    du, a = (dy, dy) if behind is None else behind
    column_blocks = width // FP8_BLOCK
    if num_rows:
        swiglu_adapted_backward_kernel[(cdiv(num_rows, _ROWS) * column_blocks,)](
            dy, du, a, product, adapter.u, adapter.up, adapter.columns, y, dx, rows.codes,
            rows.scales, num_rows, width, adapter.u.stride(0), rows.scales.stride(1),
            column_blocks, _ROWS, adapter.up.shape[1], 0 if behind is None else len(a), LOG2_E,
            **rule("e4m3", scales), num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return rows, dx, y
