"""`precision.quantize` in Triton, at memory bandwidth.

A program processes a tile of 128 columns, except for rounding to BF16. The fused norm and SwiGLU
kernels share the per-row device functions; those for a whole tile are in `triton.tile`. `/` is not
IEEE division in Triton, hence `div_rn`. Maxima compare the bits of |x| as integers, which orders
NaN above Inf above all finite numbers. So a non-finite value makes the scale of its group
non-finite and its own code NaN.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import struct
import zlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetrl.precision.quantize import AMAX_FLOOR, FORMATS, FP8_BLOCK, FP8Format, QTensor
from jetrl.precision.triton import tile
from jetrl.precision.triton.launch import let_next_start, overlapped, wait_for_previous
from jetrl.precision.triton.layout import (
    cdiv,
    empty_row_groups,
    empty_token_groups,
    empty_transposed_blocks,
    empty_weight,
    is_ragged,
    whole_groups,
)
from jetrl.settings.presets import DEFAULT_SCALES

FLOOR_BITS = struct.unpack("<i", struct.pack("<f", AMAX_FLOOR))[0]
# With at most 128 registers per thread, two tile programs fit on an SM.
TILE_OPTIONS = {"num_warps": tile.NUM_WARPS, "maxnreg": 128, "enable_fp_fusion": False}
_FEW_ROWS = 256
_DITHERED = 4096  # elements per program: 16 per thread


@triton.jit
def abs_bits(x):
    """Return the int32 bits of |x|, which order like |x|, with NaN above Inf."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def round_to_bfloat16(x):
    """Return x rounded to bfloat16, as float32; takes three instructions per two elements."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, -65536; }",
        "=r,=r,r,r",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def scale_and_multiplier(
    amax_bits, MAXIMUM: tl.constexpr, FLOOR_BITS: tl.constexpr, POW2: tl.constexpr
):
    """Return scales to store, and multipliers for the codes, float32 (`precision.quantize`).

    Args:
        amax_bits: int32 [...], float32 bits of the maximum of each group.
        FLOOR_BITS: float32 bits of the lower bound for maxima.
        POW2: whether to round scales up to a power of two.
    """
    amax = tl.maximum(amax_bits, FLOOR_BITS).to(tl.float32, bitcast=True)
    limit = tl.full(amax.shape, MAXIMUM, tl.float32)
    scale = tl.math.div_rn(amax, limit)
    if POW2:
        # Round up to a power of two: adding a mantissa of ones carries into the exponent unless the
        # mantissa is 0. Inf and NaN are kept.
        bits = scale.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFFFF) & 0x7F800000
        scale = tl.where(bits < 0x7F800000, rounded, bits).to(tl.float32, bitcast=True)
        multiplier = tl.math.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)
    else:
        multiplier = tl.math.div_rn(limit, amax)
    return scale, multiplier


@triton.jit
def store_row_groups(
    y,
    rows,
    column,
    num_rows,
    num_columns,
    codes_ptr,
    scales_ptr,
    scale_stride,
    RAGGED: tl.constexpr,
    MAXIMUM: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    POW2: tl.constexpr,
):
    """Quantize R rows of 128 columns in 1 x 128 groups.

    Args:
        y: float32 [R, 128].
        rows: int32 [R], row indices.
        codes_ptr: FP8 [num_rows, num_columns rounded up to a multiple of 128], written.
        scales_ptr: float32 [num_columns / 128, num_rows], rows scale_stride apart, written.
    """
    scale, multiplier = scale_and_multiplier(tl.max(abs_bits(y), 1), MAXIMUM, FLOOR_BITS, POW2)
    codes = (y * multiplier[:, None]).to(codes_ptr.dtype.element_ty)
    columns = column * 128 + tl.arange(0, 128)
    width = tl.cdiv(num_columns, 128) * 128 if RAGGED else num_columns
    wide_rows = rows.to(tl.int64)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    tl.store(codes_ptr + wide_rows[:, None] * width + columns[None, :], codes, mask=mask)
    tl.store(scales_ptr + column.to(tl.int64) * scale_stride + rows, scale, mask=rows < num_rows)


@triton.jit
def load_tile(x_ptr, rows, column, num_rows, num_columns, row_stride):
    """Load 128 columns of rows, int32 [R], as float32 [R, 128]; zeros outside the matrix."""
    columns = column * 128 + tl.arange(0, 128)
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    places = rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    return tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)


# In the kernels below, block and column index the tile of a program, in units of 128 (ROWS rows in
# the rows kernel). They do not specialize on num_rows: each new number of tokens would recompile.


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def _rows_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    num_rows,
    num_columns,
    row_stride,
    scale_stride,
    column_blocks,
    ROWS: tl.constexpr,
    RAGGED: tl.constexpr,
    MAXIMUM: tl.constexpr,
    FLOOR_BITS: tl.constexpr,
    POW2: tl.constexpr,
):
    """Quantize ROWS rows of 128 columns in 1 x 128 groups."""
    block, column = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    rows = block * ROWS + tl.arange(0, ROWS)
    wait_for_previous()  # the previous kernel writes x
    let_next_start()
    y = load_tile(x_ptr, rows, column, num_rows, num_columns, row_stride)
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


@gluon.jit(do_not_specialize=["num_rows", "scale_stride"])
def _tile_kernel(
    x_ptr,
    row_codes_ptr,
    row_scales_ptr,
    token_codes_ptr,
    token_scales_ptr,
    num_rows,
    num_columns,
    row_stride,
    scale_stride,
    padded_tokens,
    column_blocks,
    RAGGED: gl.constexpr,
    ROW_GROUPS: gl.constexpr,
    MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
    POW2: gl.constexpr,
):
    """Quantize a tile in 128 x 1 groups and, if ROW_GROUPS, in 1 x 128 groups too."""
    block, column = tile.place(column_blocks)
    y = tile.load_tile(x_ptr, block, column, num_rows, num_columns, row_stride)
    tile.store_groups(
        y,
        block,
        column,
        num_rows,
        num_columns,
        row_codes_ptr,
        row_scales_ptr,
        scale_stride,
        token_codes_ptr,
        token_scales_ptr,
        padded_tokens,
        RAGGED,
        ROW_GROUPS,
        MAXIMUM,
        FLOOR,
        POW2,
    )


@gluon.jit(do_not_specialize=["num_rows", "scale_stride"])
def _square_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    num_rows,
    num_columns,
    row_stride,
    scale_stride,
    padded_rows,
    column_blocks,
    MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
    POW2: gl.constexpr,
):
    """Quantize a tile as one 128 x 128 group, and store it transposed."""
    block, column = tile.place(column_blocks)
    y = tile.load_tile(x_ptr, block, column, num_rows, num_columns, row_stride)
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


@gluon.jit
def _weight_kernel(
    w_ptr,
    codes_ptr,
    scales_ptr,
    num_rows,
    num_columns,
    scale_stride,
    column_blocks,
    RAGGED: gl.constexpr,
    MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
    POW2: gl.constexpr,
):
    """Quantize a tile of a weight as one 128 x 128 group, not transposed."""
    block, column = gl.program_id(0) // column_blocks, gl.program_id(0) % column_blocks
    w = tile.load_tile(w_ptr, block, column, num_rows, num_columns, num_columns).to(gl.float32)
    # Reduce columns first, then their maxima in a vector over 128 threads. All threads divide, and
    # one stores the scale. The multipliers are equal, so a maximum over them is a broadcast.
    amax = tile.largest(gl.convert_layout(tile.largest(w, 0), tile.LINE), 0)
    line = gl.full([128], 0.0, gl.float32, tile.LINE) + amax
    scale, multipliers = tile.scale_and_multiplier(line, MAXIMUM, FLOOR, POW2)
    one = gl.arange(0, 128, tile.LINE)
    gl.store(scales_ptr + block * scale_stride + column + one, scale, mask=one == 0)
    codes = (w * tile.largest(multipliers, 0)).to(codes_ptr.dtype.element_ty)
    width = (num_columns + 127) // 128 * 128 if RAGGED else num_columns
    gl.store(tile.tile_places(codes_ptr, block, column, width), codes)


@gluon.jit
def _turn_kernel(
    codes_ptr,
    scales_ptr,
    turned_codes_ptr,
    turned_scales_ptr,
    num_rows,
    num_columns,
    scale_stride,
    turned_scale_stride,
    column_blocks,
):
    """Transpose a tile of codes and its scale, without requantization."""
    block, column = gl.program_id(0) // column_blocks, gl.program_id(0) % column_blocks
    codes = gl.load(tile.tile_places(codes_ptr, block, column, num_columns))
    turned = gl.convert_layout(codes, tile.TURNED, assert_trivial=True)
    tile.store_transposed(turned_codes_ptr, turned, block, column, num_columns, num_rows)
    one = gl.arange(0, 128, tile.LINE)
    scale = gl.load(scales_ptr + block * scale_stride + column + 0 * one)
    places = column * turned_scale_stride + block + one
    gl.store(turned_scales_ptr + places, scale, mask=one == 0)


@triton.jit(do_not_specialize=["begin", "key"])
def _dither_kernel(x_ptr, rounded_ptr, begin, key, size, BLOCK: tl.constexpr):
    """Round BLOCK elements stochastically, as `precision.quantize.dithered_bf16`."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    bits = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    draws = ((places + begin).to(tl.uint32) ^ key.to(tl.uint32)) * 2654435761
    draws = (draws ^ (draws >> 15)) * 2246822519
    draws = (draws ^ (draws >> 13)) * 3266489917
    nan = (bits & 0x7FFFFFFF) > 0x7F800000  # the sum could carry out of the mantissa
    rounded = bits + ((draws ^ (draws >> 16)) & 0xFFFF).to(tl.int32)
    bits = tl.where(nan, bits | 0x400000, rounded)
    upper = (bits >> 16).to(tl.int16)
    tl.store(rounded_ptr + places, upper.to(tl.bfloat16, bitcast=True), mask=inside)


