"""A 128 x 128 tile in the registers of 8 warps, and its quantization along rows and columns.

Shared by kernels that quantize the same values in 1 x 128 and 128 x 1 groups in one pass. They are
memory-bound only with few instructions per tile, so the layout is explicit (Gluon). A thread holds
8 x 8 values, a warp 32 rows of 64 columns:

* eight bfloat16 of a row are one 16-byte load, and their codes one 8-byte store;
* eight codes of a column are one 8-byte store into the transposed copy: renaming registers
  transposes the tile without shared memory, and a warp writes whole sectors of 32 tokens;
* maxima use packed bfloat16 pairs, and the tile stays packed, in 32 registers per thread;
* each division is done once per group, in a vector over 128 threads, and the multiplier broadcast.

A limit of 128 registers, two programs per SM, is fastest if nothing spills (H200, torch 2.11,
triton 3.6, 2026-11-21). 16 warps, or a persistent loop that stages the next tile, were slower.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NUM_WARPS = 8
# Bases of the linear layout, powers of two in (row, column): the values that registers, lanes and
# warps hold.
_LANES = [[0, 8], [0, 16], [0, 32], [8, 0], [16, 0]]
_WARPS = [[0, 64], [32, 0], [64, 0]]
_ALONG_ROW, _ALONG_COLUMN = [[0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0], [4, 0]]
# Both layouts place the same values in the same threads. Registers run along rows in TILE, so that
# vectors are within a row, and along columns in TURNED. Converting between them moves no data.
TILE = gl.constexpr(
    gl.DistributedLinearLayout(_ALONG_ROW + _ALONG_COLUMN, _LANES, _WARPS, [], [128, 128])
)
TURNED = gl.constexpr(
    gl.DistributedLinearLayout(_ALONG_COLUMN + _ALONG_ROW, _LANES, _WARPS, [], [128, 128])
)
_PROPAGATE_NAN = gl.constexpr(tl.PropagateNan.ALL)
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))  # one group per thread, for 128 groups


@gluon.jit
def place(column_blocks):
    """Return the row block and column block of this program; the last rows, still in L2, first."""
    program = gl.num_programs(0) - 1 - gl.program_id(0)
    return program // column_blocks, program % column_blocks


@gluon.jit
def tile_rows(block):
    """Return the row indices of a tile, int32 [128]."""
    return block * 128 + gl.arange(0, 128, gl.SliceLayout(1, TILE))


@gluon.jit
def tile_columns(column):
    """Return the column indices of a tile, int32 [128]."""
    return column * 128 + gl.arange(0, 128, gl.SliceLayout(0, TILE))


@gluon.jit
def tile_places(ptr, block, column, stride):
    """Return pointers [128, 128], in TILE, to a tile of a matrix.

    The corner address is int64; offsets within the tile are int32, which saves registers.
    """
    corner = ptr + (block.to(gl.int64) * 128 * stride + column * 128)
    rows = gl.arange(0, 128, gl.SliceLayout(1, TILE))
    columns = gl.arange(0, 128, gl.SliceLayout(0, TILE))
    return corner + (rows[:, None] * stride + columns[None, :])


@gluon.jit
def tile_mask(block, column, num_rows, num_columns):
    """Return the mask of tile elements inside the matrix, [128, 128] in TILE."""
    rows = gl.arange(0, 128, gl.SliceLayout(1, TILE))
    columns = gl.arange(0, 128, gl.SliceLayout(0, TILE))
    rows_left, columns_left = num_rows - block * 128, num_columns - column * 128
    return (rows < rows_left)[:, None] & (columns < columns_left)[None, :]


@gluon.jit
def load_tile(x_ptr, block, column, num_rows, num_columns, row_stride):
    """Load a tile [128, 128] in TILE, in the dtype of the matrix, with zeros outside the matrix."""
    mask = tile_mask(block, column, num_rows, num_columns)
    return gl.load(tile_places(x_ptr, block, column, row_stride), mask=mask, other=0.0)


@gluon.jit
def to_bfloat16(x):
    """Return float32 x rounded to the nearest bfloat16, two elements per instruction."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def widen(x):
    """Return x as float32; for bfloat16, one instruction per element."""
    if x.dtype == gl.bfloat16:
        # A bfloat16 is the upper half of a float32: shift the lower element of a pair up, and mask
        # the other half for the upper element.
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, -65536;",
            "=r,=r,r",
            [x],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def larger(a, b):
    """Return the larger of a and b; NaN propagates."""
    return gl.maximum(a, b, propagate_nan=_PROPAGATE_NAN)


