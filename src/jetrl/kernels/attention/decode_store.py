"""Name the rows of a warp of decode, and store what it has computed: outputs or split states.

The layouts are those that `attention.decode` explains. A tile's columns are the query heads of a
key-value head, of one query or, where drafts are verified, of several, query after query.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetrl.kernels.attention.core import inverse, normalize
from jetrl.precision.hopper import tile


@gluon.jit
def context_of_tile(
    lengths_ptr, queries_ptr, first_ptr, seq, query, SEVERAL: gl.constexpr, TILE: gl.constexpr
):  # fmt: skip
    """Return a sequence's keys, how many queries it has, a tile's first row and its queries.

    A tile without a query has no keys.

    Args:
        lengths_ptr: int32 [B], keys of each context.
        queries_ptr: int32 [B], queries of each sequence; not read unless SEVERAL.
        first_ptr: int32 [B], the row of each sequence's first query; not read unless SEVERAL.
    """
    length = gl.load(lengths_ptr + seq)
    count = seq * 0 + 1
    row = seq
    used = count
    if SEVERAL:
        count = gl.load(queries_ptr + seq)
        row = gl.load(first_ptr + seq) + query
        length = gl.where(query < count, length, 0)
        used = gl.minimum(count - query, TILE)
    return length, count, row, used


@gluon.jit
def row_and_head(column, first_row, group, GROUP: gl.constexpr, SEVERAL: gl.constexpr):
    """Return the row of the forward and the query head of a tile's columns.

    Args:
        column: int32 [COLUMNS], the columns.
        first_row: the row of the tile's first query.
    """
    row = column * 0 + first_row
    head = group * GROUP + column
    if SEVERAL:
        row = first_row + column // GROUP
        head = group * GROUP + column % GROUP
    return row, head


@gluon.jit
def column_is_used(column, used, GROUP: gl.constexpr, SEVERAL: gl.constexpr):
    """Return which columns of a tile are a query's heads.

    Args:
        column: int32 [COLUMNS], the columns.
        used: the queries of the tile, at most 0 for none; 1 unless SEVERAL.
    """
    ok = column < GROUP
    if SEVERAL:
        ok = column < GROUP * used
    return ok


@gluon.jit
def _by_channels(
    o, D: gl.constexpr, COLUMNS: gl.constexpr, SCALED: gl.constexpr, mma: gl.constexpr
):
    """Return o [D, COLUMNS] with D / 8 neighbouring channels of a column in each thread.

    A thread then makes codes in pairs and stores 8 or 16 at a time. With coded values, whose
    channels come in the order of `pages._coded_values`, this only renames registers.

    Args:
        o: float32 [D, COLUMNS], in the layout mma.
    """
    # Thread 4 g + t has columns 2 t and 2 t + 1 (of each 8), as an accumulator has, and channels
    # from (D / 8) g on.
    SPAN: gl.constexpr = D // 8  # channels
    spans: gl.constexpr = [[SPAN, 0], [2 * SPAN, 0], [4 * SPAN, 0]]
    within: gl.constexpr = [[1, 0], [2, 0], [4, 0]] if D == 64 else [[1, 0], [2, 0], [4, 0], [8, 0]]
    columns: gl.constexpr = [[0, 1]] if COLUMNS == 8 else [[0, 1], [0, 8]]
    layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=within + columns,
        lane_bases=[[0, 2], [0, 4]] + spans,  # noqa: RUF005
        warp_bases=[],
        block_bases=[],
        shape=[D, COLUMNS],
    )
    if SCALED:
        o = o.reshape([D // 8, 8, COLUMNS]).permute((1, 0, 2)).reshape([D, COLUMNS])
    return gl.convert_layout(o, layout, assert_trivial=SCALED)


@gluon.jit
def _store_heads(
    o, first_row, used, group, o_ptr, scales_ptr, scale_stride,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, COLUMNS: gl.constexpr,
    SEVERAL: gl.constexpr,
    QUANTIZE: gl.constexpr, MAXIMUM: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    """Store finished outputs, as BF16 rows or as codes with a scale for each head.

    Args:
        o: float32 [D, COLUMNS], the heads of key-value head `group` in the first columns.
        first_row: the row of the tile's first query.
        o_ptr: bfloat16 or, with QUANTIZE, FP8 [rows, H, D].
        scales_ptr: float32 [H, scale_stride].
        scale_stride: from one head's line of scales to the next.
    """
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, o.type.layout))
    channel = gl.arange(0, D, gl.SliceLayout(1, o.type.layout))
    ok = column_is_used(column, used, GROUP, SEVERAL)
    row, head = row_and_head(column, first_row, group, GROUP, SEVERAL)
    places = o_ptr + row.to(gl.int64)[None, :] * (H * D) + head[None, :] * D + channel[:, None]
    o = tile.to_bfloat16(o)
    # A head of 128 channels is one 1 x 128 group. Codes are made of the rounded row, as the
    # quantizer would make them of the one in memory.
    if QUANTIZE:
        wide = tile.widen(o)
        scale, multiplier = tile.scale_and_multiplier(tile.largest(wide, 0), MAXIMUM, FLOOR, POW2)
        o = wide * multiplier[None, :]
        gl.store(scales_ptr + head.to(gl.int64) * scale_stride + row, scale, mask=ok)
    gl.store(places, o.to(o_ptr.dtype.element_ty), mask=ok[None, :])


@gluon.jit
def _store_state(
    o, m, total, first_row, used, split, group, part_ptr, state_ptr, max_splits,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, COLUMNS: gl.constexpr,
    SEVERAL: gl.constexpr,
):  # fmt: skip
    """Store the state of one of several splits, for `combine_kernel`.

    Args:
        o: float32 [D, COLUMNS], the accumulator, heads in the first columns.
        m, total: float32 [COLUMNS], the maxima and sums.
        first_row: the row of the tile's first query.
        part_ptr: float32 [rows, max_splits, H, D].
        state_ptr: float32 [rows, max_splits, H, 2].
    """
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, o.type.layout))
    channel = gl.arange(0, D, gl.SliceLayout(1, o.type.layout))
    row, head = row_and_head(column, first_row, group, GROUP, SEVERAL)
    line = (row.to(gl.int64) * max_splits + split) * H + head
    ok = column_is_used(column, used, GROUP, SEVERAL)
    gl.store(part_ptr + line[None, :] * D + channel[:, None], o, mask=ok[None, :])
    column = gl.arange(0, COLUMNS, m.type.layout)
    row, head = row_and_head(column, first_row, group, GROUP, SEVERAL)
    line = (row.to(gl.int64) * max_splits + split) * H + head
    ok = column_is_used(column, used, GROUP, SEVERAL)
    gl.store(state_ptr + line * 2, m, mask=ok)
    gl.store(state_ptr + line * 2 + 1, total, mask=ok)


@gluon.jit
def store_split(
    acc, m, total, all_blocks, first_row, used, split, group, o_ptr, scales_ptr, scale_stride,
    part_ptr, state_ptr, max_splits, SPLIT: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr,
    D: gl.constexpr, COLUMNS: gl.constexpr, SCALED: gl.constexpr, mma: gl.constexpr,
    SEVERAL: gl.constexpr,
    QUANTIZE: gl.constexpr, MAXIMUM: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    """Store what a split gave: finished outputs if it is the whole context, else its state.

    Args:
        acc: float32 [D, COLUMNS], the outputs before they are normalized, in the layout mma.
        m: float32 [COLUMNS], the maxima.
        total: float32 [COLUMNS], the sums.
        first_row: the row of the tile's first query.
        o_ptr: where finished outputs go, as of `_store_heads`.
        scales_ptr: as of `_store_heads`.
        scale_stride: as of `_store_heads`.
        part_ptr: where a split's outputs go, as of `_store_state`.
        state_ptr: as of `_store_state`.
        SCALED: whether keys and values are codes with scales.
        QUANTIZE: as of `_store_heads`.
        MAXIMUM: as of `_store_heads`.
        FLOOR: as of `_store_heads`.
        POW2: as of `_store_heads`.
    """
    # Folding the only split into the empty state would change no bit, so it is finished here; and
    # so a query that sees one split beside one that sees two may leave its state as that one does.
    if (all_blocks <= SPLIT) | (all_blocks > max_splits * SPLIT):
        # A context of more splits than the launch has is NaN, not a truncated answer.
        total = gl.where(all_blocks > max_splits * SPLIT, float("nan"), total)
        o = _by_channels(normalize(acc, inverse(total)[None, :], SCALED), D, COLUMNS, SCALED, mma)
        _store_heads(
            o, first_row, used, group, o_ptr, scales_ptr, scale_stride, H, GROUP, D, COLUMNS,
            SEVERAL, QUANTIZE, MAXIMUM, FLOOR, POW2,
        )  # fmt: skip
    else:
        _store_state(
            _by_channels(acc, D, COLUMNS, SCALED, mma), m, total, first_row, used, split, group,
            part_ptr, state_ptr, max_splits, H, GROUP, D, COLUMNS, SEVERAL,
        )  # fmt: skip