def rule(format: FP8Format, scales: str) -> dict[str, Any]:
    """Return the quantizer constants for row kernels."""
    return {"MAXIMUM": FORMATS[format][1], "FLOOR_BITS": FLOOR_BITS, "POW2": scales == "pow2"}


def tile_rule(format: FP8Format, scales: str) -> dict[str, Any]:
    """Return the quantizer constants and launch options for tile kernels."""
    constants = {"MAXIMUM": FORMATS[format][1], "FLOOR": AMAX_FLOOR, "POW2": scales == "pow2"}
    return constants | TILE_OPTIONS


def rows_of_program(num_rows: int) -> int:
    """Return the rows per program for 1 x 128 groups, fewer in decode; changes no bits."""
    return 8 if num_rows <= _FEW_ROWS else 32


def quantize_rows(x: Tensor, format: FP8Format = "e4m3", scales: str = DEFAULT_SCALES) -> QTensor:
    """Return 1 x 128 groups of x, equal to `precision.quantize(x)`.

    Args:
        x: bfloat16, float16 or float32 [T, K], each row contiguous.
    """
    assert x.stride(1) == 1, f"strides {list(x.stride())}"
    num_rows, num_columns = x.shape
    rows = empty_row_groups(num_rows, num_columns, FORMATS[format][0], x.device)
    column_blocks = cdiv(num_columns, FP8_BLOCK)
    if x.numel():
        _rows_kernel[(cdiv(num_rows, rows_of_program(num_rows)) * column_blocks,)](
            x,
            rows.codes,
            rows.scales,
            num_rows,
            num_columns,
            x.stride(0),
            rows.scales.stride(1),
            column_blocks,
            rows_of_program(num_rows),
            is_ragged(num_columns),
            **rule(format, scales),
            num_warps=4,
            enable_fp_fusion=False,
            **overlapped(),
        )
    return rows