@gluon.jit
def largest(x, axis: gl.constexpr):
    """Return the maximum of |x| along an axis; NaN propagates."""
    return gl.reduce(gl.abs(x), axis, larger)


@gluon.jit
def larger_pairs(a, b):
    """Return the larger of two bfloat16, two elements per instruction; NaN propagates."""
    return gl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def magnitudes(x):
    """Return |x| of bfloat16, two elements per instruction."""
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, 0x7fff7fff;", "=r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def split_rows(x, ROWS: gl.constexpr):
    """Return the even and the odd rows of x [ROWS, 128], which are registers of one thread."""
    pairs = gl.reshape(x, [ROWS // 2, 2, 128])
    return gl.split(gl.permute(pairs, [0, 2, 1]))


@gluon.jit
def _maxima_down(x):
    """Return maxima over the eight rows of each thread, [16, 128], for x >= 0, bfloat16 in TILE."""
    a, b = split_rows(x, 128)
    a, b = split_rows(larger_pairs(a, b), 64)
    a, b = split_rows(larger_pairs(a, b), 32)
    return larger_pairs(a, b)


@gluon.jit
def _maxima_across(x, ROWS: gl.constexpr):
    """Return maxima [ROWS, 16, 2] over each thread's four pairs of a row of x [ROWS, 128] >= 0."""
    a, b = gl.split(gl.permute(gl.reshape(x, [ROWS, 16, 2, 2, 2]), [0, 1, 3, 4, 2]))
    a, b = gl.split(gl.permute(larger_pairs(a, b), [0, 1, 3, 2]))
    return larger_pairs(a, b)


@gluon.jit
def column_maxima(x):
    """Return the maximum of |x| per column of a tile in TILE, float32 [128]."""
    if x.dtype == gl.bfloat16:
        # Reduce within threads, then across lanes by shuffles and across warps by shared memory.
        return gl.reduce(_maxima_down(magnitudes(x)).to(gl.float32), 0, larger)
    else:
        return largest(x.to(gl.float32), 0)


@gluon.jit
def row_maxima(x):
    """Return the maximum of |x| per row of a tile in TILE, float32 [128]."""
    if x.dtype == gl.bfloat16:
        # Reduce within threads first, then over the two halves of a pair, lanes and warps.
        pairs = gl.reshape(_maxima_across(magnitudes(x), 128), [128, 32])
        return gl.reduce(pairs.to(gl.float32), 1, larger)
    else:
        return largest(x.to(gl.float32), 1)


@gluon.jit
def tile_maximum(x):
    """Return the maximum of |x| over a bfloat16 tile in TILE, a float32 scalar."""
    pairs = gl.reshape(_maxima_across(_maxima_down(magnitudes(x)), 16), [512])
    return gl.reduce(pairs.to(gl.float32), 0, larger)


@gluon.jit
def scale_and_multiplier(amax, MAXIMUM: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr):
    """Return scales to store, and multipliers for the codes, float32 (`precision.quantize`)."""
    amax = larger(amax, FLOOR)
    scale = gl.div_rn(amax, MAXIMUM)
    if POW2:
        # Round up to a power of two: adding a mantissa of ones carries into the exponent unless the
        # mantissa is 0. Inf and NaN are kept.
        bits = scale.to(gl.int32, bitcast=True)
        rounded = (bits + 0x7FFFFF) & 0x7F800000
        scale = gl.where(bits < 0x7F800000, rounded, bits).to(gl.float32, bitcast=True)
        multiplier = gl.div_rn(1.0, scale)
    else:
        multiplier = gl.div_rn(MAXIMUM, amax)
    return scale, multiplier


@gluon.jit
def to_int8(x):
    """Round float32 x to INT8 codes: ties to even; NaN becomes 0."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d;
        cvt.rni.s32.f32 a, $1;
        cvt.rni.s32.f32 b, $2;
        cvt.rni.s32.f32 c, $3;
        cvt.rni.s32.f32 d, $4;
        cvt.pack.sat.s8.s32.b32 d, d, c, 0;
        cvt.pack.sat.s8.s32.b32 $0, b, a, d;
        }
        """,
        "=r,f,f,f,f",
        [x],
        dtype=gl.int8,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def to_codes(x, dtype: gl.constexpr):
    """Round float32 x to FP8 or INT8 codes."""
    if dtype == gl.int8:
        codes = to_int8(x)
    else:
        codes = x.to(dtype)
    return codes


@gluon.jit
def store_transposed(codes_ptr, codes, block, column, num_columns, padded_rows):
    """Store a tile of codes [128, 128] in TURNED, transposed, to [num_columns, padded_rows]."""
    corner = codes_ptr + (column.to(gl.int64) * 128 * padded_rows + block * 128)
    rows = gl.arange(0, 128, gl.SliceLayout(1, TURNED))
    columns = gl.arange(0, 128, gl.SliceLayout(0, TURNED))
    mask = (columns < num_columns - column * 128)[None, :]
    gl.store(corner + (columns[None, :] * padded_rows + rows[:, None]), codes, mask=mask)


@gluon.jit
def store_groups(
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
    RAGGED: gl.constexpr,
    ROW_GROUPS: gl.constexpr,
    MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
    POW2: gl.constexpr,
):
    """Quantize a tile in 128 x 1 groups and, if ROW_GROUPS, in 1 x 128 groups too.

    Args:
        y: bfloat16, float16 or float32 [128, 128] in TILE.
        num_rows: number of tokens; later rows become zeros in 128 x 1 groups.
        row_codes_ptr: FP8 [num_rows, num_columns padded to 128], written if ROW_GROUPS.
        row_scales_ptr: float32 [num_columns / 128, num_rows], written if ROW_GROUPS.
        token_codes_ptr: FP8 [num_columns, padded_tokens], written.
        token_scales_ptr: float32 [padded_tokens / 128, num_columns], written.
    """
    # Scales: convert maxima to a vector over 128 threads, so that each group divides once, and
    # convert the multipliers back to the layout of the tile.
    amax = gl.convert_layout(column_maxima(y), LINE)
    line = gl.arange(0, 128, LINE)
    if ROW_GROUPS:
        row_amax = gl.convert_layout(row_maxima(y), LINE)
        row_scale, row_multiplier = scale_and_multiplier(row_amax, MAXIMUM, FLOOR, POW2)
        places = row_scales_ptr + (column.to(gl.int64) * scale_stride + block * 128)
        gl.store(places + line, row_scale, mask=line < num_rows - block * 128)
        row_multiplier = gl.convert_layout(row_multiplier, gl.SliceLayout(1, TILE))
    scale, multiplier = scale_and_multiplier(amax, MAXIMUM, FLOOR, POW2)
    places = token_scales_ptr + (block.to(gl.int64) * num_columns + column * 128)
    gl.store(places + line, scale, mask=line < num_columns - column * 128)
    multiplier = gl.convert_layout(multiplier, gl.SliceLayout(0, TURNED))
    # Codes for both groupings come from the same registers, in two orders.
    wide = widen(y)
    if ROW_GROUPS:
        codes = (wide * row_multiplier[:, None]).to(row_codes_ptr.dtype.element_ty)
        width = (num_columns + 127) // 128 * 128 if RAGGED else num_columns
        mask = tile_mask(block, column, num_rows, width)
        gl.store(tile_places(row_codes_ptr, block, column, width), codes, mask=mask)
    turned = gl.convert_layout(wide, TURNED, assert_trivial=True)
    codes = (turned * multiplier[None, :]).to(token_codes_ptr.dtype.element_ty)
    store_transposed(token_codes_ptr, codes, block, column, num_columns, padded_tokens)


@gluon.jit
def store_block_transposed(
    y,
    block,
    column,
    num_columns,
    codes_ptr,
    scales_ptr,
    scale_stride,
    padded_rows,
    MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
    POW2: gl.constexpr,
):
    """Quantize a tile as one 128 x 128 group, and store it transposed for WGrad.

    Args:
        y: bfloat16 [128, 128] in TILE.
        codes_ptr: FP8 [num_columns, padded_rows], written.
        scales_ptr: float32 [num_columns / 128 rounded up, padded_rows / 128], written.
    """
    # All threads divide: broadcasting one scale would cost another barrier.
    scale, multiplier = scale_and_multiplier(tile_maximum(y), MAXIMUM, FLOOR, POW2)
    gl.store(scales_ptr + (column.to(gl.int64) * scale_stride + block), scale)
    turned = gl.convert_layout(widen(y), TURNED, assert_trivial=True)
    codes = (turned * multiplier).to(codes_ptr.dtype.element_ty)
    store_transposed(codes_ptr, codes, block, column, num_columns, padded_rows)
