"""`kernels.swiglu` in Triton, fused with quantization, and its backward.

    y = g * (1 / (1 + exp2(-g * log2 e))) * u    float32, rounded once to bfloat16

exp2 and the reciprocal are hardware approximations (relative errors near 2**-22 and 2**-23), so y
rarely differs from the reference by one bfloat16 ulp. Sampler and trainer agree bitwise: all
kernels do the same operations in this order, without fused multiply-adds.

Legend: T tokens, F features of y.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetrl.kernels.exponential_triton import gluon_sigmoid, sigmoid
from jetrl.precision.quantize import AMAX_FLOOR, FORMATS, FP8_BLOCK, FP8Format, QTensor
from jetrl.precision.triton import tile
from jetrl.precision.triton.int8 import part_layout, rotated_part, row_warps, store_row
from jetrl.precision.triton.launch import (
    gluon_let_next_start,
    gluon_wait_for_previous,
    let_next_start,
    overlapped,
    wait_for_previous,
)
from jetrl.precision.triton.layout import cdiv, empty_int8_operand, empty_row_groups, is_ragged
from jetrl.precision.triton.quantize import (
    load_tile,
    quantize_rows_and_tokens,
    quantize_squares,
    round_to_bfloat16,
    rows_of_program,
    rule,
    store_row_groups,
)
from jetrl.settings.presets import DEFAULT_SCALES

_ROWS = 32  # rows per tile of the BF16 backward; changes no bits


@triton.jit
def store_values(ptr, y, rows, column, num_rows, num_columns):
    """Store float32 y [R, 128] as bfloat16 at rows, int32 [R], of [num_rows, num_columns]."""
    columns = column * 128 + tl.arange(0, 128)
    places = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(ptr + places, y.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def _rows_kernel(
    x_ptr,
    y_ptr,
    codes_ptr,
    scales_ptr,
    num_rows,
    num_columns,
    scale_stride,
    column_blocks,
    ROWS: tl.constexpr,
    WRITE_Y: tl.constexpr,
    QUANTIZE: tl.constexpr,
    RAGGED: tl.constexpr,
    MAXIMUM: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    POW2: tl.constexpr,
):
    """Compute y for ROWS rows and 128 columns, and write its values, its codes, or both.

    Args:
        x_ptr: bfloat16 [num_rows, 2 * num_columns], gate columns first.
        scales_ptr: float32 [num_rows, column_blocks], with strides 1 and scale_stride.
        ROWS: smaller for few rows, so that more programs hide latency; changes no bits.
    """
    block, column = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    rows = block * ROWS + tl.arange(0, ROWS)
    let_next_start()
    wait_for_previous()
    # Gate and up are num_columns apart in a row.
    gate = load_tile(x_ptr, rows, column, num_rows, num_columns, 2 * num_columns)
    up = load_tile(x_ptr + num_columns, rows, column, num_rows, num_columns, 2 * num_columns)
    # Round to bfloat16 first, so that the codes are those of the BF16 result.
    y = round_to_bfloat16(gate * sigmoid(gate) * up)
    if QUANTIZE:
        store_row_groups(
            y,
            rows,
            column,
            num_rows,
            num_columns,
            codes_ptr,
            scales_ptr,
            scale_stride,
            RAGGED,
            MAXIMUM,
            FLOOR_BITS,
            POW2,
        )
    if WRITE_Y:
        store_values(y_ptr, y, rows, column, num_rows, num_columns)


@triton.jit(do_not_specialize=["num_rows"])
def _backward_rows_kernel(
    dy_ptr,
    x_ptr,
    dx_ptr,
    y_ptr,
    num_rows,
    num_columns,
    column_blocks,
    ROWS: tl.constexpr,
    WRITE_Y: tl.constexpr,
):
    """Write the gradients of gate and up for ROWS rows and 128 columns, and y if WRITE_Y."""
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
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(dx_ptr + places, dgate.to(tl.bfloat16), mask=mask)
    tl.store(dx_ptr + places + num_columns, (dy * silu).to(tl.bfloat16), mask=mask)
    if WRITE_Y:
        store_values(y_ptr, silu * up, rows, column, num_rows, num_columns)


@gluon.jit
def _int8_kernel(
    x_ptr, y_ptr, codes_ptr, scales_ptr, WRITE_Y: gl.constexpr, K: gl.constexpr, FLOOR: gl.constexpr
):
    """Compute y for one row and quantize it like `precision.triton.int8`."""
    WIDTH: gl.constexpr = 256 * gl.num_warps()
    row = gl.program_id(0)
    columns = gl.arange(0, WIDTH, part_layout(gl.num_warps()))
    gluon_let_next_start()
    gluon_wait_for_previous()
    # Issue all loads first, so that their latencies overlap.
    places = x_ptr + row.to(gl.int64) * (2 * K) + columns
    gates, ups, parts = (), (), ()
    for first in gl.static_range(0, K, WIDTH):
        inside = first + columns < K
        gates += (gl.load(places + first, mask=inside, other=0.0),)  # type: ignore[assignment]
        ups += (gl.load(places + K + first, mask=inside, other=0.0),)  # type: ignore[assignment]
    for i in gl.static_range((K + WIDTH - 1) // WIDTH):
        gate = tile.widen(gates[i])
        y = tile.to_bfloat16(gate * gluon_sigmoid(gate) * tile.widen(ups[i]))
        if WRITE_Y:
            inside = i * WIDTH + columns < K
            gl.store(y_ptr + row.to(gl.int64) * K + i * WIDTH + columns, y, mask=inside)
        parts += (rotated_part(tile.widen(y)),)  # type: ignore[assignment]
    store_row(parts, row, codes_ptr, scales_ptr, K, FLOOR)


def swiglu_quantize(gate_up: Tensor, scales: str | None = DEFAULT_SCALES) -> QTensor:
    """Return quantize(swiglu(gate_up)), 1 x 128 groups of [T, F], without writing the BF16 result.

    Args:
        gate_up: bfloat16 [T, 2F] contiguous, gate columns first, F a multiple of 64.
        scales: "fp32" or "pow2" for FP8 scales, or None for INT8 rows (`precision.int8`).
    """
    if scales is None:
        return _int8_rows(gate_up, None)
    num_rows, width = check_gate_up(gate_up)
    rows = empty_row_groups(num_rows, width, FORMATS["e4m3"][0], gate_up.device)
    _launch_rows(gate_up, None, rows, scales)
    return rows


def swiglu_quantize_with_values(
    gate_up: Tensor, scales: str | None = DEFAULT_SCALES
) -> tuple[QTensor, Tensor]:
    """Return the result of `swiglu_quantize` and the BF16 result [T, F] from one pass."""
    y = gate_up.new_empty(check_gate_up(gate_up))
    if scales is None:
        return _int8_rows(gate_up, y), y
    rows = empty_row_groups(y.shape[0], y.shape[1], FORMATS["e4m3"][0], gate_up.device)
    _launch_rows(gate_up, y, rows, scales)
    return rows, y


def _int8_rows(gate_up: Tensor, y: Tensor | None) -> QTensor:
    num_rows, width = check_gate_up(gate_up)
    codes = empty_int8_operand(num_rows, width, gate_up.device)
    if num_rows:
        _int8_kernel[(num_rows,)](
            gate_up,
            gate_up if y is None else y,
            codes.codes,
            codes.scales,
            y is not None,
            width,
            AMAX_FLOOR,
            num_warps=row_warps(width),
            enable_fp_fusion=False,
            **overlapped(),
        )
    return codes


def swiglu_forward(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up in bfloat16, [T, F]."""
    y = gate_up.new_empty(check_gate_up(gate_up))
    _launch_rows(gate_up, y, None, DEFAULT_SCALES)
    return y