def quantize_rows_and_tokens(
    x: Tensor, format: FP8Format = "e4m3", scales: str = DEFAULT_SCALES
) -> tuple[QTensor, QTensor]:
    """Return `quantize_rows(x)`, and 128 x 1 groups for WGrad, zero-padded, tokens contiguous."""
    assert x.stride(1) == 1, f"strides {list(x.stride())}"
    num_rows, num_columns = x.shape
    dtype = FORMATS[format][0]
    tokens = empty_token_groups(num_rows, num_columns, dtype, x.device)
    rows = empty_row_groups(num_rows, num_columns, dtype, x.device)
    column_blocks = cdiv(num_columns, FP8_BLOCK)
    if x.numel():
        _tile_kernel[(cdiv(num_rows, FP8_BLOCK) * column_blocks,)](
            x,
            rows.codes,
            rows.scales,
            tokens.codes,
            tokens.scales,
            num_rows,
            num_columns,
            x.stride(0),
            rows.scales.stride(1),
            tokens.shape[0],
            column_blocks,
            is_ragged(num_columns),
            True,
            **tile_rule(format, scales),
        )
    return rows, tokens


def quantize_squares(x: Tensor, scales: str = DEFAULT_SCALES) -> QTensor:
    """Return 128 x 128 groups of x for WGrad, tokens contiguous, zero-padded to a multiple of 128.

    Args:
        x: bfloat16 [T, K], each row contiguous.
    """
    assert (x.dtype, x.stride(1)) == (torch.bfloat16, 1)
    num_rows, num_columns = x.shape
    out = empty_transposed_blocks(num_rows, num_columns, FORMATS["e4m3"][0], x.device)
    column_blocks = cdiv(num_columns, FP8_BLOCK)
    if num_rows:
        _square_kernel[(cdiv(num_rows, FP8_BLOCK) * column_blocks,)](
            x,
            out.codes,
            out.scales,
            num_rows,
            num_columns,
            x.stride(0),
            out.scales.stride(1),
            out.shape[0],
            column_blocks,
            **tile_rule("e4m3", scales),
        )
    return out


