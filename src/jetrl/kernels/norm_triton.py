"""`kernels.norm` in Triton: RMSNorm fused with the preceding residual add and with quantization.

Results are bitwise equal to `rms_norm_ref` and `precision.quantize`. The reference sums squares
exactly on a 19-bit grid below the row maximum. Here the same sum is an integer sum: adding
1.5 * 2**23 to x * 2**(19 - e) rounds to that grid and leaves the integer in the low bits of the
float, and the squares are added in int64. Everything else is IEEE operations without fusion.

Forward is one kernel with one program per row. In backward, a tile kernel recomputes the norm from
the saved x + delta and inverse rms, and quantizes it in the 128 x 128 groups of WGrad.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetrl.precision.exact import GRADIENT_TERMS
from jetrl.precision.quantize import AMAX_FLOOR, FORMATS, FP8_BLOCK, QTensor
from jetrl.precision.triton import tile
from jetrl.precision.triton.int8 import part_layout, rotated_part, row_warps, store_row
from jetrl.precision.triton.launch import (
    gluon_let_next_start,
    gluon_wait_for_previous,
    let_next_start,
    overlapped,
    wait_for_previous,
)
from jetrl.precision.triton.layout import (
    cdiv,
    empty_int8_operand,
    empty_row_groups,
    empty_transposed_blocks,
    is_ragged,
)
from jetrl.precision.triton.quantize import (
    abs_bits,
    round_to_bfloat16,
    rule,
    scale_and_multiplier,
    tile_rule,
)
from jetrl.settings.presets import DEFAULT_SCALES

_MAX_WIDTH = 16384
_FEW_ROWS = 256  # up to this many rows (a decode step), launch for latency
_FEWER_ROWS = 128  # up to this many rows, INT8 rows run slower with more than eight warps


@triton.jit
def grid_factor(amax_bits):
    """Return 2**(19 - e), at most 2**127, for the float32 bits of m * 2**e with m in [0.5, 1)."""
    # The exponent field of the maximum is e + 126; that of the factor is 19 - e + 127.
    exponent = tl.minimum(tl.maximum(272 - (amax_bits >> 23), 1), 254)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def grid_squares(x, factor):
    """Return int64 squares of float32 x, at most 2**38, on the grid that factor defines."""
    # Adding 1.5 * 2**23 rounds to nearest even and leaves the integer in the low bits.
    rounded = tl.fma(x, factor, 12582912.0)
    whole = (rounded.to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int64)
    return whole * whole


@triton.jit
def inverse_rms_of(total, factor, amax_bits, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """Return float32 1 / sqrt(mean + eps) for int64 totals of `grid_squares`; NaN, Inf as IEEE."""
    # In float64, like the reference: scale the total back from grid units, which is exact (1 /
    # factor is a power of two), then round each operation once.
    exponent = 1150 - (factor.to(tl.int32, bitcast=True) >> 23).to(tl.int64)
    unit = (exponent << 52).to(tl.float64, bitcast=True)
    mean = total.to(tl.float64) * unit * unit
    # A float64 division takes dozens of instructions; for a power of two a product is exact too.
    if WIDTH & (WIDTH - 1) == 0:
        mean = mean * (1.0 / WIDTH)
    else:
        mean = mean / WIDTH
    inverse = (1.0 / tl.sqrt(mean + EPS)).to(tl.float32)
    # Integers cannot represent NaN or Inf: a NaN makes the row NaN, an Inf makes inverse rms 0.
    special = tl.where(amax_bits > 0x7F800000, float("nan"), 0.0)
    return tl.where(amax_bits >= 0x7F800000, special, inverse)


@triton.jit(do_not_specialize=["scale_stride"])
def _row_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    total_ptr,
    y_ptr,
    inverse_ptr,
    codes_ptr,
    scales_ptr,
    scale_stride,
    HAS_DELTA: tl.constexpr,
    WRITE_Y: tl.constexpr,
    WRITE_INVERSE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    FEW: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    EPS: tl.constexpr,
    MAXIMUM: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    POW2: tl.constexpr,
):
    """Add, normalize and quantize one row, which stays in registers throughout.

    Tensors are bfloat16 [T, WIDTH]; inverse_ptr is float32 [T], codes_ptr FP8 [T, WIDTH rounded up
    to a multiple of 128] and scales_ptr float32, one column per group of 128, with stride 1 along
    rows and scale_stride between groups. FEW optimizes for latency.
    """
    row = tl.program_id(0)
    columns = tl.arange(0, PADDED)
    mask = columns < WIDTH
    places = row.to(tl.int64) * WIDTH + columns
    # The previous kernel does not write the weight, so with few rows it is loaded before the wait.
    # With many rows, its registers would lower occupancy.
    let_next_start()
    if FEW:
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    wait_for_previous()

    # Round the residual stream to bfloat16 before use, since the next block reads it that way.
    x = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x = x + tl.load(delta_ptr + places, mask=mask, other=0.0).to(tl.float32)
        x = round_to_bfloat16(x)
        tl.store(total_ptr + places, x.to(tl.bfloat16), mask=mask)

    # The sum is in integers, so the order in which warps are reduced does not matter.
    amax_bits = tl.max(abs_bits(x), 0)
    factor = grid_factor(amax_bits)
    inverse = inverse_rms_of(tl.sum(grid_squares(x, factor), 0), factor, amax_bits, WIDTH, EPS)
    if WRITE_INVERSE:
        tl.store(inverse_ptr + row, inverse)

    # Round the norm to bfloat16 even if only the codes are stored, so that fusion does not change
    # the input of the quantizer.
    if WRITE_Y or QUANTIZE:
        if not FEW:
            weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
        y = round_to_bfloat16(x * inverse * weight.to(tl.float32))
        if WRITE_Y:
            tl.store(y_ptr + places, y.to(tl.bfloat16), mask=mask)
        if QUANTIZE:
            GROUPS: tl.constexpr = PADDED // 128
            CODES: tl.constexpr = (WIDTH + 127) // 128 * 128
            y = tl.reshape(y, (GROUPS, 128))
            groups = tl.arange(0, GROUPS)
            scale, multiplier = scale_and_multiplier(
                tl.max(abs_bits(y), 1), MAXIMUM, FLOOR_BITS, POW2
            )
            codes = (y * multiplier[:, None]).to(codes_ptr.dtype.element_ty)
            codes = tl.reshape(codes, (PADDED,))
            places = row.to(tl.int64) * CODES + columns
            tl.store(codes_ptr + places, codes, mask=columns < CODES)
            tl.store(
                scales_ptr + groups.to(tl.int64) * scale_stride + row,
                scale,
                mask=groups * 128 < WIDTH,
            )


# Gluon versions of the above; see `precision.triton.launch`.
_gluon_factor, _gluon_squares = gluon.jit(grid_factor.fn), gluon.jit(grid_squares.fn)
_gluon_inverse_rms_of = gluon.jit(inverse_rms_of.fn)


@gluon.jit
def _int8_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    total_ptr,
    y_ptr,
    inverse_ptr,
    codes_ptr,
    scales_ptr,
    HAS_DELTA: gl.constexpr,
    WRITE_Y: gl.constexpr,
    WRITE_INVERSE: gl.constexpr,
    K: gl.constexpr,
    EPS: gl.constexpr,
    FLOOR: gl.constexpr,
):
    """`_row_kernel` for INT8 codes, with the row in parts as in `precision.triton.int8`."""
    LAYOUT: gl.constexpr = part_layout(gl.num_warps())
    WIDTH: gl.constexpr = 256 * gl.num_warps()
    PARTS: gl.constexpr = (K + WIDTH - 1) // WIDTH
    row = gl.program_id(0)
    columns = gl.arange(0, WIDTH, LAYOUT)
    first = row.to(gl.int64) * K
    weights, loaded, parts = (), (), ()
    gluon_let_next_start()
    for i in gl.static_range(PARTS):
        place, mask = i * WIDTH + columns, i * WIDTH + columns < K
        weights += (gl.load(weight_ptr + place, mask=mask, other=0.0),)  # type: ignore[assignment]
    gluon_wait_for_previous()
    bits, squares = gl.full([WIDTH], 0, gl.int32, LAYOUT), gl.full([WIDTH], 0, gl.int64, LAYOUT)
    for i in gl.static_range(PARTS):
        place, mask = first + i * WIDTH + columns, i * WIDTH + columns < K
        x = tile.widen(gl.load(x_ptr + place, mask=mask, other=0.0))
        if HAS_DELTA:
            x = x + tile.widen(gl.load(delta_ptr + place, mask=mask, other=0.0))
            total = tile.to_bfloat16(x)
            gl.store(total_ptr + place, total, mask=mask)
            x = tile.widen(total)
        loaded += (x,)  # type: ignore[assignment]
        bits = gl.maximum(bits, x.to(gl.int32, bitcast=True) & 0x7FFFFFFF)
    amax_bits = gl.max(bits, 0)
    factor = _gluon_factor(amax_bits)
    for i in gl.static_range(PARTS):
        squares += _gluon_squares(loaded[i], factor)
    inverse = _gluon_inverse_rms_of(gl.sum(squares, 0), factor, amax_bits, K, EPS)
    if WRITE_INVERSE:
        gl.store(inverse_ptr + row, inverse)
    for i in gl.static_range(PARTS):
        y = tile.to_bfloat16(loaded[i] * inverse * tile.widen(weights[i]))
        if WRITE_Y:
            gl.store(y_ptr + first + i * WIDTH + columns, y, mask=i * WIDTH + columns < K)
        parts += (rotated_part(tile.widen(y)),)  # type: ignore[assignment]
    store_row(parts, row, codes_ptr, scales_ptr, K, FLOOR)


@gluon.jit(do_not_specialize=["num_rows", "scale_stride"])
def _tile_kernel(
    x_ptr,
    weight_ptr,
    inverse_ptr,
    codes_ptr,
    scales_ptr,
    num_rows,
    num_columns,
    scale_stride,
    padded_rows,
    column_blocks,
    RAGGED: gl.constexpr,
    MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
    POW2: gl.constexpr,
):
    """Recompute the norm of one 128 x 128 tile and quantize it as one group for WGrad.

    Reads bfloat16 x and float32 inverse rms [num_rows]. Writes FP8 codes [num_columns,
    padded_rows], zero past num_rows, and float32 scales [column_blocks, padded_rows / 128].
    """
    block, column = tile.place(column_blocks)
    rows, columns = tile.tile_rows(block), tile.tile_columns(column)
    x = tile.load_tile(x_ptr, block, column, num_rows, num_columns, num_columns)
    inverse = gl.load(inverse_ptr + rows, mask=rows < num_rows, other=0.0)
    if RAGGED:
        weight = gl.load(weight_ptr + columns, mask=columns < num_columns, other=0.0)
    else:
        weight = gl.load(weight_ptr + columns)
    weight = weight.to(gl.float32)
    # Same products and rounding as in _row_kernel, so the bfloat16 values are identical.
    y = tile.to_bfloat16(tile.widen(x) * inverse[:, None] * weight[None, :])
    tile.store_block_transposed(
        y,
        block,
        column,
        num_columns,
        codes_ptr,
        scales_ptr,
        scale_stride,
        padded_rows,
        MAXIMUM,
        FLOOR,
        POW2,
    )


@triton.jit(do_not_specialize=["num_rows", "rows_per_program"])
def _backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    inverse_ptr,
    dresidual_ptr,
    dx_ptr,
    partial_ptr,
    num_rows,
    rows_per_program,
    HAS_RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Write dx for rows_per_program rows, and dW of each program, float32 [programs, WIDTH]."""
    program = tl.program_id(0)
    columns = tl.arange(0, PADDED)
    mask = columns < WIDTH
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    dweight = tl.zeros([PADDED], tl.float32)
    first = program * rows_per_program
    # Two stages: the next row loads while this one is reduced.
    for row in tl.range(first, tl.minimum(first + rows_per_program, num_rows), num_stages=2):
        places = row.to(tl.int64) * WIDTH + columns
        dy = tl.load(dy_ptr + places, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + row)
        normed = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32) * inverse
        scaled = dy * weight
        # The rms depends on all values of the row; its gradient removes the component along x.
        mean = tl.sum(scaled * normed, 0) / WIDTH
        dx = inverse * (scaled - normed * mean)
        if HAS_RESIDUAL:
            dx += tl.load(dresidual_ptr + places, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + places, dx.to(tl.bfloat16), mask=mask)
        dweight += dy * normed
    # No atomics: the sums of all programs are added afterwards in a fixed order.
    tl.store(partial_ptr + program.to(tl.int64) * WIDTH + columns, dweight, mask=mask)


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    delta: Tensor | None = None,
    for_training: bool = False,
    scales: str | None = DEFAULT_SCALES,
    with_values: bool = False,
) -> tuple[Tensor, Tensor | None, QTensor, Tensor | None]:
    """Return quantize(rms_norm(x + delta)), without writing the BF16 norm unless requested.

    Args:
        x: bfloat16 [T, D] contiguous, D a multiple of 64.
        weight: bfloat16 [D].
        delta: bfloat16 [T, D], added to x; the sum is rounded to bfloat16.
        for_training: whether to return the inverse rms for backward.
        scales: "fp32" or "pow2" for FP8 scales, or None for INT8 rows (`precision.int8`).
        with_values: whether to return the BF16 norm too, for an adapter.

    Returns:
        x + delta [T, D] (x itself without delta); inverse rms, float32 [T], or None; the norm in
        1 x 128 groups [T, D]; the norm in BF16, or None.
    """
    _check(x, weight, delta)
    num_rows, width = x.shape
    if scales is None:
        rows = empty_int8_operand(num_rows, width, x.device)
    else:
        rows = empty_row_groups(num_rows, width, FORMATS["e4m3"][0], x.device)
    total, inverse = x if delta is None else torch.empty_like(x), None
    if for_training:
        inverse = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    values = torch.empty_like(x) if with_values else None
    options = rule("e4m3", scales or DEFAULT_SCALES)
    _launch_rows(x, weight, eps, delta, total, values, inverse, rows, options)
    return total, inverse, rows, values


