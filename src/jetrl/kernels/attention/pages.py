"""Device functions of decode attention for one warp: page loads, products, softmax and stores.

A page is one block of `attention.core`. It is copied to one of two stages in shared memory and
multiplied by all query heads of a key-value head at once. These heads are the columns of a tile,
for one query or, if drafts are verified, for several queries in order.
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
):
    """Return the number of keys and queries of a sequence, and the first row and queries of a tile.

    A tile without queries has no keys.
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
    """Return the row and the query head of each column of a tile, int32 like column."""
    row = column * 0 + first_row
    head = group * GROUP + column
    if SEVERAL:
        row = first_row + column // GROUP
        head = group * GROUP + column % GROUP
    return row, head


@gluon.jit
def column_is_used(column, used, GROUP: gl.constexpr, SEVERAL: gl.constexpr):
    """Return the mask of tile columns that are in use, for a tile with `used` queries."""
    ok = column < GROUP
    if SEVERAL:
        ok = column < GROUP * used
    return ok


@gluon.jit
def _by_channels(
    o, D: gl.constexpr, COLUMNS: gl.constexpr, SCALED: gl.constexpr, mma: gl.constexpr
):
    """Return o [D, COLUMNS] with D / 8 neighboring channels of a column per thread."""
    # Thread 4 g + t has columns 2 t and 2 t + 1 (of each 8), like an accumulator, and channels from
    # (D / 8) g: it quantizes in pairs and stores 8 or 16 codes at a time. For quantized values,
    # whose channels are in the order of `_coded_values`, this only renames registers.
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
    o,
    first_row,
    used,
    group,
    o_ptr,
    scales_ptr,
    scale_stride,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    COLUMNS: gl.constexpr,
    SEVERAL: gl.constexpr,
    QUANTIZE: gl.constexpr,
    MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
    POW2: gl.constexpr,
):
    """Store final outputs, as BF16 rows or as codes with one scale per head."""
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, o.type.layout))
    channel = gl.arange(0, D, gl.SliceLayout(1, o.type.layout))
    ok = column_is_used(column, used, GROUP, SEVERAL)
    row, head = row_and_head(column, first_row, group, GROUP, SEVERAL)
    places = o_ptr + row.to(gl.int64)[None, :] * (H * D) + head[None, :] * D + channel[:, None]
    o = tile.to_bfloat16(o)
    # A head of 128 channels is one 1 x 128 group. Codes come from the rounded row, like those of
    # the separate quantizer.
    if QUANTIZE:
        wide = tile.widen(o)
        scale, multiplier = tile.scale_and_multiplier(tile.largest(wide, 0), MAXIMUM, FLOOR, POW2)
        o = wide * multiplier[None, :]
        gl.store(scales_ptr + head.to(gl.int64) * scale_stride + row, scale, mask=ok)
    gl.store(places, o.to(o_ptr.dtype.element_ty), mask=ok[None, :])


@gluon.jit
def _store_state(
    o,
    m,
    total,
    first_row,
    used,
    split,
    group,
    part_ptr,
    state_ptr,
    max_splits,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    COLUMNS: gl.constexpr,
    SEVERAL: gl.constexpr,
):
    """Store the state of a split for `combine_kernel`."""
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
    acc,
    m,
    total,
    all_blocks,
    first_row,
    used,
    split,
    group,
    o_ptr,
    scales_ptr,
    scale_stride,
    part_ptr,
    state_ptr,
    max_splits,
    SPLIT: gl.constexpr,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    COLUMNS: gl.constexpr,
    SCALED: gl.constexpr,
    mma: gl.constexpr,
    SEVERAL: gl.constexpr,
    QUANTIZE: gl.constexpr,
    MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
    POW2: gl.constexpr,
):
    """Store final outputs if the split is the whole context, else its state.

    The unnormalized outputs acc are float32 [D, COLUMNS] in layout mma; the maxima m and sums total
    are float32 [COLUMNS].
    """
    # Folding a single split into the empty state changes no bit, so its output is final here. For
    # the same reason, a query with one split can store its state if others need two.
    if (all_blocks <= SPLIT) | (all_blocks > max_splits * SPLIT):
        # A context with more splits than the launch gives NaN instead of a truncated result.
        total = gl.where(all_blocks > max_splits * SPLIT, float("nan"), total)
        o = _by_channels(normalize(acc, inverse(total)[None, :], SCALED), D, COLUMNS, SCALED, mma)
        _store_heads(
            o,
            first_row,
            used,
            group,
            o_ptr,
            scales_ptr,
            scale_stride,
            H,
            GROUP,
            D,
            COLUMNS,
            SEVERAL,
            QUANTIZE,
            MAXIMUM,
            FLOOR,
            POW2,
        )
    else:
        _store_state(
            _by_channels(acc, D, COLUMNS, SCALED, mma),
            m,
            total,
            first_row,
            used,
            split,
            group,
            part_ptr,
            state_ptr,
            max_splits,
            H,
            GROUP,
            D,
            COLUMNS,
            SEVERAL,
        )


