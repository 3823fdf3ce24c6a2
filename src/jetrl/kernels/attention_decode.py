"""Attention of one new token per sequence over pages of keys and values (decode).

Memory-bound: a token's FP8 key and value are read once, 2 * (D + 4) bytes for each key-value head.
One warp owns (sequence, key-value head, split): the query heads of the group are its 16 rows, the
pages of the split stream through shared memory, and each page is one block of `attention_core`.
Several such warps share a multiprocessor, so that there are always loads in flight. A second kernel
folds the splits of long contexts in order.

FP8 codes are widened in registers. Keys are read as the words the tensor core's operand layout
asks for, which permutes head_dim (`channel_of_slot`). Values are read 16 bytes at a time, so that a
thread holds neighbouring channels of a key; which channels share a tensor-core tile does not matter
to a sum over keys, so the accumulator's columns are simply named differently when they are stored.

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
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from jetrl.kernels.attention_core import (
    SPLIT_BLOCKS,
    SPLIT_KEYS,
    fold_weights,
    inverse,
    key_factors,
    normalize,
    query_codes,
    score_scale,
    softmax_block,
    value_weights,
)
from jetrl.kernels.attention_layout import BLOCK_KEYS, KeyValueCodes, check_queries
from jetrl.precision import tile_hopper as tile
from jetrl.precision.launch_hopper import (
    OVERLAPPED,
    gluon_let_next_start,
    gluon_wait_for_previous,
)
from jetrl.precision.layout import empty_row_groups
from jetrl.precision.plan import FP8_BLOCK
from jetrl.precision.quantize import AMAX_FLOOR, FORMATS, QTensor
from jetrl.precision.quantize_hopper import quantize_rows

_STAGES = 2  # pages in shared memory: 2 beat 3 and 4 on an H200, by letting in more warps


@gluon.jit
def _load_page(
    k_smem,
    v_smem,
    s_smem,
    k_ptr,
    v_ptr,
    ks_ptr,
    vs_ptr,
    page,
    stage,
    tile_offsets,
    key_offsets,
    keys_left,
    G: gl.constexpr,
    D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SCALED: gl.constexpr,
    tile_layout: gl.constexpr,
    key_layout: gl.constexpr,
):
    """Start copying a page; keys past the context arrive as zeros, whatever the page holds."""
    base = page.to(gl.int64) * (BLOCK_N * G * D)
    ok = (gl.arange(0, BLOCK_N, gl.SliceLayout(1, tile_layout)) < keys_left)[:, None]
    async_copy.async_copy_global_to_shared(
        k_smem.index(stage), k_ptr + base + tile_offsets, mask=ok
    )
    async_copy.async_copy_global_to_shared(
        v_smem.index(stage), v_ptr + base + tile_offsets, mask=ok
    )
    if SCALED:
        line = page.to(gl.int64) * (BLOCK_N * G) + key_offsets
        line_ok = gl.arange(0, BLOCK_N, key_layout) < keys_left
        async_copy.async_copy_global_to_shared(s_smem.index(stage * 2), ks_ptr + line, mask=line_ok)
        async_copy.async_copy_global_to_shared(
            s_smem.index(stage * 2 + 1), vs_ptr + line, mask=line_ok
        )


@gluon.jit
def _fp8_values(v_smem, BLOCK_N: gl.constexpr, D: gl.constexpr, mma: gl.constexpr):
    """FP16 values as a tensor-core operand; column 8 j + g is channel (D / 8) g + j."""
    if D == 128:
        wide: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [8, 0], [16, 0], [32, 0]],
            lane_bases=[[2, 0], [4, 0], [0, 16], [0, 32], [0, 64]],
            warp_bases=[],
            block_bases=[],
            shape=[BLOCK_N, D],
        )
        v = v_smem.load(wide).to(gl.float16)
    else:
        narrow: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [8, 0], [16, 0], [32, 0]],
            lane_bases=[[2, 0], [4, 0], [0, 8], [0, 16], [0, 32]],
            warp_bases=[],
            block_bases=[],
            shape=[BLOCK_N, D],
        )
        v = v_smem.load(narrow).to(gl.float16)
    v = v.reshape([BLOCK_N, 8, D // 8]).permute((0, 2, 1)).reshape([BLOCK_N, D])
    return gl.convert_layout(v, gl.DotOperandLayout(1, mma, 2))


@gluon.jit
def _attend_page(
    q,
    k_smem,
    v_smem,
    s_smem,
    f_smem,
    stage,
    m,
    total,
    acc,
    position,
    first_key,
    MASKED: gl.constexpr,
    SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    mma: gl.constexpr,
    key_layout: gl.constexpr,
):
    """One page against the 16 rows; `position` is the context's last key, in every row."""
    if SCALED:
        ks = s_smem.index(stage * 2).load(key_layout)
        vs = s_smem.index(stage * 2 + 1).load(key_layout)
        if MASKED:
            # Scales past the context arrived as zeros, whose factors are not finite.
            ok = first_key + gl.arange(0, BLOCK_N, key_layout) <= gl.max(position, axis=0)
            ks = gl.where(ok, ks, 1.0)
            vs = gl.where(ok, vs, 1.0)
        a, b, c = key_factors(ks, vs, SCORE_SCALE)
        f_smem.slice(0, 1, 0).store(a[None, :])
        f_smem.slice(1, 1, 0).store(b[None, :])
        f_smem.slice(2, 1, 0).store(c[None, :])
        k8 = k_smem.index(stage).permute((1, 0)).load(gl.DotOperandLayout(1, mma, 4))
        k = k8.to(gl.float16)
    else:
        k = k_smem.index(stage).permute((1, 0)).load(gl.DotOperandLayout(1, mma, 2))
    s = mma_v2(q, k, gl.zeros([16, BLOCK_N], gl.float32, mma))
    e, m, total, decay = softmax_block(
        s, f_smem, m, total, position, first_key, MASKED, SCALED, SCORE_SCALE, BLOCK_N, mma
    )
    if SCALED:
        v = _fp8_values(v_smem.index(stage), BLOCK_N, D, mma)
    else:
        v = v_smem.index(stage).load(gl.DotOperandLayout(1, mma, 2))
    return m, total, mma_v2(value_weights(e, v.dtype, mma), v, acc * decay[:, None])


