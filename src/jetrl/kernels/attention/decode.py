"""Attention of one new token per sequence over pages of keys and values (decode).

The kernel is memory-bound: it reads the codes of keys and values once, 2 * (D + 4) bytes per token
and key-value head. One warp handles a (sequence, key-value head, split) and streams its pages, the
blocks of `attention.core`, through shared memory. Several warps share an SM, so loads are always in
flight. A second kernel folds the splits of long contexts.

Everything is transposed: scores are [keys, queries] = K Q^T and outputs [channels, queries] =
V^T E. So the query heads of a group fill the 8 columns of a tensor-core instruction (16 for larger
groups) instead of 16 rows that would be mostly padding. Keys are read as words of the operand
layout, which permutes head_dim (`channel_of_slot`). Values are read 16 bytes at a time, and the
accumulator rows are renamed accordingly when they are stored.

When drafts are verified, a sequence has several queries (`SequenceQueries`). A warp fills up to 16
columns with them (`TILE`), and each attends to the keys up to its own. The splits are those of the
last query: a split without keys for a query has the empty state, which changes no bit when folded.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from jetrl.kernels.attention.core import SPLIT_KEYS, fold_weights, inverse, normalize, score_scale
from jetrl.kernels.attention.layout import BLOCK_KEYS, KeyValueCodes, SequenceQueries, check_queries
from jetrl.kernels.attention.pages import (
    Pages,
    attend_page,
    context_of_tile,
    load_page,
    load_queries,
    store_split,
)
from jetrl.precision.quantize import AMAX_FLOOR, FORMATS, FP8_BLOCK, QTensor
from jetrl.precision.triton import gluon_names, tile
from jetrl.precision.triton.launch import gluon_let_next_start, gluon_wait_for_previous, overlapped
from jetrl.precision.triton.layout import empty_row_groups
from jetrl.precision.triton.quantize import quantize_rows
from jetrl.settings.presets import DEFAULT_SCALES


@gluon.jit(do_not_specialize=["scale_stride", "max_splits"])
def combine_kernel(
    part_ptr, state_ptr, keys_ptr, o_ptr, scales_ptr, scale_stride, max_splits,
    H: gl.constexpr, D: gl.constexpr, SPLIT_LENGTH: gl.constexpr, SCALED: gl.constexpr,
    CHUNK: gl.constexpr,
    QUANTIZE: gl.constexpr, MAXIMUM: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    """Fold the splits of one head of one row, in order, in one warp.

    All queries of a sequence have as many splits as its last one; those past the keys of a query
    are empty states, which change no bit.

    Args:
        part_ptr: float32 [R, max_splits, H, D], accumulators.
        state_ptr: float32 [R, max_splits, H, 2], maxima and sums.
        keys_ptr: int32 [R], number of keys in the context of each row; 0 for padding.
        o_ptr: bfloat16 or, if QUANTIZE, FP8 [R, H, D] with scales float32 [H, scale_stride];
            written.
    """
    # A lane has neighboring channels: 16 bytes of a float32 row for head_dim 128.
    layout: gl.constexpr = gl.BlockedLayout([D // 32], [32], [1], [0])
    head = gl.program_id(0)
    row = gl.program_id(1)
    gluon_let_next_start()
    gluon_wait_for_previous()
    length = gl.load(keys_ptr + row)
    num_splits = (length + SPLIT_LENGTH - 1) // SPLIT_LENGTH
    # The decode kernel finished contexts of one split, and those too long for its launch (NaN).
    if (num_splits > 1) & (num_splits <= max_splits):
        # All lanes keep the maximum and sum of the row, which saves broadcasting the weights.
        d = gl.arange(0, D, layout)
        zero = gl.zeros([D], gl.int32, layout)
        big_m = gl.full([D], float("-inf"), gl.float32, layout)
        big_total = gl.zeros([D], gl.float32, layout)
        out = gl.zeros([D], gl.float32, layout)
        for start in range(0, num_splits, CHUNK):
            # Issue all loads of a chunk before the first fold: folds are sequential, and each would
            # otherwise wait for memory.
            accs = ()
            ms = ()
            totals = ()
            for i in gl.static_range(CHUNK):
                line = (row.to(gl.int64) * max_splits + start + i) * H + head
                ok = (zero + (start + i)) < num_splits
                state = state_ptr + line * 2 + zero
                accs += (gl.load(part_ptr + line * D + d, mask=ok, other=0.0),)  # type: ignore[assignment]
                ms += (gl.load(state, mask=ok, other=float("-inf")),)  # type: ignore[assignment]
                totals += (gl.load(state + 1, mask=ok, other=0.0),)  # type: ignore[assignment]
            for i in gl.static_range(CHUNK):
                # Splits past the last are empty states, which folding ignores.
                big_m, big_total, u, w = fold_weights(big_m, big_total, ms[i], totals[i])
                out = gl.fma(accs[i], w, out * u)
        # Round to BF16 before quantizing, like the separate quantizer; a head is one group of 128
        # (QUANTIZE requires head_dim 128).
        o = normalize(out, inverse(big_total), SCALED).to(gl.bfloat16).to(gl.float32)
        if QUANTIZE:
            amax = gl.zeros([D], gl.float32, layout) + tile.largest(o, 0)
            scale, multiplier = tile.scale_and_multiplier(amax, MAXIMUM, FLOOR, POW2)
            o = o * multiplier
            gl.store(scales_ptr + head.to(gl.int64) * scale_stride + row + d, scale, mask=d == 0)
        places = o_ptr + (row.to(gl.int64) * H + head) * D + d
        gl.store(places, o.to(o_ptr.dtype.element_ty))


@gluon.jit
def _start_first_pages(
    pages, page_0, page_1, first, last, length, count,
    G: gl.constexpr, BLOCK_N: gl.constexpr, SCALED: gl.constexpr, SEVERAL: gl.constexpr,
):  # fmt: skip
    """Start copying the first two pages of a split; return the first block with a new key."""
    # Waits count the latest copy groups that may be in flight, so each step commits a group, even
    # an empty one. Groups 0 and 1 are the first two pages, if they are older than the page of the
    # newest key: the previous kernel writes the newest key and value, but no earlier pages.
    newest = gl.maximum(length - count, 0) // BLOCK_N
    for i in range(2):
        if (first + i < last) & (first + i < newest):
            page = gl.where(i == 0, page_0, page_1)
            load_page(pages, page, i, length - (first + i) * BLOCK_N, G, SCALED)
        async_copy.commit_group()
    # Group 2, after the previous kernel has ended: the pages with new keys among the first two.
    gluon_wait_for_previous()
    if not SEVERAL:
        late = newest - first
        if (newest < last) & (late >= 0) & (late < 2):
            page = gl.where(late == 0, page_0, page_1)
            load_page(pages, page, late, length - newest * BLOCK_N, G, SCALED)
    else:
        for i in range(2):
            if (first + i < last) & (first + i >= newest):
                page = gl.where(i == 0, page_0, page_1)
                load_page(pages, page, i, length - (first + i) * BLOCK_N, G, SCALED)
    async_copy.commit_group()
    return newest


@gluon.jit(do_not_specialize=["table_stride", "table_width", "scale_stride", "max_splits", "early"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, pages_ptr, lengths_ptr, queries_ptr, first_ptr, o_ptr,
    scales_ptr, part_ptr, state_ptr, table_stride, table_width, scale_stride, max_splits, early,
    G: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr,
    SPLIT: gl.constexpr, SEVERAL: gl.constexpr, TILE: gl.constexpr, SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr,
    QUANTIZE: gl.constexpr, MAXIMUM: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    """Compute attention of the query heads of one key-value head over one split of a sequence.

    The grid is (G * ceil(max queries / TILE), B, max_splits), with one warp per program. Writes
    final outputs for contexts of one split, else the state of the split.

    Args:
        q_ptr: bfloat16 [R, H, D].
        k_ptr: FP8, int8 or bfloat16 [P, BLOCK_N, G, D], like v_ptr; scales are float32
            [P, BLOCK_N, G].
        pages_ptr: int32 [B, table_width], pages of each sequence.
        lengths_ptr: int32 [B], number of keys per context, including those of all its queries.
        queries_ptr: int32 [B], queries per sequence; read if SEVERAL, like first_ptr.
        first_ptr: int32 [B], row of each first query.
        o_ptr: bfloat16 or, if QUANTIZE, FP8 [R, H, D] with scales float32 [H, scale_stride];
            written for contexts of one split.
        part_ptr: float32 [R, max_splits, H, D], accumulators, written for longer contexts.
        state_ptr: float32 [R, max_splits, H, 2], maxima and sums, written for longer contexts.
        early: 1 to copy older pages while the previous kernel is still running (`attend_decode`).
        TILE: queries per warp; their heads fill at most 16 columns.
    """
    # One warp computes m16n8k16 products: M is keys or channels, N is queries, 8 or 16 of them.
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]
    )
    VEC: gl.constexpr = 16 if SCALED else 8  # elements in 16 bytes, the widest copy
    CHUNKS: gl.constexpr = D // VEC  # copies of one key
    PHASES: gl.constexpr = 8 if CHUNKS >= 8 else CHUNKS
    COLUMNS: gl.constexpr = 8 if GROUP * TILE <= 8 else 16
    # Pages in shared memory are swizzled: the 16-byte chunks of a key are permuted by its index, so
    # that a product reads the same chunk of neighboring keys from different banks.
    tile_layout: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // CHUNKS, CHUNKS], [1, 1], [1, 0])
    key_layout: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0]))
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(VEC, 8 // PHASES, PHASES, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lines: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    column_layout: gl.constexpr = gl.SliceLayout(0, mma)

    # Load the length and the first two page numbers together, to pay one memory latency; page
    # numbers past the context are not used. Outside a graph, all loads wait for the kernel before.
    group, query = gl.program_id(0) % G, gl.program_id(0) // G * TILE
    seq = gl.program_id(1)
    split = gl.program_id(2)
    gluon_let_next_start()
    if early == 0:
        gluon_wait_for_previous()
    first = split * SPLIT
    table = pages_ptr + seq.to(gl.int64) * table_stride
    context = context_of_tile(lengths_ptr, queries_ptr, first_ptr, seq, query, SEVERAL, TILE)
    length, count, row, used = context
    page_0 = gl.load(table + first)
    page_1 = gl.load(table + gl.minimum(first + 1, table_width - 1))
    all_blocks = (length + BLOCK_N - 1) // BLOCK_N
    last = gl.minimum(first + SPLIT, all_blocks)
    # Warps past the end of the context have no work; the first still writes zeros to an empty row.
    if (first < last) | ((split == 0) & (not SEVERAL)):
        # Two stages of pages and the scratch of `attend_page` take 35 KB with codes and head_dim
        # 128, so six warps share an SM. Three or four stages were not faster.
        k_smem = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [2, BLOCK_N, D], swizzled)
        v_smem = gl.allocate_shared_memory(v_ptr.dtype.element_ty, [2, BLOCK_N, D], swizzled)
        ks_smem = gl.allocate_shared_memory(gl.float32, [2, BLOCK_N], line)
        vs_smem = gl.allocate_shared_memory(gl.float32, [2, BLOCK_N], line)
        a_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_N], line)
        b_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_N], line)
        c_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_N], line)
        e_dtype: gl.constexpr = gl.float16 if SCALED else gl.bfloat16
        e_smem = gl.allocate_shared_memory(e_dtype, [BLOCK_N, COLUMNS], lines)
        n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, tile_layout)) % (32 // CHUNKS)
        d = gl.arange(0, D, gl.SliceLayout(0, tile_layout))
        tile_offsets = (n * (G * D) + group * D)[:, None] + d[None, :]
        key_offsets = gl.arange(0, BLOCK_N, key_layout) * G + group
        pages = Pages(
            k_ptr, v_ptr, ks_ptr, vs_ptr, tile_offsets, key_offsets,
            k_smem, v_smem, ks_smem, vs_smem, (a_smem, b_smem, c_smem), e_smem,
        )  # fmt: skip
        newest = _start_first_pages(
            pages, page_0, page_1, first, last, length, count, G, BLOCK_N, SCALED, SEVERAL
        )

        # Load queries while the pages are in flight, and start from the empty state.
        q = load_queries(q_ptr, row, used, group, G, GROUP, D, COLUMNS, SEVERAL, SCALED, mma)
        m = gl.full([COLUMNS], float("-inf"), gl.float32, column_layout)
        total = gl.zeros([COLUMNS], gl.float32, column_layout)
        acc = gl.zeros([D, COLUMNS], gl.float32, mma)
        # Load each page number one step before its page is copied, clamped to the last page.
        end = gl.maximum(all_blocks - 1, 0)
        ahead = gl.load(table + gl.minimum(first + 2, end))
        whole = (length - count + 1 + query) // BLOCK_N  # pages that need no mask for any query
        if first >= newest:  # the first page came in group 2
            async_copy.wait_group(0)
        for b in range(first, last):
            stage = (b - first) % 2
            # Wait for page b: first for all but groups 1 and 2, later for all but the latest group,
            # which is page b + 1. The barrier makes the copies visible to all threads.
            if b == first:
                async_copy.wait_group(2)
                gluon_names.barrier()
            else:
                async_copy.wait_group(1)
                gluon_names.barrier()
            # Two bodies, so that only the last page of the context pays for masks.
            if b < whole:
                m, total, acc = attend_page(
                    q, pages, stage, m, total, acc, length - 1, b * BLOCK_N, count, query,
                    False, GROUP, SEVERAL, SCALED, SCORE_SCALE, mma,
                )  # fmt: skip
            else:
                m, total, acc = attend_page(
                    q, pages, stage, m, total, acc, length - 1, b * BLOCK_N, count, query,
                    True, GROUP, SEVERAL, SCALED, SCORE_SCALE, mma,
                )  # fmt: skip
            # All lanes are done with the stage, so page b + 2 can be copied into it.
            gluon_names.barrier()
            page = ahead
            ahead = gl.load(table + gl.minimum(b + 3, end))
            if b + 2 < last:
                load_page(pages, page, stage, length - (b + 2) * BLOCK_N, G, SCALED)
            async_copy.commit_group()
        async_copy.wait_group(0)

        store_split(
            acc, m, total, all_blocks, row, used, split, group, o_ptr, scales_ptr, scale_stride,
            part_ptr, state_ptr, max_splits, SPLIT, G * GROUP, GROUP, D, COLUMNS, SCALED, mma,
            SEVERAL, QUANTIZE, MAXIMUM, FLOOR, POW2,
        )  # fmt: skip


def attend_decode(
    q: Tensor, pages: KeyValueCodes, block_tables: Tensor, lengths: Tensor, max_length: int,
    split_keys: int = SPLIT_KEYS, queries: SequenceQueries | None = None,
) -> Tensor:  # fmt: skip
    """Return attention of one or a few queries per sequence over its pages.

    A query attends to the keys up to its own, and its bits do not depend on other queries. Can be
    captured in a CUDA graph; the previous kernel may then write q and the newest key and value of
    each context, but no other input.

    Args:
        q: bfloat16 [B, H, D], rotated, or [R, H, D] with several queries per sequence.
        pages: keys and values [P, 64, G, D].
        block_tables: int32 [B, at least ceil(max_length / 64)], pages of each context in order.
        lengths: int32 [B], keys per context, including those of its queries; 0 gives zeros.
        max_length: sizes the launch; a context that needs more splits than this length gives NaN.
        split_keys: keys per split, a multiple of 64; the bits depend on it.
        queries: rows of several queries per sequence; the results of padding rows are arbitrary.
    """
    o = torch.empty_like(q)
    _launch(
        q, pages, block_tables, lengths, max_length, o, None, DEFAULT_SCALES, split_keys, queries
    )
    return o


def attend_decode_quantized(
    q: Tensor, pages: KeyValueCodes, block_tables: Tensor, lengths: Tensor, max_length: int,
    scales: str = DEFAULT_SCALES, split_keys: int = SPLIT_KEYS,
    queries: SequenceQueries | None = None,
) -> QTensor:  # fmt: skip
    """Return the same bits as `quantize_rows(attend_decode(...).flatten(1))`.

    Quantization is fused for head_dim 128. For 64 a group spans two heads, which may be in two
    warps, so the quantizer runs separately.

    Args:
        scales: "fp32", or "pow2" for power-of-two scales.
    """
    count, heads, head_dim = q.shape
    if head_dim != FP8_BLOCK:
        o = attend_decode(q, pages, block_tables, lengths, max_length, split_keys, queries)
        return quantize_rows(o.view(count, heads * head_dim), scales=scales)
    rows = empty_row_groups(count, heads * head_dim, FORMATS["e4m3"][0], q.device)
    _launch(
        q, pages, block_tables, lengths, max_length, rows.codes, rows.scales, scales, split_keys,
        queries,
    )  # fmt: skip
    return rows


def _launch(
    q: Tensor, pages: KeyValueCodes, block_tables: Tensor, lengths: Tensor, max_length: int,
    o: Tensor, o_scales: Tensor | None, scales: str, split_keys: int,
    queries: SequenceQueries | None,
) -> None:  # fmt: skip
    """Check the arguments of `attend_decode`, and launch its kernels to write o."""
    group = check_queries(q, pages)
    rows, heads, head_dim = q.shape
    batch, width = len(block_tables), 1 if queries is None else queries.most
    assert pages.k.ndim == 4, "keys are packed, not paged"
    assert pages.k.shape[1] == BLOCK_KEYS, f"pages of {pages.k.shape[1]} tokens"
    assert (block_tables.dtype, block_tables.stride(1)) == (torch.int32, 1)
    assert (lengths.dtype, lengths.shape) == (torch.int32, (batch,))
    assert queries is not None or rows == batch, "several queries per sequence need `queries`"
    assert 1 <= max_length <= block_tables.shape[1] * BLOCK_KEYS, f"{max_length} tokens"
    splits = -(-max_length // split_keys)
    # One split stores no state, but uses the same compiled kernel.
    states = splits if splits > 1 else 0
    part = q.new_empty(rows, states, heads, head_dim, dtype=torch.float32)
    state = q.new_empty(rows, states, heads, 2, dtype=torch.float32)
    # Queries per warp, so that queries * heads per group fit in 16 MMA columns.
    in_tile = min(width, max(1, 16 // group))
    tiles = -(-width // in_tile)
    counts, first, keys = lengths, lengths, lengths
    if queries is not None:
        counts, first, keys = queries.counts, queries.first, queries.keys
    k_scales, v_scales = (o if s is None else s for s in (pages.k_scales, pages.v_scales))
    out_scales, scale_stride = (o, 0) if o_scales is None else (o_scales, o_scales.stride(1))
    quantize, maximum, pow2 = o_scales is not None, FORMATS["e4m3"][1], scales == "pow2"
    decode_kernel[(pages.num_heads * tiles, batch, splits)](
        q, pages.k, pages.v, k_scales, v_scales, block_tables, lengths, counts, first,
        o, out_scales, part, state,
        block_tables.stride(0), block_tables.shape[1], scale_stride, splits,
        int(torch.cuda.is_current_stream_capturing()),
        pages.num_heads, group, head_dim, BLOCK_KEYS, split_keys // BLOCK_KEYS, width > 1, in_tile,
        pages.scaled, score_scale(head_dim, pages.scaled), quantize, maximum, AMAX_FLOOR, pow2,
        num_warps=1, enable_fp_fusion=False, **overlapped(),
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(heads, rows)](
            part, state, keys, o, out_scales, scale_stride, splits,
            heads, head_dim, split_keys, pages.scaled, 8, quantize, maximum, AMAX_FLOOR, pow2,
            num_warps=1, enable_fp_fusion=False, **overlapped(),
        )  # fmt: skip