class Pages(NamedTuple):
    """Stored keys and values of one key-value head, and their two stages in shared memory.

    Attributes:
        k_ptr: FP8, int8 or bfloat16 [P, BLOCK_N, G, D], like v_ptr.
        ks_ptr: float32 [P, BLOCK_N, G], scales of the keys, like vs_ptr.
        tile_offsets: int32 [BLOCK_N, D], offsets of the head's elements in a page, with key indices
            taken modulo the keys that a warp copies per instruction.
        key_offsets: int32 [BLOCK_N], offsets of the head's scales in a page.
        k: [2, BLOCK_N, D] in shared memory, like v.
        k_scales: float32 [2, BLOCK_N] in shared memory, like v_scales.
        factors: three buffers float32 [BLOCK_N] for the factors of the keys; with one buffer, the
            compiler would insert barriers between the stores.
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
    """Start copying keys, values and scales of one head of a page to a stage in shared memory.

    Keys past the context are filled with zeros: a NaN would propagate through a weight of zero.
    """
    BLOCK_N: gl.constexpr = pages.k.shape[1]
    D: gl.constexpr = pages.k.shape[2]
    tile_layout: gl.constexpr = pages.tile_offsets.type.layout
    key_layout: gl.constexpr = pages.key_offsets.type.layout
    # The page address has 64 bits, offsets inside 32. A thread copies 16 bytes at a time. Its keys
    # are ROWS apart, so the other addresses are constant offsets from that of its first key: adding
    # 16 offsets to the page address took a third more instructions, and 16 registers.
    ROWS: gl.constexpr = tile_layout.threads_per_warp[0]
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, tile_layout))
    ok = (n < keys_left)[:, None]
    more = ((n - n % ROWS) * (G * D))[:, None]
    base = page.to(gl.int64) * (BLOCK_N * G * D)
    k_places = pages.k_ptr + base + pages.tile_offsets + more
    v_places = pages.v_ptr + base + pages.tile_offsets + more
    gluon_names.async_load(pages.k.index(stage), k_places, mask=ok)
    gluon_names.async_load(pages.v.index(stage), v_places, mask=ok)
    # The scales of a head have stride G, so copies are 4 bytes each; the warps of other heads use
    # the rest of each 32-byte sector from the cache.
    if SCALED:
        line = page.to(gl.int64) * (BLOCK_N * G) + pages.key_offsets
        line_ok = gl.arange(0, BLOCK_N, key_layout) < keys_left
        gluon_names.async_load(pages.k_scales.index(stage), pages.ks_ptr + line, mask=line_ok)
        gluon_names.async_load(pages.v_scales.index(stage), pages.vs_ptr + line, mask=line_ok)


@gluon.jit
def load_queries(
    q_ptr,
    first_row,
    used,
    group,
    G: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    COLUMNS: gl.constexpr,
    SEVERAL: gl.constexpr,
    SCALED: gl.constexpr,
    mma: gl.constexpr,
):
    """Load the query heads of a tile as a tensor-core operand [D, COLUMNS]; zeros if unused."""
    # For quantized keys a thread holds runs of 4 channels, like the keys (`attend_page`).
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
    """Load value codes as an FP16 operand [D, BLOCK_N]; row 8 j + g is channel (D / 8) g + j."""
    # As an operand, V^T needs in thread 4 g + t rows g and g + 8 of each 16, and keys 2 t, 2 t + 1,
    # 2 t + 8 and 2 t + 9 of each 16. The layouts below have these keys, but instead of the rows the
    # D / 8 neighboring channels of one 16 (8) byte load. In order: channels of a load, then keys
    # 1, 8, 16, 32 apart, in registers; keys 2 and 4 apart, then channels, across lanes.
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
    # From [keys, g, j] to rows 8 j + g: thread 4 g + t now has its operand elements.
    v = v.reshape([BLOCK_N, 8, D // 8]).permute((2, 1, 0)).reshape([D, BLOCK_N])
    v = gl.convert_layout(v, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)
    return widen_codes(v)


@gluon.jit
def attend_page(
    q,
    pages,
    stage,
    m,
    total,
    acc,
    position,
    first_key,
    count,
    query,
    MASKED: gl.constexpr,
    GROUP: gl.constexpr,
    SEVERAL: gl.constexpr,
    SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr,
    mma: gl.constexpr,
):
    """Return m and total [COLUMNS] and acc [D, COLUMNS], float32, updated by the keys of a page."""
    BLOCK_N: gl.constexpr = pages.k.shape[1]
    D: gl.constexpr = pages.k.shape[2]
    COLUMNS: gl.constexpr = q.shape[1]
    key_layout: gl.constexpr = pages.key_offsets.type.layout
    weights = pages.weights
    # Scores [keys, queries]. A thread reads 4 neighboring codes, one word, and widens them in
    # registers.
    k = pages.k.index(stage).load(gl.DotOperandLayout(0, mma, 4 if SCALED else 2))
    if SCALED:
        ks = pages.k_scales.index(stage).load(key_layout)
        vs = pages.v_scales.index(stage).load(key_layout)
        k = widen_codes(k)
    s = mma_v2(k, q, gl.zeros([BLOCK_N, COLUMNS], gl.float32, mma))
    # Factors: a lane computes those of two keys; all lanes then load the factors that the layout of
    # the scores needs from shared memory. The logarithm is a long chain of instructions, so there
    # is no barrier between it and the product: the two overlap.
    if SCALED:
        if MASKED:
            # Scales past the context are zeros, whose factors are not finite.
            ok = first_key + gl.arange(0, BLOCK_N, key_layout) <= position
            ks = gl.where(ok, ks, 1.0)
            vs = gl.where(ok, vs, 1.0)
        a, b, c = key_factors(ks, vs, SCORE_SCALE)
        pages.factors[0].store(a)
        pages.factors[1].store(b)
        pages.factors[2].store(c)

    # Softmax along the keys.
    last = gl.full([COLUMNS], position, gl.int32, m.type.layout)
    if MASKED and SEVERAL:
        # Columns without a query use the position of the last query.
        own = query + gl.arange(0, COLUMNS, m.type.layout) // GROUP
        last = position - count + 1 + gl.minimum(own, count - 1)
    e, m, total, decay = softmax_block(
        s, pages.factors, m, total, last, first_key, MASKED, SCALED, SCORE_SCALE, 0
    )

    # Weights are the right operand of the second product, whose register layout is the transpose of
    # an accumulator's, so they are exchanged through shared memory.
    weights.store(e.to(weights.dtype))
    if SCALED:
        v = _coded_values(pages.v.index(stage), BLOCK_N, D, mma)
    else:
        v = pages.v.index(stage).permute((1, 0)).load(gl.DotOperandLayout(0, mma, 2))
    p = weights.load(gl.DotOperandLayout(1, mma, 2))
    return m, total, mma_v2(v, p, acc * decay[None, :])
