"""SwiGLU's backward on Hopper between adapters: gradients, their codes and y in one pass.

The adapter behind SwiGLU needs y again, the gradient of its A; the adapters in front need the
gradient dx in BF16, and the frozen base in front needs dx as codes. All come from dy and x, which
are read once. The operations are those of `kernels.swiglu_hopper`, with their bits.

Legend: T tokens, F features of y.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.exponential_hopper import sigmoid
from jetrl.kernels.swiglu_hopper import check_backward, store_values
from jetrl.precision.hopper.quantize import (
    load_tile,
    round_to_bfloat16,
    rule,
    store_row_groups,
)
from jetrl.precision.layout import cdiv, empty_row_groups
from jetrl.precision.plan import FP8_BLOCK
from jetrl.precision.quantize import FORMATS, QTensor

_ROWS = 16  # of a tile: three results for each place are many registers


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def swiglu_backward_values_kernel(
    dy_ptr, x_ptr, dx_ptr, codes_ptr, scales_ptr, num_rows, width, scale_stride, column_blocks,
    ROWS: tl.constexpr,
    MAXIMUM: tl.constexpr, FLOOR_BITS: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """Make the gradients of ROWS rows of 128 columns of the gate and of up, and y again.

    Args:
        dy_ptr: bfloat16 [num_rows, width], read, and then overwritten with y.
        x_ptr: bfloat16 [num_rows, 2 * width], the gate's columns first.
        dx_ptr: bfloat16 [num_rows, 2 * width], written.
        codes_ptr: FP8 [num_rows, 2 * width], written.
        scales_ptr: float32, one line of rows for each 128 columns, written.
        width: a multiple of 128.
        column_blocks: width / 128.
        ROWS: rows of a program. No bit depends on it.
        MAXIMUM: as of `precision.hopper.quantize.rule`.
        FLOOR_BITS: as of `precision.hopper.quantize.rule`.
        POW2: as of `precision.hopper.quantize.rule`.
    """
    block, column = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    rows = block * ROWS + tl.arange(0, ROWS)
    dy = load_tile(dy_ptr, rows, column, num_rows, width, width)
    gate = load_tile(x_ptr, rows, column, num_rows, width, 2 * width)
    up = load_tile(x_ptr + width, rows, column, num_rows, width, 2 * width)
    share = sigmoid(gate)
    silu = gate * share
    store_values(dy_ptr, silu * up, rows, column, num_rows, width)
    # silu(g) = g * s with s = sigmoid(g), so d silu / dg = s + g * s * (1 - s).
    dgate = round_to_bfloat16(dy * up * (share + silu * (1.0 - share)))
    dup = round_to_bfloat16(dy * silu)
    store_values(dx_ptr, dgate, rows, column, num_rows, 2 * width)
    store_row_groups(
        dgate, rows, column, num_rows, 2 * width, codes_ptr, scales_ptr, scale_stride,
        MAXIMUM, FLOOR_BITS, POW2,
    )  # fmt: skip
    store_values(dx_ptr, dup, rows, column_blocks + column, num_rows, 2 * width)
    store_row_groups(
        dup, rows, column_blocks + column, num_rows, 2 * width, codes_ptr, scales_ptr,
        scale_stride, MAXIMUM, FLOOR_BITS, POW2,
    )  # fmt: skip


def swiglu_backward_values_(
    dy: Tensor, gate_up: Tensor, scales: str = "fp32"
) -> tuple[QTensor, Tensor]:
    """Return the gradient of gate_up as codes and as values, and leave swiglu(gate_up) in dy.

    Args:
        dy: bfloat16 [T, F] contiguous, the gradient of the result, which the result itself takes
            the place of.
        gate_up: bfloat16 [T, 2F] contiguous, the gate's columns first.
        scales: "fp32" or "pow2", the quantizer's scales.

    Returns:
        1 x 128 groups of [T, 2F], and bfloat16 [T, 2F].
    """
    check_backward("swiglu_backward_values_", dy, gate_up)
    num_rows, width = dy.shape
    rows = empty_row_groups(num_rows, 2 * width, FORMATS["e4m3"][0], dy.device)
    dx = torch.empty_like(gate_up)
    column_blocks = width // FP8_BLOCK
    if num_rows:
        swiglu_backward_values_kernel[(cdiv(num_rows, _ROWS) * column_blocks,)](
            dy, gate_up, dx, rows.codes, rows.scales, num_rows, width, rows.scales.stride(1),
            column_blocks, _ROWS, **rule("e4m3", scales),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return rows, dx