def _launch_rows(gate_up: Tensor, y: Tensor | None, rows: QTensor | None, scales: str) -> None:
    """Launch _rows_kernel for y, its codes, or both; gate_up is a placeholder for the others."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    column_blocks = triton.cdiv(width, FP8_BLOCK)
    if not num_rows:
        return
    _rows_kernel[(triton.cdiv(num_rows, rows_of_program(num_rows)) * column_blocks,)](
        gate_up,
        gate_up if y is None else y,
        rows.codes if rows else gate_up,
        rows.scales if rows else gate_up,
        num_rows,
        width,
        rows.scales.stride(1) if rows else 0,
        column_blocks,
        rows_of_program(num_rows),
        y is not None,
        rows is not None,
        is_ragged(width),
        **rule("e4m3", scales),
        num_warps=4,
        enable_fp_fusion=False,
        **overlapped(),
    )


def swiglu_backward(dy: Tensor, gate_up: Tensor, y: Tensor | None = None) -> Tensor:
    """Return the gradient of gate_up, bfloat16 [T, 2F], for the output gradient dy [T, F].

    Also writes the output to `y` if given, which may be dy.
    """
    check_gate_up(gate_up, dy)
    dx = torch.empty_like(gate_up)
    num_rows, width = dy.shape
    column_blocks = triton.cdiv(width, FP8_BLOCK)
    if num_rows:
        _backward_rows_kernel[(triton.cdiv(num_rows, _ROWS) * column_blocks,)](
            dy,
            gate_up,
            dx,
            dy if y is None else y,
            num_rows,
            width,
            column_blocks,
            _ROWS,
            y is not None,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return dx


def check_gate_up(gate_up: Tensor, dy: Tensor | None = None) -> tuple[int, int]:
    """Check gate_up [T, 2F] and dy [T, F], and return T and F."""
    num_rows, width = gate_up.shape
    assert (gate_up.dtype, gate_up.is_contiguous()) == (torch.bfloat16, True)
    shape = num_rows, width // 2
    if dy is not None:
        assert (dy.dtype, dy.shape, dy.is_contiguous()) == (torch.bfloat16, shape, True)
    return shape


def swiglu_backward_quantize(
    dy: Tensor, gate_up: Tensor, format: FP8Format = "e4m3", scales: str = DEFAULT_SCALES
) -> tuple[QTensor, QTensor, QTensor]:
    """`swiglu_hopper.swiglu_backward_quantize` in three passes; dy is overwritten with y."""
    dx = swiglu_backward(dy, gate_up, dy)
    rows, tokens = quantize_rows_and_tokens(dx, format, scales)
    return rows, tokens, quantize_squares(dy, scales)


_VALUES_ROWS = 16  # rows per tile: three results per element take many registers


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def swiglu_backward_values_kernel(
    dy_ptr,
    x_ptr,
    dx_ptr,
    codes_ptr,
    scales_ptr,
    num_rows,
    width,
    scale_stride,
    column_blocks,
    ROWS: tl.constexpr,
    MAXIMUM: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    POW2: tl.constexpr,
):
    """Write the gradients of gate and up for ROWS rows and 128 columns, and recompute y.

    Args:
        dy_ptr: bfloat16 [num_rows, width], read, and then overwritten with y.
        x_ptr: bfloat16 [num_rows, 2 * width], gate columns first, like dx_ptr and the FP8
            codes.
        scales_ptr: float32, one line of rows for each 128 columns, written.
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
        dgate,
        rows,
        column,
        num_rows,
        2 * width,
        codes_ptr,
        scales_ptr,
        scale_stride,
        False,
        MAXIMUM,
        FLOOR_BITS,
        POW2,
    )
    store_values(dx_ptr, dup, rows, column_blocks + column, num_rows, 2 * width)
    store_row_groups(
        dup,
        rows,
        column_blocks + column,
        num_rows,
        2 * width,
        codes_ptr,
        scales_ptr,
        scale_stride,
        False,
        MAXIMUM,
        FLOOR_BITS,
        POW2,
    )


def swiglu_backward_values_(
    dy: Tensor, gate_up: Tensor, scales: str = DEFAULT_SCALES
) -> tuple[QTensor, Tensor]:
    """Return the gradient of gate_up as codes and as BF16, and overwrite dy with swiglu(gate_up).

    For adapter training: A of the next adapter needs y, the preceding adapters need dx [T, 2F] in
    BF16, and the frozen base needs its codes in 1 x 128 groups. dy is bfloat16 [T, F], with F a
    multiple of 128.
    """
    check_gate_up(gate_up, dy)
    num_rows, width = dy.shape
    assert not is_ragged(width), f"{width} columns: groups would mix gate and up"
    rows = empty_row_groups(num_rows, 2 * width, FORMATS["e4m3"][0], dy.device)
    dx = torch.empty_like(gate_up)
    column_blocks = width // FP8_BLOCK
    if num_rows:
        swiglu_backward_values_kernel[(cdiv(num_rows, _VALUES_ROWS) * column_blocks,)](
            dy,
            gate_up,
            dx,
            rows.codes,
            rows.scales,
            num_rows,
            width,
            rows.scales.stride(1),
            column_blocks,
            _VALUES_ROWS,
            **rule("e4m3", scales),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return rows, dx