def rms_norm_squares(
    total: Tensor, weight: Tensor, inverse_rms: Tensor, scales: str = DEFAULT_SCALES
) -> QTensor:
    """Recompute `rms_norm_quantize` for WGrad from total (x + delta) and inverse_rms.

    Returns:
        FP8 [T rounded up to a multiple of 128, D] in 128 x 128 groups, tokens contiguous.
    """
    _check(total, weight, None)
    num_rows, width = total.shape
    out = empty_transposed_blocks(num_rows, width, FORMATS["e4m3"][0], total.device)
    column_blocks = cdiv(width, FP8_BLOCK)
    if num_rows:
        _tile_kernel[(cdiv(num_rows, FP8_BLOCK) * column_blocks,)](
            total,
            weight,
            inverse_rms,
            out.codes,
            out.scales,
            num_rows,
            width,
            out.scales.stride(1),
            out.shape[0],
            column_blocks,
            is_ragged(width),
            **tile_rule("e4m3", scales),
        )
    return out


def rms_norm_forward(
    x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rms_norm(x + delta) [T, D], the inverse rms float32 [T], and x + delta [T, D]."""
    _check(x, weight, delta)
    y, total = torch.empty_like(x), x if delta is None else torch.empty_like(x)
    inverse = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    _launch_rows(x, weight, eps, delta, total, y, inverse, None, rule("e4m3", DEFAULT_SCALES))
    return y, inverse, total


def _launch_rows(
    x: Tensor,
    weight: Tensor,
    eps: float,
    delta: Tensor | None,
    total: Tensor,
    y: Tensor | None,
    inverse: Tensor | None,
    rows: QTensor | None,
    options: dict[str, Any],
) -> None:
    """Launch one program per row; x is a placeholder for unused tensors."""
    num_rows, width = x.shape
    if not num_rows:
        return
    if rows is not None and rows.rotated:
        warps = row_warps(width, 8 if num_rows <= _FEWER_ROWS else 16)
        _int8_kernel[(num_rows,)](
            x,
            x if delta is None else delta,
            weight,
            total,
            x if y is None else y,
            x if inverse is None else inverse,
            rows.codes,
            rows.scales,
            delta is not None,
            y is not None,
            inverse is not None,
            width,
            eps,
            AMAX_FLOOR,
            num_warps=warps,
            enable_fp_fusion=False,
            **overlapped(),
        )
        return
    padded, few = max(FP8_BLOCK, _padded(width)), num_rows <= _FEW_ROWS
    # Twice the warps for few rows: less work per thread means lower latency. No bits change.
    num_warps = min(16, 2 * _warps(padded)) if few else _warps(padded)
    _row_kernel[(num_rows,)](
        x,
        x if delta is None else delta,
        weight,
        total,
        x if y is None else y,
        x if inverse is None else inverse,
        rows.codes if rows else x,
        rows.scales if rows else x,
        rows.scales.stride(1) if rows else 0,
        delta is not None,
        y is not None,
        inverse is not None,
        rows is not None,
        few,
        width,
        padded,
        eps,
        **options,
        num_warps=num_warps,
        enable_fp_fusion=False,
        **overlapped(),
    )


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    inverse_rms: Tensor,
    dresidual: Tensor | None = None,
    sums: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of an RMSNorm's input, bfloat16 [T, D], and weight, float32 [D].

    Args:
        dy: bfloat16 [T, D] contiguous, gradient of the norm's output.
        x: bfloat16 [T, D], input of the norm.
        inverse_rms: float32 [T], saved by forward.
        dresidual: bfloat16 [T, D], gradient that bypasses the norm, added to dx before rounding.
        sums: If given, the terms of the weight's gradient are appended, float32 [terms, D], and the
            gradient that is returned is not their sum.
    """
    _check(dy, weight, dresidual)
    assert (x.dtype, x.shape, len(inverse_rms)) == (dy.dtype, dy.shape, len(dy))
    num_rows, width = x.shape
    padded = _padded(width)
    per_program = max(1, cdiv(num_rows, GRADIENT_TERMS))
    programs = cdiv(num_rows, per_program)
    dx = torch.empty_like(x)
    terms = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    if num_rows:
        _backward_kernel[(programs,)](
            dy,
            x.contiguous(),
            weight,
            inverse_rms,
            x if dresidual is None else dresidual,
            dx,
            terms,
            num_rows,
            per_program,
            dresidual is not None,
            width,
            padded,
            num_warps=2 * _warps(padded),
        )
    if sums is not None:
        sums.append(terms)
        return dx, terms[0]
    return dx, terms.sum(0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`kernels.norm.rms_norm` in Triton."""
    return NormFunction.apply(x, weight, eps, rms_norm_backward)


class NormFunction(torch.autograd.Function):
    """`rms_norm_forward` with a given `rms_norm_backward`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        gradients: Callable[..., tuple[Tensor, Tensor]],
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        y, inverse, _ = rms_norm_forward(flat, weight, eps)
        ctx.save_for_backward(flat, weight, inverse)
        ctx.gradients = gradients
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        dy = grads[0].to(torch.bfloat16).reshape(x.shape).contiguous()
        dx, dweight = ctx.gradients(dy, x, weight, inverse)
        return dx.view(grads[0].shape), dweight.to(weight.dtype), None, None


def _padded(width: int) -> int:
    """Return the width rounded up to a power of two, as `tl.arange` requires."""
    return 1 << (width - 1).bit_length()


def _warps(padded: int) -> int:
    """Return the warps per row for many rows: 32 values per thread, at most 8 warps."""
    return min(8, max(1, padded // 1024))


def _check(x: Tensor, weight: Tensor, other: Tensor | None) -> None:
    assert x.shape[1] <= _MAX_WIDTH, f"{x.shape[1]} columns"
    assert weight.shape == x.shape[1:]
    for tensor in (x, weight, x if other is None else other):
        assert (tensor.dtype, tensor.is_contiguous()) == (torch.bfloat16, True)
    assert other is None or other.shape == x.shape


_BLOCK_ROWS = 128
_PIECES = 32  # programs per block of rows, so that a few blocks fill a GPU
_BLOCK = 2048  # elements per program and iteration


@triton.jit
def _squares_kernel(
    x_ptr, sums_ptr, num_elements, block_elements, PIECES: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the sums of squares of a block of rows, in PIECES, [blocks, PIECES]."""
    block, piece = tl.program_id(0), tl.program_id(1)
    first = block.to(tl.int64) * block_elements
    end = tl.minimum(first + block_elements, num_elements)
    # The elements of a program and their order depend only on the shape of a block.
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(piece * BLOCK, block_elements, PIECES * BLOCK):
        places = first + start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + places, mask=places < end, other=0.0)
        squares += x * x
    tl.store(sums_ptr + block * PIECES + piece, tl.sum(squares, axis=0))


def block_squares(x: Tensor) -> Tensor:
    """`kernels.norm.block_squares` in Triton, float32 [ceil(N / 128), 32]."""
    assert (x.dtype, x.is_contiguous()) == (torch.float32, True)
    blocks = cdiv(len(x), _BLOCK_ROWS)
    sums = torch.empty(blocks, _PIECES, dtype=torch.float32, device=x.device)
    if x.numel():
        block_elements = min(len(x), _BLOCK_ROWS) * x.shape[1]
        _squares_kernel[(blocks, _PIECES)](
            x, sums, x.numel(), block_elements, _PIECES, _BLOCK, num_warps=8
        )
    return sums
