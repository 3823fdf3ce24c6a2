"""SwiGLU on Hopper, fused with the quantization after it, and its backward in BF16.

    y = g * (1 / (1 + exp2(-g * log2 e))) * u    float32, rounded once to bfloat16

One program makes some rows of 128 columns, for sampling and training alike. exp2 and the reciprocal
are the hardware's (relative errors near 2**-22 and 2**-23), so y may rarely differ from the
reference by a unit of bfloat16. The sampler's y and the trainer's agree: every kernel here does the
same operations in this order, without fused multiply-adds.

`swiglu_backward_values_` is the backward between adapters. From one reading of dy and x it makes y,
for the gradient of the next adapter's A, and dx in BF16 and as codes, for the adapters and the
frozen base before it. `swiglu_backward_hopper` has the backward with quantization.

Legend: T tokens, F features of y.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.exponential_hopper import sigmoid
from jetrl.precision.hopper.launch import (
    OVERLAPPED,
    check_matrix,
    check_tensor,
    let_next_start,
    wait_for_previous,
)
from jetrl.precision.hopper.quantize import (
    load_tile,
    round_to_bfloat16,
    rows_of_program,
    rule,
    store_row_groups,
)
from jetrl.precision.layout import cdiv, empty_row_groups
from jetrl.precision.plan import FP8_BLOCK
from jetrl.precision.quantize import FORMATS, QTensor

_ROWS = 32  # rows of a tile of the plain backward; each row's bits are its own
_BF16 = (torch.bfloat16,)


@triton.jit
def store_values(ptr, y, rows, column, num_rows, num_columns):
    """Store some rows of 128 columns as bfloat16.

    Args:
        ptr: bfloat16 [num_rows, num_columns], written.
        y: float32 [R, 128].
        rows: int32 [R], row numbers.
    """
    columns = column * 128 + tl.arange(0, 128)
    places = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(ptr + places, y.to(tl.bfloat16), mask=(rows < num_rows)[:, None])


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def _rows_kernel(
    x_ptr, y_ptr, codes_ptr, scales_ptr, num_rows, num_columns, scale_stride, column_blocks,
    ROWS: tl.constexpr, WRITE_Y: tl.constexpr, QUANTIZE: tl.constexpr,
    MAXIMUM: tl.constexpr, FLOOR_BITS: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """Make y of ROWS rows and 128 columns, and write it, its groups, or both.

    Args:
        x_ptr: bfloat16 [num_rows, 2 * num_columns], the gate's columns first.
        y_ptr: bfloat16 [num_rows, num_columns], written with WRITE_Y.
        codes_ptr: FP8 [num_rows, num_columns], written with QUANTIZE.
        scales_ptr: float32 [num_rows, column_blocks], rows contiguous and groups scale_stride
            apart, written with QUANTIZE.
        ROWS: few for few rows: then more programs share the latency. No bit depends on it.
    """
    block, column = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    rows = block * ROWS + tl.arange(0, ROWS)
    let_next_start()
    wait_for_previous()
    # A tile's columns of the gate and the same columns of up lie num_columns apart in one row.
    gate = load_tile(x_ptr, rows, column, num_rows, num_columns, 2 * num_columns)
    up = load_tile(x_ptr + num_columns, rows, column, num_rows, num_columns, 2 * num_columns)
    # Rounded to bfloat16 before it is quantized: the codes are those of the BF16 result.
    y = round_to_bfloat16(gate * sigmoid(gate) * up)
    if QUANTIZE:
        store_row_groups(
            y, rows, column, num_rows, num_columns, codes_ptr, scales_ptr, scale_stride,
            MAXIMUM, FLOOR_BITS, POW2,
        )  # fmt: skip
    if WRITE_Y:
        store_values(y_ptr, y, rows, column, num_rows, num_columns)


@triton.jit(do_not_specialize=["num_rows"])
def _backward_rows_kernel(
    dy_ptr, x_ptr, dx_ptr, num_rows, num_columns, column_blocks,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Make the gradients of ROWS rows of 128 columns of the gate and of up.

    Args:
        dy_ptr: bfloat16 [num_rows, num_columns].
        x_ptr: bfloat16 [num_rows, 2 * num_columns], the gate's columns first.
        dx_ptr: bfloat16 [num_rows, 2 * num_columns], written.
    """
    block, column = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    rows = block * ROWS + tl.arange(0, ROWS)
    dy = load_tile(dy_ptr, rows, column, num_rows, num_columns, num_columns)
    gate = load_tile(x_ptr, rows, column, num_rows, num_columns, 2 * num_columns)
    up = load_tile(x_ptr + num_columns, rows, column, num_rows, num_columns, 2 * num_columns)
    # silu(g) = g * s with s = sigmoid(g), so d silu / dg = s + g * s * (1 - s).
    share = sigmoid(gate)
    silu = gate * share
    dgate = dy * up * (share + silu * (1.0 - share))
    columns = column * 128 + tl.arange(0, 128)
    places = rows.to(tl.int64)[:, None] * 2 * num_columns + columns[None, :]
    mask = (rows < num_rows)[:, None]
    tl.store(dx_ptr + places, dgate.to(tl.bfloat16), mask=mask)
    tl.store(dx_ptr + places + num_columns, (dy * silu).to(tl.bfloat16), mask=mask)