def quantize_weight(
    w: Tensor, format: FP8Format = "e4m3", scales: str = DEFAULT_SCALES, out: QTensor | None = None
) -> QTensor:
    """Return 128 x 128 groups of a weight, equal to `precision.quantize(w, (128, 128))`.

    Args:
        w: float32 or bfloat16 [N, K] contiguous.
        out: result of an earlier call to overwrite, or None to allocate.
    """
    num_rows, num_columns = w.shape
    q = empty_weight(num_rows, num_columns, FORMATS[format][0], w.device) if out is None else out
    assert w.is_contiguous(), f"strides {list(w.stride())}"
    assert q.shape == w.shape, f"{list(q.shape)} for {list(w.shape)}"
    column_blocks = cdiv(num_columns, FP8_BLOCK)
    _weight_kernel[(cdiv(num_rows, FP8_BLOCK) * column_blocks,)](
        w,
        q.codes,
        q.scales,
        num_rows,
        num_columns,
        q.scales.stride(0),
        column_blocks,
        is_ragged(num_columns),
        **tile_rule(format, scales),
    )
    return q


def dithered_bf16(x: Tensor, name: str, first_row: int = 0) -> Tensor:
    """`precision.quantize.dithered_bf16` of float32 [M, K]; a NaN stays NaN."""
    x = x.contiguous()
    rounded, key = torch.empty_like(x, dtype=torch.bfloat16), zlib.crc32(name.encode()) - (1 << 31)
    _dither_kernel[(cdiv(x.numel(), _DITHERED),)](
        x, rounded, first_row * x.shape[1], key, x.numel(), _DITHERED, num_warps=8
    )
    return rounded


def turned_weight(q: QTensor) -> QTensor:
    """Return a transposed copy of a weight's 128 x 128 groups, in the layout of DGrad."""
    num_rows, num_columns = q.shape
    assert q.block == (FP8_BLOCK, FP8_BLOCK), f"groups {q.block}"
    blocks, column_blocks = cdiv(num_rows, FP8_BLOCK), cdiv(num_columns, FP8_BLOCK)
    codes = whole_groups(q.codes, blocks * FP8_BLOCK)
    turned = empty_weight(num_columns, num_rows, q.codes.dtype, q.codes.device)
    stored_rows, stored_columns = codes.shape
    # Codes are moved as bytes, whatever their type.
    _turn_kernel[(blocks * column_blocks,)](
        codes.view(torch.uint8),
        q.scales,
        turned.codes.view(torch.uint8),
        turned.scales,
        stored_rows,
        stored_columns,
        q.scales.stride(0),
        turned.scales.stride(0),
        column_blocks,
        **TILE_OPTIONS,
    )
    return turned
