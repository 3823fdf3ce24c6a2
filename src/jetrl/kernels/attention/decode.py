"""Attention of one new token per sequence over pages of keys and values (decode).

Memory-bound: a token's key and value, FP8 or INT8 codes, are read once, 2 * (D + 4) bytes for each
key-value head. One warp owns (sequence, key-value head, split): the pages of the split stream
through shared memory, and each page is one block of `attention.core`. Several such warps share a
multiprocessor, so that there are always loads in flight: two pages of each, one of them multiplied.
In a captured graph the first pages are asked for while the kernel in front, which writes the newest
key and value, still runs (`launch_hopper`). A second kernel folds the splits of long contexts in
order (`attention.combine`).

Everything is turned: scores are [keys, queries] = K Q^T and outputs [channels, queries] = V^T E, so
the query heads of a group are the 8 columns of a tensor-core instruction (16 for larger groups) and
not its 16 rows, most of which would be padding. A product does not know which operand is left.

Codes are widened in registers. Keys are read as the words the tensor core's operand layout
asks for, which permutes head_dim (`channel_of_slot`). Values are read 16 bytes at a time, so that a
thread holds neighbouring channels of a key; which channels share a tensor-core tile does not matter
to a sum over keys, so the accumulator's rows are simply named differently when they are stored.

With head_dim 128 a head's output is one 1 x 128 group of the output projection's input:
`attend_decode_quantized` writes the codes and scales that `quantize_rows` would make of the rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from jetrl.kernels.attention.combine import combine_kernel
from jetrl.kernels.attention.core import (
    SPLIT_KEYS,
    inverse,
    normalize,
    score_scale,
)
from jetrl.kernels.attention.layout import BLOCK_KEYS, KeyValueCodes, check_queries
from jetrl.kernels.attention.pages import Pages, attend_page, load_page, load_queries
from jetrl.precision.hopper import gluon_names, tile
from jetrl.precision.hopper.launch import (
    OVERLAPPED,
    gluon_let_next_start,
    gluon_wait_for_previous,
)
from jetrl.precision.hopper.quantize import quantize_rows
from jetrl.precision.layout import empty_row_groups
from jetrl.precision.plan import FP8_BLOCK
from jetrl.precision.quantize import AMAX_FLOOR, FORMATS, QTensor


@gluon.jit
def _by_channels(
    o, D: gl.constexpr, COLUMNS: gl.constexpr, SCALED: gl.constexpr, mma: gl.constexpr
):
    """Return o [D, COLUMNS] with D / 8 neighbouring channels of a column in each thread.

    A thread then makes codes in pairs and stores 8 or 16 at a time. With coded values, whose
    channels come in the order of `pages._coded_values`, this only renames registers.

    Args:
        o: float32 [D, COLUMNS], in the layout mma.
        mma: the layout of the products.
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
    o, seq, group, o_ptr, scales_ptr, scale_stride,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, COLUMNS: gl.constexpr,
    QUANTIZE: gl.constexpr, MAXIMUM: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    """Store finished outputs, as BF16 rows or as codes with a scale for each head.

    Args:
        o: float32 [D, COLUMNS], the heads of key-value head `group` in the first GROUP columns.
        seq: the sequence.
        group: the key-value head.
        o_ptr: bfloat16 or, with QUANTIZE, FP8 [B, H, D].
        scales_ptr: float32 [H, scale_stride].
        scale_stride: from one head's line of scales to the next.
    """
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, o.type.layout))
    channel = gl.arange(0, D, gl.SliceLayout(1, o.type.layout))
    ok = column < GROUP
    head = group * GROUP + column
    places = o_ptr + seq.to(gl.int64) * (H * D) + head[None, :] * D + channel[:, None]
    o = tile.to_bfloat16(o)
    # A head of 128 channels is one 1 x 128 group. Codes are made of the rounded row, as the
    # quantizer would make them of the one in memory.
    if QUANTIZE:
        wide = tile.widen(o)
        scale, multiplier = tile.scale_and_multiplier(tile.largest(wide, 0), MAXIMUM, FLOOR, POW2)
        o = wide * multiplier[None, :]
        gl.store(scales_ptr + head.to(gl.int64) * scale_stride + seq, scale, mask=ok)
    gl.store(places, o.to(o_ptr.dtype.element_ty), mask=ok[None, :])