@gluon.jit
def _store_heads(
    o, seq, group, o_ptr, scales_ptr, scale_stride,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SCALED: gl.constexpr,
    QUANTIZE: gl.constexpr, MAXIMUM: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    """Rows [16, D] of finished outputs, the first GROUP of them heads of `group`."""
    if SCALED:  # the values' order of channels back to head_dim's: renames registers
        o = o.reshape([16, D // 8, 8]).permute((0, 2, 1)).reshape([16, D])
    heads = group * GROUP + gl.arange(0, 16, gl.SliceLayout(1, o.type.layout))
    ok = gl.arange(0, 16, gl.SliceLayout(1, o.type.layout)) < GROUP
    cols = gl.arange(0, D, gl.SliceLayout(0, o.type.layout))
    places = o_ptr + seq.to(gl.int64) * (H * D) + heads[:, None] * D + cols[None, :]
    if QUANTIZE:
        wide = o.to(gl.float32)
        scale, multiplier = tile.scale_and_multiplier(tile.largest(wide, 1), MAXIMUM, FLOOR, POW2)
        o = wide * multiplier[:, None]
        gl.store(scales_ptr + heads.to(gl.int64) * scale_stride + seq, scale, mask=ok)
    gl.store(places, o.to(o_ptr.dtype.element_ty), mask=ok[:, None])


@gluon.jit
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    ks_ptr,
    vs_ptr,
    pages_ptr,
    lengths_ptr,
    o_ptr,
    scales_ptr,
    part_ptr,
    state_ptr,
    table_stride,
    scale_stride,
    max_splits,
    G: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr,
    QUANTIZE: gl.constexpr,
    MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
    POW2: gl.constexpr,
):
    """One warp for (group, sequence, split): a finished row, or the split's state."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]
    )
    VEC: gl.constexpr = 16 if SCALED else 8  # 16 bytes
    CHUNKS: gl.constexpr = D // VEC
    PHASES: gl.constexpr = 8 if CHUNKS >= 8 else CHUNKS
    H: gl.constexpr = G * GROUP
    tile_layout: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // CHUNKS, CHUNKS], [1, 1], [1, 0])
    key_layout: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0]))
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(VEC, 8 // PHASES, PHASES, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lines: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 4 if SCALED else 2)
    row: gl.constexpr = gl.SliceLayout(1, mma)

    group = gl.program_id(0)
    seq = gl.program_id(1)
    split = gl.program_id(2)
    gluon_wait_for_previous()
    gluon_let_next_start()
    length = gl.load(lengths_ptr + seq)
    all_blocks = (length + BLOCK_N - 1) // BLOCK_N
    first = split * SPLIT
    last = gl.minimum(first + SPLIT, all_blocks)
    if (first < last) | (split == 0):
        k_smem = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [STAGES, BLOCK_N, D], swizzled)
        v_smem = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [STAGES, BLOCK_N, D], swizzled)
        s_smem = gl.allocate_shared_memory(gl.float32, [STAGES * 2, BLOCK_N], line)
        f_smem = gl.allocate_shared_memory(gl.float32, [4, BLOCK_N], lines)
        n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, tile_layout))
        d = gl.arange(0, D, gl.SliceLayout(0, tile_layout))
        tile_offsets = (n * (G * D) + group * D)[:, None] + d[None, :]
        key_offsets = gl.arange(0, BLOCK_N, key_layout) * G + group
        table = pages_ptr + seq.to(gl.int64) * table_stride
        for i in gl.static_range(STAGES - 1):
            if first + i < last:
                _load_page(
                    k_smem, v_smem, s_smem, k_ptr, v_ptr, ks_ptr, vs_ptr,
                    gl.load(table + first + i), i, tile_offsets, key_offsets,
                    length - (first + i) * BLOCK_N, G, D, BLOCK_N, SCALED, tile_layout, key_layout,
                )  # fmt: skip
            async_copy.commit_group()

        head = gl.arange(0, 16, gl.SliceLayout(1, q_layout))
        channel = gl.arange(0, D, gl.SliceLayout(0, q_layout))
        q_base = q_ptr + seq.to(gl.int64) * (H * D) + group * (GROUP * D)
        q = gl.load(
            q_base + head[:, None] * D + channel[None, :],
            mask=(head < GROUP)[:, None],
            other=0.0,
        )
        q = query_codes(q, SCALED)

        m = gl.full([16], float("-inf"), gl.float32, row)
        total = gl.zeros([16], gl.float32, row)
        acc = gl.zeros([16, D], gl.float32, mma)
        position = gl.full([16], 0, gl.int32, row) + (length - 1)
        # A page number is read one step before its page is copied.
        end = gl.maximum(all_blocks - 1, 0)
        ahead = gl.load(table + gl.minimum(first + STAGES - 1, end))
        whole = length // BLOCK_N
        for b in range(first, last):
            stage = (b - first) % STAGES
            async_copy.wait_group(STAGES - 2)
            gl.thread_barrier()
            coming = b + STAGES - 1
            page = ahead
            ahead = gl.load(table + gl.minimum(coming + 1, end))
            if coming < last:
                _load_page(
                    k_smem, v_smem, s_smem, k_ptr, v_ptr, ks_ptr, vs_ptr,
                    page, (coming - first) % STAGES, tile_offsets, key_offsets,
                    length - coming * BLOCK_N, G, D, BLOCK_N, SCALED, tile_layout, key_layout,
                )  # fmt: skip
            async_copy.commit_group()
            if b < whole:
                m, total, acc = _attend_page(
                    q, k_smem, v_smem, s_smem, f_smem, stage, m, total, acc, position, b * BLOCK_N,
                    False, SCALED, SCORE_SCALE, BLOCK_N, D, mma, key_layout,
                )  # fmt: skip
            else:
                m, total, acc = _attend_page(
                    q, k_smem, v_smem, s_smem, f_smem, stage, m, total, acc, position, b * BLOCK_N,
                    True, SCALED, SCORE_SCALE, BLOCK_N, D, mma, key_layout,
                )  # fmt: skip
        async_copy.wait_group(0)

        rows = gl.arange(0, 16, row)
        cols = gl.arange(0, D, gl.SliceLayout(0, mma))
        if SCALED:
            cols = (cols % 8) * (D // 8) + cols // 8
        heads = group * GROUP + rows
        ok = rows < GROUP
        if (all_blocks <= SPLIT) | (all_blocks > max_splits * SPLIT):
            # A context longer than the launch was told of is NaN, not a truncated answer.
            total = gl.where(all_blocks > max_splits * SPLIT, float("nan"), total)
            o = normalize(acc, inverse(total)[:, None], SCALED).to(gl.bfloat16)
            _store_heads(
                o, seq, group, o_ptr, scales_ptr, scale_stride, H, GROUP, D, SCALED, QUANTIZE,
                MAXIMUM, FLOOR, POW2,
            )  # fmt: skip
        else:
            base = (seq.to(gl.int64) * max_splits + split) * H
            gl.store(
                part_ptr + base * D + heads[:, None] * D + cols[None, :], acc, mask=ok[:, None]
            )
            gl.store(state_ptr + (base + heads) * 2, m, mask=ok)
            gl.store(state_ptr + (base + heads) * 2 + 1, total, mask=ok)


@gluon.jit
def combine_kernel(
    part_ptr,
    state_ptr,
    lengths_ptr,
    o_ptr,
    scales_ptr,
    scale_stride,
    max_splits,
    H: gl.constexpr,
    D: gl.constexpr,
    SPLIT_LENGTH: gl.constexpr,
    SCALED: gl.constexpr,
    CHUNK: gl.constexpr,
    QUANTIZE: gl.constexpr,
    MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr,
    POW2: gl.constexpr,
):
    """Fold the splits of one (head, sequence) in order, CHUNK of them loaded at a time."""
    layout: gl.constexpr = gl.BlockedLayout([D // 32], [32], [1], [0])
    head = gl.program_id(0)
    seq = gl.program_id(1)
    gluon_wait_for_previous()
    gluon_let_next_start()
    num_splits = (gl.load(lengths_ptr + seq) + SPLIT_LENGTH - 1) // SPLIT_LENGTH
    if (num_splits > 1) & (num_splits <= max_splits):
        d = gl.arange(0, D, layout)
        zero = gl.zeros([D], gl.int32, layout)
        big_m = gl.full([D], float("-inf"), gl.float32, layout)
        big_total = gl.zeros([D], gl.float32, layout)
        out = gl.zeros([D], gl.float32, layout)
        for start in range(0, num_splits, CHUNK):
            accs = ()
            ms = ()
            totals = ()
            for i in gl.static_range(CHUNK):
                line = (seq.to(gl.int64) * max_splits + start + i) * H + head
                ok = (zero + (start + i)) < num_splits
                state = state_ptr + line * 2 + zero
                accs += (gl.load(part_ptr + line * D + d, mask=ok, other=0.0),)  # type: ignore[assignment]
                ms += (gl.load(state, mask=ok, other=float("-inf")),)  # type: ignore[assignment]
                totals += (gl.load(state + 1, mask=ok, other=0.0),)  # type: ignore[assignment]
            for i in gl.static_range(CHUNK):
                # Splits past the last are empty states: folding them changes nothing.
                big_m, big_total, u, w = fold_weights(big_m, big_total, ms[i], totals[i])
                out = gl.fma(accs[i], w, out * u)
        o = normalize(out, inverse(big_total), SCALED).to(gl.bfloat16).to(gl.float32)
        if QUANTIZE:
            amax = gl.zeros([D], gl.float32, layout) + tile.largest(o, 0)
            scale, multiplier = tile.scale_and_multiplier(amax, MAXIMUM, FLOOR, POW2)
            o = o * multiplier
            gl.store(scales_ptr + head.to(gl.int64) * scale_stride + seq + d, scale, mask=d == 0)
        places = o_ptr + (seq.to(gl.int64) * H + head) * D + d
        gl.store(places, o.to(o_ptr.dtype.element_ty))


def attend_decode(
    q: Tensor,
    pages: KeyValueCodes,
    block_tables: Tensor,
    lengths: Tensor,
    max_length: int,
) -> Tensor:
    """Attention of one query per sequence over its pages. Usable in a CUDA graph.

    q: bfloat16 [B, H, D], rotated. pages: k and v [P, 64, G, D], scales [P, 64, G] or None.
    block_tables: int32 [B, at least ceil(max_length / 64)], page numbers in order; entries past a
    context are not used. lengths: int32 [B], keys of each context, the query's own included; 0
    gives a row of zeros. max_length: at least the longest length; it sizes the launch and never the
    arithmetic (a longer context comes out as NaN). Returns o like q.
    """
    o = torch.empty_like(q)
    _launch(q, pages, block_tables, lengths, max_length, o, None, "fp32")
    return o


def attend_decode_quantized(
    q: Tensor,
    pages: KeyValueCodes,
    block_tables: Tensor,
    lengths: Tensor,
    max_length: int,
    scales: str = "fp32",
) -> QTensor:
    """`quantize_rows(attend_decode(...).flatten(1))`, the same bits: 1 x 128 groups of [B, H * D].

    With head_dim 128 the BF16 rows are never written; with 64 a group is two heads, which may
    belong to two warps, and the quantizer runs after.
    """
    batch, heads, head_dim = q.shape
    if head_dim != FP8_BLOCK:
        o = attend_decode(q, pages, block_tables, lengths, max_length)
        return quantize_rows(o.view(batch, heads * head_dim), scales=scales)
    rows = empty_row_groups(batch, heads * head_dim, FORMATS["e4m3"][0], q.device)
    _launch(q, pages, block_tables, lengths, max_length, rows.codes, rows.scales, scales)
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
) -> None:
    """Into o: bfloat16 [B, H, D], or codes with o_scales [B, H] of any column stride."""
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
    splits = -(-max_length // SPLIT_KEYS)
    part = state = o
    if splits > 1:
        part = q.new_empty(batch, splits, heads, head_dim, dtype=torch.float32)
        state = q.new_empty(batch, splits, heads, 2, dtype=torch.float32)
    k_scales, v_scales = (o if s is None else s for s in (pages.k_scales, pages.v_scales))
    out = (o, o, 0) if o_scales is None else (o, o_scales, o_scales.stride(1))
    rule = (o_scales is not None, FORMATS["e4m3"][1], AMAX_FLOOR, scales == "pow2")
    decode_kernel[(pages.num_heads, batch, splits)](
        q, pages.k, pages.v, k_scales, v_scales, block_tables, lengths, *out[:2], part, state,
        block_tables.stride(0), out[2], splits,
        pages.num_heads, group, head_dim, BLOCK_KEYS, SPLIT_BLOCKS, _STAGES, pages.scaled,
        score_scale(head_dim, pages.scaled), *rule,
        num_warps=1, enable_fp_fusion=False, **OVERLAPPED,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(heads, batch)](
            part, state, lengths, *out, splits, heads, head_dim, SPLIT_KEYS, pages.scaled, 8, *rule,
            num_warps=1, enable_fp_fusion=False, **OVERLAPPED,
        )  # fmt: skip
