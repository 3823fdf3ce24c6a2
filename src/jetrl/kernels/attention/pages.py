"""A warp's way through pages in decode: copies, products, softmax, and the store of its result.

A page is one block of `attention.core`. It is copied to one of two stages of shared memory and
multiplied there with all query heads of a key-value head at once. A tile's columns are these heads,
of one query or, if drafts are verified, of several, query after query.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from jetrl.kernels.attention.core import (
    inverse,
    key_factors,
    normalize,
    query_codes,
    softmax_block,
    widen_codes,
)
from jetrl.precision.triton import gluon_names, tile


@gluon.jit
def context_of_tile(
    lengths_ptr, queries_ptr, first_ptr, seq, query, SEVERAL: gl.constexpr, TILE: gl.constexpr
):  # fmt: skip
    """Return a sequence's keys and queries, and a tile's first row and queries.

    A tile without a query has no keys.
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
    """Return the forward's row and the query head of each column of a tile, int32 like column."""
    row = column * 0 + first_row
    head = group * GROUP + column
    if SEVERAL:
        row = first_row + column // GROUP
        head = group * GROUP + column % GROUP
    return row, head


@gluon.jit
def column_is_used(column, used, GROUP: gl.constexpr, SEVERAL: gl.constexpr):
    """Return which columns of a tile are a query's heads, for `used` queries in the tile."""
    ok = column < GROUP
    if SEVERAL:
        ok = column < GROUP * used
    return ok


@gluon.jit
def _by_channels(
    o, D: gl.constexpr, COLUMNS: gl.constexpr, SCALED: gl.constexpr, mma: gl.constexpr
):
    """Return o [D, COLUMNS] with D / 8 neighboring channels of a column in each thread."""
    # Thread 4 g + t has columns 2 t and 2 t + 1 (of each 8), as an accumulator has, and channels
    # from (D / 8) g on: it makes codes in pairs and stores 8 or 16 at a time. With coded values,
    # whose channels come in the order of `_coded_values`, this only renames registers.
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
    """Store finished outputs, as BF16 rows or as codes with a scale for each head."""
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, o.type.layout))
    channel = gl.arange(0, D, gl.SliceLayout(1, o.type.layout))
    ok = column_is_used(column, used, GROUP, SEVERAL)
    row, head = row_and_head(column, first_row, group, GROUP, SEVERAL)
    places = o_ptr + row.to(gl.int64)[None, :] * (H * D) + head[None, :] * D + channel[:, None]
    o = tile.to_bfloat16(o)
    # A head of 128 channels is one 1 x 128 group. Codes are built from the rounded row, as the
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
    """Store the state of one of several splits, for `combine_kernel`."""
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
    """Store finished outputs if the split is the whole context, else its state.

    The outputs acc, before they are normalized, are float32 [D, COLUMNS] in layout mma; the maxima
    m and sums total are float32 [COLUMNS].
    """
    # Folding the only split into the empty state would change no bit, so it is finished here; and
    # so a query that sees one split next to one that sees two may leave its state as that one does.
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


class Pages(NamedTuple):
    """The stored keys and values of one key-value head, and their two stages in shared memory.

    Attributes:
        k_ptr: FP8, int8 or bfloat16 [P, BLOCK_N, G, D], like v_ptr.
        ks_ptr: float32 [P, BLOCK_N, G], the keys' scales, like vs_ptr.
        tile_offsets: int32 [BLOCK_N, D], places of the head's elements in a page, as if each key
            were one of the first that the warp copies at a time.
        key_offsets: int32 [BLOCK_N], places of the head's scales in a page.
        k: [2, BLOCK_N, D] in shared memory, like v.
        k_scales: float32 [2, BLOCK_N] in shared memory, like v_scales.
        factors: three lines of float32 [BLOCK_N], scratch for the keys' factors. The compiler puts
            a barrier between writes to one piece of memory, and none between these.
        weights: 16-bit [BLOCK_N, COLUMNS], scratch for the softmax weights.
    """

    k_ptr: Any
    v_ptr: Any
    ks_ptr: Any
    vs_ptr: Any
    tile_offsets: gl.tensor
    key_offsets: gl.tensor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    k_scales: gl.shared_memory_descriptor
    v_scales: gl.shared_memory_descriptor
    factors: tuple[gl.shared_memory_descriptor, ...]
    weights: gl.shared_memory_descriptor


