"""A tile of 128 rows and 128 columns in the registers of 8 warps, and its two quantized forms.

Shared by the kernels that make 1 x 128 and 128 x 1 groups of the same values in one pass. They
are bound by memory if, and only if, a tile costs few instructions, so the layout is explicit
(Gluon). A thread holds a patch of 8 x 8 values, a warp 32 rows of 64 columns:

* eight bfloat16 of a row are one 16-byte load, and their eight codes one 8-byte store;
* eight codes of a column are one 8-byte store into the transposed copy: the tile is transposed by
  naming registers in another order, without shared memory, and a warp still writes whole sectors
  of 32 tokens;
* the divisions of a group are done once, in a line of 128 threads, and the multiplier handed back.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NUM_WARPS = 8
_LANES = [[0, 8], [0, 16], [0, 32], [8, 0], [16, 0]]
_WARPS = [[0, 64], [32, 0], [64, 0]]
_ALONG_ROW, _ALONG_COLUMN = [[0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0], [4, 0]]
# The same values in the same threads; registers count along the row, or along the column.
TILE = gl.constexpr(
    gl.DistributedLinearLayout(_ALONG_ROW + _ALONG_COLUMN, _LANES, _WARPS, [], [128, 128])
)
TURNED = gl.constexpr(
    gl.DistributedLinearLayout(_ALONG_COLUMN + _ALONG_ROW, _LANES, _WARPS, [], [128, 128])
)
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))


@gluon.jit
def tile_rows(block):
    """Row numbers of a tile, for addresses along its rows."""
    return block * 128 + gl.arange(0, 128, gl.SliceLayout(1, TILE))


@gluon.jit
def tile_columns(column):
    """Column numbers of a tile, for addresses along its rows."""
    return column * 128 + gl.arange(0, 128, gl.SliceLayout(0, TILE))


@gluon.jit
def load_tile(x_ptr, block, column, num_rows, num_columns, row_stride):
    """x [128, 128] as stored, zeros outside."""
    rows, columns = tile_rows(block), tile_columns(column)
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    places = rows.to(gl.int64)[:, None] * row_stride + columns[None, :]
    return gl.load(x_ptr + places, mask=mask, other=0.0)


@gluon.jit
def round_to_bfloat16(x):
    """float32 x rounded to the nearest bfloat16, as float32, two elements at a time."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, -65536; }",
        "=r,=r,r,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def abs_bits(x):
    """int32 bits of |x|: ordered like |x|, with NaN above Inf."""
    return x.to(gl.float32).to(gl.int32, bitcast=True) & 0x7FFFFFFF


@gluon.jit
def scale_and_multiplier(
    amax_bits, MAXIMUM: gl.constexpr, FLOOR_BITS: gl.constexpr, POW2: gl.constexpr
):
    """(stored scale, multiplier), float32, for the bits of a group's maximum."""
    amax = gl.maximum(amax_bits, FLOOR_BITS).to(gl.float32, bitcast=True)
    limit = gl.full_like(amax, MAXIMUM)
    scale = gl.div_rn(amax, limit)
    if POW2:
        bits = scale.to(gl.int32, bitcast=True)
        rounded = (bits + 0x7FFFFF) & 0x7F800000
        scale = gl.where(bits < 0x7F800000, rounded, bits).to(gl.float32, bitcast=True)
        multiplier = gl.div_rn(gl.full_like(scale, 1.0), scale)
    else:
        multiplier = gl.div_rn(limit, amax)
    return scale, multiplier


@gluon.jit
def store_row_groups(
    y, block, column, num_rows, num_columns, codes_ptr, scales_ptr, scale_stride,
    MAXIMUM: gl.constexpr, FLOOR_BITS: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    """Quantize y [128, 128] float32 in TILE as 1 x 128 groups."""
    amax_bits = gl.convert_layout(gl.max(abs_bits(y), 1), LINE)
    scale, multiplier = scale_and_multiplier(amax_bits, MAXIMUM, FLOOR_BITS, POW2)
    line_rows = block * 128 + gl.arange(0, 128, LINE)
    line_places = column.to(gl.int64) * scale_stride + line_rows
    gl.store(scales_ptr + line_places, scale, mask=line_rows < num_rows)
    multiplier = gl.convert_layout(multiplier, gl.SliceLayout(1, TILE))
    codes = (y * multiplier[:, None]).to(codes_ptr.dtype.element_ty)
    rows, columns = tile_rows(block), tile_columns(column)
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    places = rows.to(gl.int64)[:, None] * num_columns + columns[None, :]
    gl.store(codes_ptr + places, codes, mask=mask)


@gluon.jit
def store_turned(codes_ptr, codes, block, column, num_columns, padded_rows):
    """Store codes [128, 128] in TURNED at [column, row] of an array of rows of padded_rows."""
    rows = block * 128 + gl.arange(0, 128, gl.SliceLayout(1, TURNED))
    columns = column * 128 + gl.arange(0, 128, gl.SliceLayout(0, TURNED))
    places = columns.to(gl.int64)[None, :] * padded_rows + rows[:, None]
    gl.store(codes_ptr + places, codes, mask=(columns < num_columns)[None, :])


@gluon.jit
def store_token_groups(
    y, block, column, num_columns, padded_tokens, codes_ptr, scales_ptr,
    MAXIMUM: gl.constexpr, FLOOR_BITS: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    """Quantize y [128, 128] float32 in TILE as 128 x 1 groups, stored with tokens contiguous."""
    amax_bits = gl.convert_layout(gl.max(abs_bits(y), 0), LINE)
    scale, multiplier = scale_and_multiplier(amax_bits, MAXIMUM, FLOOR_BITS, POW2)
    line_columns = column * 128 + gl.arange(0, 128, LINE)
    line_places = block.to(gl.int64) * num_columns + line_columns
    gl.store(scales_ptr + line_places, scale, mask=line_columns < num_columns)
    multiplier = gl.convert_layout(multiplier, gl.SliceLayout(0, TURNED))
    turned = gl.convert_layout(y, TURNED, assert_trivial=True)
    codes = (turned * multiplier[None, :]).to(codes_ptr.dtype.element_ty)
    store_turned(codes_ptr, codes, block, column, num_columns, padded_tokens)
