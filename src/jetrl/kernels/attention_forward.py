"""Attention of many queries a sequence: training forward and chunked prefill.

Bound by the tensor cores, and before them by mma.sync's appetite for shared memory: each warp
takes 32 query rows, so that what it reads of a block of keys serves two instructions. First
`stage_keys` widens keys and values once to the operand the tensor core wants, lines each sequence
up to blocks of 64, padded with zeros, and works out the keys' factors. It costs one pass over keys
and values and makes packed sequences, FP8 pages and BF16 pages the same thing to the main kernel.

A program takes 128 queries of one head, four warps. Blocks arrive by the bulk copy engine, two in
shared memory; a block's keys and values lie together and are one copy. The state of finished splits
(`attention_core`) waits in global memory, one float32 row a query: keeping it in registers would
halve the tile. Longest tiles run first.

What was tried and is slower, or wrong, is in docs/notes-attention.md.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jetrl.kernels.attention_core import (
    SPLIT_BLOCKS,
    SPLIT_KEYS,
    channel_of_slot,
    fold_weights,
    inverse,
    key_factors,
    log_sum_exp,
    normalize,
    query_codes,
    score_scale,
    softmax_block,
    weigh_shared_values,
)
from jetrl.kernels.attention_layout import (
    BLOCK_KEYS,
    TILE_ROWS,
    KeyValueCodes,
    QueryTiles,
    check_queries,
)

_STAGES = 2
_K_STEP = 64  # channels read at a time for the scores
_TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_LINE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.jit
def stage_keys_kernel(
    k_ptr,
    v_ptr,
    ks_ptr,
    vs_ptr,
    blocks_ptr,
    kv_out,
    f_out,
    num_blocks,
    G: gl.constexpr,
    D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr,
):
    """One block of one key-value head: 16-bit keys (channels permuted) and values, and factors."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    group = gl.program_id(0)
    block = gl.program_id(1)
    row0 = gl.load(blocks_ptr + block * 2).to(gl.int64)
    valid = gl.load(blocks_ptr + block * 2 + 1)
    out_block = group.to(gl.int64) * num_blocks + block
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    ok = (n < valid)[:, None]
    source = row0 * (G * D) + group * D + (n * (G * D))[:, None]
    k_out = kv_out + out_block * (2 * BLOCK_N * D) + n[:, None] * D + d[None, :]
    v_out = k_out + BLOCK_N * D
    v = gl.load(v_ptr + source + d[None, :], mask=ok, other=0.0)
    if SCALED:
        k = gl.load(k_ptr + source + channel_of_slot(d)[None, :], mask=ok, other=0.0)
        key = gl.arange(0, BLOCK_N, line)
        ks = gl.load(ks_ptr + (row0 + key) * G + group, mask=key < valid, other=1.0)
        vs = gl.load(vs_ptr + (row0 + key) * G + group, mask=key < valid, other=1.0)
        a, b, c = key_factors(ks, vs, SCORE_SCALE)
        f = f_out + out_block * (4 * BLOCK_N) + key
        gl.store(f, a)
        gl.store(f + BLOCK_N, b)
        gl.store(f + 2 * BLOCK_N, c)
        gl.store(k_out, k.to(gl.float16))
        gl.store(v_out, v.to(gl.float16))
    else:
        gl.store(k_out, gl.load(k_ptr + source + d[None, :], mask=ok, other=0.0))
        gl.store(v_out, v)