@gluon.jit
def load_page(pages, page, stage, keys_left, G: gl.constexpr, SCALED: gl.constexpr):
    """Start copying a page's keys, values and scales of one head to a stage of shared memory.

    Keys past the context arrive as zeros: a NaN there would pass through a weight of zero.
    """
    BLOCK_N: gl.constexpr = pages.k.shape[1]
    D: gl.constexpr = pages.k.shape[2]
    tile_layout: gl.constexpr = pages.tile_offsets.type.layout
    key_layout: gl.constexpr = pages.key_offsets.type.layout
    # The page's address in 64 bits, what lies inside in 32. A thread copies 16 bytes at a time. Its
    # keys lie ROWS apart, so that one address, of its first key, gives the others by constants:
    # sums of the page's address and 16 places took a third more instructions, and 16 registers.
    ROWS: gl.constexpr = tile_layout.threads_per_warp[0]
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, tile_layout))
    ok = (n < keys_left)[:, None]
    more = ((n - n % ROWS) * (G * D))[:, None]
    base = page.to(gl.int64) * (BLOCK_N * G * D)
    k_places = pages.k_ptr + base + pages.tile_offsets + more
    v_places = pages.v_ptr + base + pages.tile_offsets + more
    gluon_names.async_load(pages.k.index(stage), k_places, mask=ok)
    gluon_names.async_load(pages.v.index(stage), v_places, mask=ok)
    # Scales of one head lie G apart: 4 bytes a copy, and of each 32 bytes that arrive the other
    # heads' warps use the rest, from the cache.
    if SCALED:
        line = page.to(gl.int64) * (BLOCK_N * G) + pages.key_offsets
        line_ok = gl.arange(0, BLOCK_N, key_layout) < keys_left
        gluon_names.async_load(pages.k_scales.index(stage), pages.ks_ptr + line, mask=line_ok)
        gluon_names.async_load(pages.v_scales.index(stage), pages.vs_ptr + line, mask=line_ok)