@gluon.jit
def _store_state(
    o, m, total, seq, split, group, part_ptr, state_ptr, max_splits,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Store the state of one of several splits, for `combine_kernel`.

    Args:
        o: float32 [D, COLUMNS], the accumulator, heads in the first GROUP columns.
        m, total: float32 [COLUMNS], the maxima and sums.
        seq, split, group: whose state.
        part_ptr: float32 [B, max_splits, H, D].
        state_ptr: float32 [B, max_splits, H, 2].
        max_splits: splits of the launch.
    """
    base = (seq.to(gl.int64) * max_splits + split) * H + group * GROUP
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, o.type.layout))
    channel = gl.arange(0, D, gl.SliceLayout(1, o.type.layout))
    places = part_ptr + (base + column)[None, :] * D + channel[:, None]
    gl.store(places, o, mask=(column < GROUP)[None, :])
    column = gl.arange(0, COLUMNS, m.type.layout)
    gl.store(state_ptr + (base + column) * 2, m, mask=column < GROUP)
    gl.store(state_ptr + (base + column) * 2 + 1, total, mask=column < GROUP)


@gluon.jit
def _store_split(
    acc, m, total, all_blocks, seq, split, group, o_ptr, scales_ptr, scale_stride, part_ptr,
    state_ptr, max_splits, SPLIT: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr,
    D: gl.constexpr, COLUMNS: gl.constexpr, SCALED: gl.constexpr, mma: gl.constexpr,
    QUANTIZE: gl.constexpr, MAXIMUM: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    """Store what a split gave: finished outputs if it is the whole context, else its state."""
    # Folding the only split into the empty state would change no bit, so it is finished here.
    if (all_blocks <= SPLIT) | (all_blocks > max_splits * SPLIT):
        # A context of more splits than the launch has is NaN, not a truncated answer.
        total = gl.where(all_blocks > max_splits * SPLIT, float("nan"), total)
        o = _by_channels(normalize(acc, inverse(total)[None, :], SCALED), D, COLUMNS, SCALED, mma)
        _store_heads(
            o, seq, group, o_ptr, scales_ptr, scale_stride, H, GROUP, D, COLUMNS,
            QUANTIZE, MAXIMUM, FLOOR, POW2,
        )  # fmt: skip
    else:
        _store_state(
            _by_channels(acc, D, COLUMNS, SCALED, mma), m, total, seq, split, group,
            part_ptr, state_ptr, max_splits, H, GROUP, D, COLUMNS,
        )  # fmt: skip


@gluon.jit
def _start_first_pages(
    pages, page_0, page_1, first, last, length,
    G: gl.constexpr, BLOCK_N: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Start copying a split's first two pages; return the block of the context's newest key.

    Waits for the kernel in front between those that it does not write and the one that it does.
    """
    # Copies are counted in groups, and waits name how many of the latest groups may still be under
    # way; so a group is committed at each step, also where it is empty. Groups 0 and 1 are the
    # first two pages, as far as they are older than the newest key's: the kernel in front writes
    # the newest key and value, and nothing of the pages before.
    newest = (length - 1) // BLOCK_N
    for i in range(2):
        if (first + i < last) & (first + i < newest):
            page = gl.where(i == 0, page_0, page_1)
            load_page(pages, page, i, length - (first + i) * BLOCK_N, G, SCALED)
        async_copy.commit_group()
    # Group 2, after the kernel in front has ended: the newest key's page, if it is one of the two.
    gluon_wait_for_previous()
    gluon_let_next_start()
    late = newest - first
    if (newest < last) & (late >= 0) & (late < 2):
        page = gl.where(late == 0, page_0, page_1)
        load_page(pages, page, late, length - newest * BLOCK_N, G, SCALED)
    async_copy.commit_group()
    return newest


@gluon.jit(do_not_specialize=["table_stride", "table_width", "scale_stride", "max_splits", "early"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, pages_ptr, lengths_ptr,
    o_ptr, scales_ptr, part_ptr, state_ptr,
    table_stride, table_width, scale_stride, max_splits, early,
    G: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr,
    SPLIT: gl.constexpr, SCALED: gl.constexpr, SCORE_SCALE: gl.constexpr,
    QUANTIZE: gl.constexpr, MAXIMUM: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    """Attend with the query heads of one key-value head over one split of one sequence's keys.

    The grid is (G, B, max_splits), a warp each. A context of one split gives finished outputs, a
    longer one the split's state.

    Args:
        q_ptr: bfloat16 [B, H, D].
        k_ptr: FP8, int8 or bfloat16 [P, BLOCK_N, G, D].
        v_ptr: like k_ptr; FP8 beside int8 is fine.
        ks_ptr: float32 [P, BLOCK_N, G], read with SCALED.
        vs_ptr: like ks_ptr.
        pages_ptr: int32 [B, table_width], the pages of each sequence.
        lengths_ptr: int32 [B], keys of each context.
        o_ptr: bfloat16 or, with QUANTIZE, FP8 [B, H, D], written for contexts of one split.
        scales_ptr: float32 [H, scale_stride], written like o_ptr with QUANTIZE.
        part_ptr: float32 [B, max_splits, H, D], the accumulators, written for longer contexts.
        state_ptr: float32 [B, max_splits, H, 2], the maxima and sums, written like part_ptr.
        table_stride: from one sequence's row of pages to the next.
        table_width: pages in a row of the table.
        scale_stride: from one head's line of scales to the next.
        max_splits: splits of the launch.
        early: 1 to start copying pages while the kernel in front still runs; that kernel may then
            write nothing that is read here but q and the newest key and value of each context.
        G: key-value heads.
        GROUP: query heads of a key-value head, at most 16.
        D: channels of a head, 64 or 128.
        BLOCK_N: tokens of a page.
        SPLIT: pages of a split.
        SCALED: whether keys and values are codes with scales.
        SCORE_SCALE: `attention.core.score_scale`.
        QUANTIZE: whether outputs are 1 x 128 groups (D is 128).
        MAXIMUM: largest value of the codes' format.
        FLOOR: smallest maximum that a group counts with.
        POW2: whether scales are rounded up to a power of two.
    """
    # Products are m16n8k16 of one warp: keys or channels down, queries across, 8 or twice 8.
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]
    )
    VEC: gl.constexpr = 16 if SCALED else 8  # elements in 16 bytes, the widest copy
    CHUNKS: gl.constexpr = D // VEC  # copies of one key
    PHASES: gl.constexpr = 8 if CHUNKS >= 8 else CHUNKS
    COLUMNS: gl.constexpr = 8 if GROUP <= 8 else 16
    # Pages in shared memory: the 16-byte chunks of a key are exchanged by the key's number, so that
    # the same chunk of neighbouring keys, which a product reads at once, lies in other banks.
    tile_layout: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // CHUNKS, CHUNKS], [1, 1], [1, 0])
    key_layout: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0]))
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(VEC, 8 // PHASES, PHASES, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lines: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    column_layout: gl.constexpr = gl.SliceLayout(0, mma)

    # Length and first two page numbers are read at once, since each takes a trip to memory; a page
    # number past the context is never used. Outside a graph nothing says what the kernel in front
    # writes, so all reads wait for its end.
    group = gl.program_id(0)
    seq = gl.program_id(1)
    split = gl.program_id(2)
    if early == 0:
        gluon_wait_for_previous()
    first = split * SPLIT
    table = pages_ptr + seq.to(gl.int64) * table_stride
    length = gl.load(lengths_ptr + seq)
    page_0 = gl.load(table + first)
    page_1 = gl.load(table + gl.minimum(first + 1, table_width - 1))
    all_blocks = (length + BLOCK_N - 1) // BLOCK_N
    last = gl.minimum(first + SPLIT, all_blocks)
    # Warps past the context's end have no work; the first one stays to write zeros if it is empty.
    if (first < last) | (split == 0):
        # Two stages of pages and the scratch of `attend_page`: 35 KB with codes and head_dim 128,
        # so that six warps share a multiprocessor. Three or four stages were not faster.
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
        newest = _start_first_pages(pages, page_0, page_1, first, last, length, G, BLOCK_N, SCALED)

        # Queries while the pages are on their way, and the empty state.
        q_base = q_ptr + (seq.to(gl.int64) * G + group) * (GROUP * D)
        q = load_queries(q_base, GROUP, D, COLUMNS, SCALED, mma)
        m = gl.full([COLUMNS], float("-inf"), gl.float32, column_layout)
        total = gl.zeros([COLUMNS], gl.float32, column_layout)
        acc = gl.zeros([D, COLUMNS], gl.float32, mma)
        # A page number is read one step before its page is copied. (Past the last page the last
        # number is read again.)
        end = gl.maximum(all_blocks - 1, 0)
        ahead = gl.load(table + gl.minimum(first + 2, end))
        whole = length // BLOCK_N
        if first >= newest:  # the first page came in group 2
            async_copy.wait_group(0)
        for b in range(first, last):
            stage = (b - first) % 2
            # Page b has arrived: at first all but the groups 1 and 2, later all but the latest
            # group, which is page b + 1. The barrier makes each thread's copies seen by all.
            if b == first:
                async_copy.wait_group(2)
                gluon_names.barrier()
            else:
                async_copy.wait_group(1)
                gluon_names.barrier()
            # Two bodies, so that only the context's last page pays for the masks.
            if b < whole:
                m, total, acc = attend_page(
                    q, pages, stage, m, total, acc, length - 1, b * BLOCK_N,
                    False, SCALED, SCORE_SCALE, mma,
                )  # fmt: skip
            else:
                m, total, acc = attend_page(
                    q, pages, stage, m, total, acc, length - 1, b * BLOCK_N,
                    True, SCALED, SCORE_SCALE, mma,
                )  # fmt: skip
            # Every lane is done with the stage, so page b + 2 may be copied into it.
            gluon_names.barrier()
            page = ahead
            ahead = gl.load(table + gl.minimum(b + 3, end))
            if b + 2 < last:
                load_page(pages, page, stage, length - (b + 2) * BLOCK_N, G, SCALED)
            async_copy.commit_group()
        async_copy.wait_group(0)

        _store_split(
            acc, m, total, all_blocks, seq, split, group, o_ptr, scales_ptr, scale_stride,
            part_ptr, state_ptr, max_splits, SPLIT, G * GROUP, GROUP, D, COLUMNS, SCALED, mma,
            QUANTIZE, MAXIMUM, FLOOR, POW2,
        )  # fmt: skip


def attend_decode(
    q: Tensor,
    pages: KeyValueCodes,
    block_tables: Tensor,
    lengths: Tensor,
    max_length: int,
    split_keys: int = SPLIT_KEYS,
) -> Tensor:
    """Return the attention of one query per sequence over its pages.

    May be captured in a CUDA graph. There, the kernel in front may write q and the newest key and
    value of each context, but nothing else that is read here.

    Args:
        q: bfloat16 [B, H, D], rotated.
        pages: keys and values [P, 64, G, D].
        block_tables: int32 [B, at least ceil(max_length / 64)], the pages of each context in order;
            entries past a context are not used.
        lengths: int32 [B], keys of each context, the query's own included; 0 gives a row of zeros.
        max_length: at least the longest length; it sizes the launch and never the arithmetic. A
            context with more splits than max_length has comes out as NaN.
        split_keys: keys of a split, a multiple of 64. Others than the default give other bits.

    Returns:
        The output, like q.

    Raises:
        ValueError: a tensor of another dtype or shape, or tables that cannot hold max_length.
    """
    o = torch.empty_like(q)
    _launch(q, pages, block_tables, lengths, max_length, o, None, "fp32", split_keys)
    return o


def attend_decode_quantized(
    q: Tensor,
    pages: KeyValueCodes,
    block_tables: Tensor,
    lengths: Tensor,
    max_length: int,
    scales: str = "fp32",
    split_keys: int = SPLIT_KEYS,
) -> QTensor:
    """Return `quantize_rows(attend_decode(...).flatten(1))`, with the same bits.

    With head_dim 128 the BF16 rows are never written; with 64 a group is two heads, which may
    belong to two warps, and the quantizer runs after.

    Args:
        q: bfloat16 [B, H, D], rotated.
        pages: keys and values [P, 64, G, D].
        block_tables: int32 [B, .], as of `attend_decode`.
        lengths: int32 [B], as of `attend_decode`.
        max_length: at least the longest length.
        scales: "fp32", or "pow2" for scales that are powers of two.
        split_keys: keys of a split, a multiple of 64. Others than the default give other bits.

    Returns:
        Rows of 1 x 128 groups [B, H * D].
    """
    batch, heads, head_dim = q.shape
    if head_dim != FP8_BLOCK:
        o = attend_decode(q, pages, block_tables, lengths, max_length, split_keys)
        return quantize_rows(o.view(batch, heads * head_dim), scales=scales)
    rows = empty_row_groups(batch, heads * head_dim, FORMATS["e4m3"][0], q.device)
    batch_pages = (block_tables, lengths, max_length)
    _launch(q, pages, *batch_pages, rows.codes, rows.scales, scales, split_keys)
    return rows


def _launch(
    q: Tensor,
    pages: KeyValueCodes,
    block_tables: Tensor,
    lengths: Tensor,
    max_length: int,
    o: Tensor,
    o_scales: Tensor | None,
    scales: str,
    split_keys: int,
) -> None:
    """Check the arguments of `attend_decode` and launch its kernels, which write o.

    Args:
        o: bfloat16 [B, H, D], or with o_scales FP8 [B, H * D].
        o_scales: float32 [B, H] with any stride between columns, or None.
    """
    group = check_queries(q, pages)
    batch, heads, head_dim = q.shape
    if pages.k.ndim != 4 or pages.k.shape[1] != BLOCK_KEYS:
        raise ValueError(f"pages of {BLOCK_KEYS} tokens expected, got k {list(pages.k.shape)}")
    if block_tables.dtype != torch.int32 or block_tables.ndim != 2 or block_tables.stride(1) != 1:
        raise ValueError(
            f"block tables: int32 [B, N] with contiguous rows expected, got {block_tables.dtype} "
            f"{list(block_tables.shape)}"
        )
    if lengths.dtype != torch.int32 or lengths.shape != (batch,) or len(block_tables) != batch:
        raise ValueError(
            f"lengths: int32 [{batch}] expected, got {lengths.dtype} {list(lengths.shape)}, "
            f"with {len(block_tables)} block tables"
        )
    if block_tables.shape[1] * BLOCK_KEYS < max_length or max_length < 1:
        raise ValueError(f"{block_tables.shape[1]} pages a row cannot hold {max_length} tokens")
    splits = -(-max_length // split_keys)
    # One split leaves no state; the kernel is the same, so that it is not compiled again for more.
    states = splits if splits > 1 else 0
    part = q.new_empty(batch, states, heads, head_dim, dtype=torch.float32)
    state = q.new_empty(batch, states, heads, 2, dtype=torch.float32)
    k_scales, v_scales = (o if s is None else s for s in (pages.k_scales, pages.v_scales))
    out = (o, o, 0) if o_scales is None else (o, o_scales, o_scales.stride(1))
    rule = (o_scales is not None, FORMATS["e4m3"][1], AMAX_FLOOR, scales == "pow2")
    decode_kernel[(pages.num_heads, batch, splits)](
        q, pages.k, pages.v, k_scales, v_scales, block_tables, lengths, *out[:2], part, state,
        block_tables.stride(0), block_tables.shape[1], out[2], splits,
        int(torch.cuda.is_current_stream_capturing()),
        pages.num_heads, group, head_dim, BLOCK_KEYS, split_keys // BLOCK_KEYS, pages.scaled,
        score_scale(head_dim, pages.scaled), *rule,
        num_warps=1, enable_fp_fusion=False, **OVERLAPPED,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(heads, batch)](
            part, state, lengths, *out, splits, heads, head_dim, split_keys, pages.scaled, 8, *rule,
            num_warps=1, enable_fp_fusion=False, **OVERLAPPED,
        )  # fmt: skip