@gluon.jit
def _load_block(
    kv_desc,
    f_desc,
    kv_smem,
    f_smem,
    arrived,
    block,
    stage,
    BLOCK_N: gl.constexpr,
    SCALED: gl.constexpr,
):
    bar = arrived.index(stage)
    if SCALED:
        mbarrier.expect(bar, kv_desc.block_type.nbytes + f_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(f_desc, [block * 4, 0], bar, f_smem.index(stage))
    else:
        mbarrier.expect(bar, kv_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(kv_desc, [block * 2 * BLOCK_N, 0], bar, kv_smem.index(stage))


@gluon.jit
def _attend_blocks(
    first,
    last,
    num_blocks,
    block0,
    q_smem,
    kv_desc,
    f_desc,
    kv_smem,
    f_smem,
    arrived,
    m,
    total,
    acc,
    position,
    MASKED: gl.constexpr,
    SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    K_STEP: gl.constexpr,
    STAGES: gl.constexpr,
    mma: gl.constexpr,
):
    """Blocks [first, last) of the keys; loads run ahead to num_blocks."""
    for b in range(first, last):
        stage = b % STAGES
        mbarrier.wait(arrived.index(stage), (b // STAGES) & 1)
        k_smem = kv_smem.index(stage).slice(0, BLOCK_N, 0)
        v_smem = kv_smem.index(stage).slice(BLOCK_N, BLOCK_N, 0)
        s = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, mma)
        for i in gl.static_range(D // K_STEP):
            q = q_smem.slice(i * K_STEP, K_STEP, 1).load(gl.DotOperandLayout(0, mma, 2))
            k_part = k_smem.slice(i * K_STEP, K_STEP, 1).permute((1, 0))
            s = mma_v2(q, k_part.load(gl.DotOperandLayout(1, mma, 2)), s)
        e, m, total, acc = softmax_block(
            s, f_smem.index(stage), m, total, acc, position, b * BLOCK_N, MASKED, SCALED,
            SCORE_SCALE, BLOCK_N, mma,
        )  # fmt: skip
        acc = weigh_shared_values(e, v_smem, acc, mma)
        gl.thread_barrier()  # every warp has left the stage
        if b + STAGES < num_blocks:
            _load_block(
                kv_desc, f_desc, kv_smem, f_smem, arrived, block0 + b + STAGES, stage, BLOCK_N,
                SCALED,
            )  # fmt: skip
    return m, total, acc


@gluon.jit
def forward_kernel(
    q_ptr,
    kv_desc,
    f_desc,
    o_ptr,
    lse_ptr,
    scratch_ptr,
    tiles_ptr,
    num_key_blocks,
    lse_stride,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr,
    K_STEP: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One tile of queries of one head over all the keys it sees."""
    dtype: gl.constexpr = kv_desc.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, 8]
    )
    row: gl.constexpr = gl.SliceLayout(1, mma)
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [num_warps, 1], [1, 0])
    q_shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])

    head = gl.program_id(0)
    tile = tiles_ptr + gl.program_id(1) * 4
    q_row0 = gl.load(tile)
    num_rows = gl.load(tile + 1)
    first_position = gl.load(tile + 2)
    block0 = gl.load(tile + 3) + (head // GROUP) * num_key_blocks

    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, D], q_shared)
    kv_smem = gl.allocate_shared_memory(dtype, [STAGES, 2 * BLOCK_N, D], kv_desc.layout)
    f_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 4, BLOCK_N], f_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), count=1)
    gl.thread_barrier()

    num_blocks = (first_position + num_rows + BLOCK_N - 1) // BLOCK_N
    full_blocks = (first_position + 1) // BLOCK_N  # seen whole by every row
    for i in gl.static_range(STAGES):
        if i < num_blocks:
            _load_block(
                kv_desc, f_desc, kv_smem, f_smem, arrived, block0 + i, i, BLOCK_N, SCALED,
            )  # fmt: skip

    r = gl.arange(0, BLOCK_M, gl.SliceLayout(1, loads))
    d = gl.arange(0, D, gl.SliceLayout(0, loads))
    if SCALED:
        d = channel_of_slot(d)
    q_ptrs = q_ptr + (q_row0 + r).to(gl.int64)[:, None] * (H * D) + (head * D + d)[None, :]
    q = gl.load(q_ptrs, mask=(r < num_rows)[:, None], other=0.0)
    q_smem.store(query_codes(q, SCALED))
    gl.thread_barrier()

    rows = gl.arange(0, BLOCK_M, row)
    position = first_position + rows
    big_m = gl.full([BLOCK_M], float("-inf"), gl.float32, row)
    big_total = gl.zeros([BLOCK_M], gl.float32, row)
    m = big_m
    total = big_total
    acc = gl.zeros([BLOCK_M, D], gl.float32, mma)
    num_splits = (num_blocks + SPLIT - 1) // SPLIT
    for j in range(0, num_splits):
        m = gl.full([BLOCK_M], float("-inf"), gl.float32, row)
        total = gl.zeros([BLOCK_M], gl.float32, row)
        acc = gl.zeros([BLOCK_M, D], gl.float32, mma)
        first = j * SPLIT
        last = gl.minimum(first + SPLIT, num_blocks)
        middle = gl.maximum(gl.minimum(full_blocks, last), first)
        m, total, acc = _attend_blocks(
            first, middle, num_blocks, block0, q_smem, kv_desc, f_desc, kv_smem, f_smem, arrived,
            m, total, acc, position, False, SCALED, SCORE_SCALE, BLOCK_M, BLOCK_N, D, K_STEP,
            STAGES, mma,
        )  # fmt: skip
        m, total, acc = _attend_blocks(
            middle, last, num_blocks, block0, q_smem, kv_desc, f_desc, kv_smem, f_smem, arrived,
            m, total, acc, position, True, SCALED, SCORE_SCALE, BLOCK_M, BLOCK_N, D, K_STEP,
            STAGES, mma,
        )  # fmt: skip
        if num_splits > 1:
            m, total, u, w = fold_weights(big_m, big_total, m, total)
            # Read again, so that these addresses do not occupy registers through the loops.
            row0 = gl.load(tile, volatile=True).to(gl.int64)
            offsets = rows[:, None] * (H * D) + gl.arange(0, D, gl.SliceLayout(0, mma))[None, :]
            finished = scratch_ptr + row0 * (H * D) + head * D + offsets
            ok = (rows < num_rows)[:, None]
            old = gl.load(finished, mask=ok & (j > 0), other=0.0)
            acc = gl.fma(acc, w[:, None], old * u[:, None])
            gl.store(finished, acc, mask=ok & (j + 1 < num_splits))
            big_m = m
            big_total = total

    o = normalize(acc, inverse(total)[:, None], SCALED).to(gl.bfloat16)
    offsets = rows[:, None] * (H * D) + gl.arange(0, D, gl.SliceLayout(0, mma))[None, :]
    base = q_row0.to(gl.int64) * (H * D) + head * D
    gl.store(o_ptr + base + offsets, o, mask=(rows < num_rows)[:, None])
    lse_ptrs = lse_ptr + head.to(gl.int64) * lse_stride + q_row0 + rows
    gl.store(lse_ptrs, log_sum_exp(m, total), mask=rows < num_rows)


@dataclass(frozen=True)
class StagedKeys:
    """Keys and values as the forward kernel reads them, made by `stage_keys`.

    kv: float16 (bfloat16 without scales) [G * blocks * 128, D], a block's keys, then its values;
    factors: float32 [G * blocks * 4, 64], rows a, b, c of `attention_core` and one unused.
    """

    kv: Tensor
    factors: Tensor
    num_blocks: int
    codes: KeyValueCodes


def stage_keys(codes: KeyValueCodes, tiles: QueryTiles) -> StagedKeys:
    """Widen and line up the keys and values that `tiles` names, of a packed batch or of pages."""
    if codes.k.ndim == 4 and codes.k.shape[1] != BLOCK_KEYS:
        raise ValueError(f"pages of {BLOCK_KEYS} tokens expected, got k {list(codes.k.shape)}")
    groups, head_dim, num_blocks = codes.num_heads, codes.head_dim, len(tiles.key_blocks)
    dtype = torch.float16 if codes.scaled else torch.bfloat16
    rows = groups * num_blocks
    kv = codes.k.new_empty(rows * 2 * BLOCK_KEYS, head_dim, dtype=dtype)
    factors = codes.k.new_empty(rows * 4 if codes.scaled else 4, BLOCK_KEYS, dtype=torch.float32)
    k_scales, v_scales = (factors if s is None else s for s in (codes.k_scales, codes.v_scales))
    stage_keys_kernel[(groups, num_blocks)](
        codes.k, codes.v, k_scales, v_scales, tiles.key_blocks, kv, factors, num_blocks,
        groups, head_dim, BLOCK_KEYS, codes.scaled, score_scale(head_dim, codes.scaled),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return StagedKeys(kv, factors, num_blocks, codes)


def attend_tiles(q: Tensor, staged: StagedKeys, tiles: QueryTiles) -> tuple[Tensor, Tensor]:
    """Causal attention of the queries of `tiles` over staged keys.

    q: bfloat16 [T, H, D], rotated, rows as `tiles` counts them. Returns o like q and the natural
    log-sum-exp, float32 [H, T].
    """
    group = check_queries(q, staged.codes)
    num_queries, heads, head_dim = q.shape
    if num_queries != tiles.num_queries:
        raise ValueError(f"{num_queries} queries, but the tiles are cut for {tiles.num_queries}")
    o = torch.empty_like(q)
    lse = q.new_empty(heads, num_queries, dtype=torch.float32)
    scratch = q.new_empty(q.shape, dtype=torch.float32) if tiles.longest > SPLIT_KEYS else lse
    forward_kernel[(heads, len(tiles.tiles))](
        q,
        TensorDescriptor.from_tensor(staged.kv, [2 * BLOCK_KEYS, head_dim], _TILE_LAYOUT),
        TensorDescriptor.from_tensor(staged.factors, [4, BLOCK_KEYS], _LINE_LAYOUT),
        o, lse, scratch, tiles.tiles, staged.num_blocks, num_queries,
        heads, group, head_dim, TILE_ROWS, BLOCK_KEYS, SPLIT_BLOCKS, _STAGES, staged.codes.scaled,
        score_scale(head_dim, staged.codes.scaled), _K_STEP,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return o, lse