@gluon.jit
def load_queries(
    q_ptr, first_row, used, group, G: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    COLUMNS: gl.constexpr, SEVERAL: gl.constexpr, SCALED: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Return the heads of a tile's queries as a tensor-core operand [D, COLUMNS], else zeros."""
    # With coded keys a thread holds runs of 4 channels, as of the keys (`attend_page`).
    layout: gl.constexpr = gl.DotOperandLayout(1, mma, 4 if SCALED else 2)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    channel = gl.arange(0, D, gl.SliceLayout(1, layout))
    offsets = column * D
    if SEVERAL:
        offsets = (column // GROUP) * (G * GROUP * D) + (column % GROUP) * D
    ok = column_is_used(column, used, GROUP, SEVERAL)
    base = q_ptr + (first_row.to(gl.int64) * G + group) * (GROUP * D)
    places = base + offsets[None, :] + channel[:, None]
    return query_codes(gl.load(places, mask=ok[None, :], other=0.0), SCALED)


@gluon.jit
def _coded_values(v_smem, BLOCK_N: gl.constexpr, D: gl.constexpr, mma: gl.constexpr):
    """Return coded values as an FP16 operand [D, BLOCK_N]; row 8 j + g is channel (D / 8) g + j."""
    # The operand of V^T wants in thread 4 g + t rows g and g + 8 of each 16, and keys 2 t, 2 t + 1,
    # 2 t + 8 and 2 t + 9 of each 16. The layouts below have these keys, except for rows the D / 8
    # neighboring channels that one read of 16 (8) bytes delivers. In order: channels of a read,
    # then keys 1, 8, 16, 32 apart, in registers; keys 2 and 4 apart, then channels, across lanes.
    if D == 128:
        wide: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [8, 0], [16, 0], [32, 0]],
            lane_bases=[[2, 0], [4, 0], [0, 16], [0, 32], [0, 64]],
            warp_bases=[],
            block_bases=[],
            shape=[BLOCK_N, D],
        )
        v = v_smem.load(wide)
    else:
        narrow: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [8, 0], [16, 0], [32, 0]],
            lane_bases=[[2, 0], [4, 0], [0, 8], [0, 16], [0, 32]],
            warp_bases=[],
            block_bases=[],
            shape=[BLOCK_N, D],
        )
        v = v_smem.load(narrow)
    # From [keys, g, j] to rows 8 j + g: thread 4 g + t now has what the operand wants of it.
    v = v.reshape([BLOCK_N, 8, D // 8]).permute((2, 1, 0)).reshape([D, BLOCK_N])
    v = gl.convert_layout(v, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)
    return widen_codes(v)


@gluon.jit
def attend_page(
    q, pages, stage, m, total, acc, position, first_key, count, query,
    MASKED: gl.constexpr, GROUP: gl.constexpr, SEVERAL: gl.constexpr, SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Return m and total [COLUMNS] and acc [D, COLUMNS], float32, with a page's keys folded in."""
    BLOCK_N: gl.constexpr = pages.k.shape[1]
    D: gl.constexpr = pages.k.shape[2]
    COLUMNS: gl.constexpr = q.shape[1]
    key_layout: gl.constexpr = pages.key_offsets.type.layout
    weights = pages.weights
    # Scores [keys, queries]. Of codes a thread reads 4 neighboring ones, which is one word, and
    # widens them in registers.
    k = pages.k.index(stage).load(gl.DotOperandLayout(0, mma, 4 if SCALED else 2))
    if SCALED:
        ks = pages.k_scales.index(stage).load(key_layout)
        vs = pages.v_scales.index(stage).load(key_layout)
        k = widen_codes(k)
    s = mma_v2(k, q, gl.zeros([BLOCK_N, COLUMNS], gl.float32, mma))
    # Factors: a lane works out those of two keys, and all lanes read the lines that they need by
    # the scores' layout, through shared memory. The logarithm is a long chain of instructions: no
    # barrier stands between it and the product, so that one fills the other's gaps.
    if SCALED:
        if MASKED:
            # Scales past the context arrived as zeros, whose factors are not finite.
            ok = first_key + gl.arange(0, BLOCK_N, key_layout) <= position
            ks = gl.where(ok, ks, 1.0)
            vs = gl.where(ok, vs, 1.0)
        a, b, c = key_factors(ks, vs, SCORE_SCALE)
        pages.factors[0].store(a)
        pages.factors[1].store(b)
        pages.factors[2].store(c)

    # The softmax, down the keys.
    last = gl.full([COLUMNS], position, gl.int32, m.type.layout)
    if MASKED and SEVERAL:
        # Columns without a query see what the last query sees.
        own = query + gl.arange(0, COLUMNS, m.type.layout) // GROUP
        last = position - count + 1 + gl.minimum(own, count - 1)
    e, m, total, decay = softmax_block(
        s, pages.factors, m, total, last, first_key, MASKED, SCALED, SCORE_SCALE, 0
    )

    # Weights are the right operand of the second product, whose registers hold the transpose of an
    # accumulator's: they change threads through shared memory.
    weights.store(e.to(weights.dtype))
    if SCALED:
        v = _coded_values(pages.v.index(stage), BLOCK_N, D, mma)
    else:
        v = pages.v.index(stage).permute((1, 0)).load(gl.DotOperandLayout(0, mma, 2))
    p = weights.load(gl.DotOperandLayout(1, mma, 2))
    return m, total, mma_v2(v, p, acc * decay[None, :])