def swiglu_quantize(gate_up: Tensor, scales: str = "fp32") -> QTensor:
    """Return quantize(swiglu(gate_up)), whose BF16 result is never written.

    Args:
        gate_up: bfloat16 [T, 2F] contiguous, the gate's columns first, F a multiple of 128.
        scales: "fp32" or "pow2", the quantizer's scales.

    Returns:
        1 x 128 groups of [T, F].
    """
    num_rows, width = _check("swiglu_quantize", gate_up)
    rows = empty_row_groups(num_rows, width, FORMATS["e4m3"][0], gate_up.device)
    _launch_rows(gate_up, None, rows, rule("e4m3", scales))
    return rows


def swiglu_quantize_with_values(gate_up: Tensor, scales: str = "fp32") -> tuple[QTensor, Tensor]:
    """Return what `swiglu_quantize` returns, and the BF16 result, from one pass.

    Returns:
        1 x 128 groups of [T, F], and bfloat16 [T, F].
    """
    num_rows, width = _check("swiglu_quantize_with_values", gate_up)
    rows = empty_row_groups(num_rows, width, FORMATS["e4m3"][0], gate_up.device)
    y = torch.empty(num_rows, width, dtype=torch.bfloat16, device=gate_up.device)
    _launch_rows(gate_up, y, rows, rule("e4m3", scales))
    return rows, y


def swiglu_forward(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up for a consumer that reads BF16.

    Returns:
        bfloat16 [T, F].
    """
    num_rows, width = _check("swiglu", gate_up)
    y = torch.empty(num_rows, width, dtype=torch.bfloat16, device=gate_up.device)
    _launch_rows(gate_up, y, None, rule("e4m3", "fp32"))
    return y


def _launch_rows(
    gate_up: Tensor, y: Tensor | None, rows: QTensor | None, options: dict[str, Any]
) -> None:
    """Launch _rows_kernel for y or for its groups; gate_up stands in for what is not written."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    column_blocks = width // FP8_BLOCK
    if not num_rows:
        return
    _rows_kernel[(triton.cdiv(num_rows, rows_of_program(num_rows)) * column_blocks,)](
        gate_up,
        gate_up if y is None else y,
        rows.codes if rows else gate_up,
        rows.scales if rows else gate_up,
        num_rows, width, rows.scales.stride(1) if rows else 0, column_blocks,
        rows_of_program(num_rows), y is not None, rows is not None,
        **options, num_warps=4, enable_fp_fusion=False, **OVERLAPPED,
    )  # fmt: skip


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of gate_up, bfloat16 [T, 2F].

    Args:
        dy: bfloat16 [T, F] contiguous, the gradient of the result.
        gate_up: bfloat16 [T, 2F] contiguous, the gate's columns first.
    """
    check_backward("swiglu_backward", dy, gate_up)
    dx = torch.empty_like(gate_up)
    num_rows, width = dy.shape
    column_blocks = width // FP8_BLOCK
    if num_rows:
        _backward_rows_kernel[(triton.cdiv(num_rows, _ROWS) * column_blocks,)](
            dy, gate_up, dx, num_rows, width, column_blocks, _ROWS,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return dx


def swiglu(gate_up: Tensor) -> Tensor:
    """Return what `kernels.swiglu.swiglu` returns, on Hopper: bfloat16 [T, 2F] -> [T, F]."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu_forward(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return swiglu_backward(grads[0].to(torch.bfloat16).contiguous(), gate_up)


def _check(name: str, gate_up: Tensor) -> tuple[int, int]:
    """Return T and F of a gate_up [T, 2F] that the kernels take, or raise ValueError."""
    check_matrix(name, gate_up, _BF16)
    if gate_up.shape[1] % (2 * FP8_BLOCK) or not gate_up.is_contiguous():
        raise ValueError(
            f"{name}: contiguous [T, 2F] with F a multiple of {FP8_BLOCK}, not "
            f"{list(gate_up.shape)} with strides {list(gate_up.stride())}"
        )
    return gate_up.shape[0], gate_up.shape[1] // 2


def check_backward(name: str, dy: Tensor, gate_up: Tensor) -> None:
    """Check the tensors of a backward.

    Args:
        dy: bfloat16 [T, F] contiguous.
        gate_up: bfloat16 [T, 2F] contiguous, F a multiple of 128.
    """
    check_tensor(name, "dy", dy, torch.bfloat16, _check(name, gate_up))


_VALUES_ROWS = 16  # of a tile: three results for each place are many registers


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
        ROWS: rows of a program. No bit depends on it.
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

    Returns:
        1 x 128 groups of [T, 2F], and bfloat16 [T, 2F].
    """
    check_backward("swiglu_backward_values_", dy, gate_up)
    num_rows, width = dy.shape
    rows = empty_row_groups(num_rows, 2 * width, FORMATS["e4m3"][0], dy.device)
    dx = torch.empty_like(gate_up)
    column_blocks = width // FP8_BLOCK
    if num_rows:
        swiglu_backward_values_kernel[(cdiv(num_rows, _VALUES_ROWS) * column_blocks,)](
            dy, gate_up, dx, rows.codes, rows.scales, num_rows, width, rows.scales.stride(1),
            column_blocks, _VALUES_ROWS, **rule("e4m3", scales),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return rows, dx
