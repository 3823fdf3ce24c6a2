"""Attention with many queries per sequence, and the table's attention, from compute capability 8.0.

The bits of a row are those of `attention.core`, so decode (`attention.decode`) agrees on every GPU:
both use mma.sync with K = 16, the only instruction of this kind on all of them. The compiler may
not choose another: tl.dot would take wgmma or tcgen05 for some tiles.

Keys and values are staged as for Hopper (`attention.staging`). A program has 64 queries of one head
in four warps, and one block of keys and one of values in shared memory, so that two programs fit in
the 99 KB of small GPUs. Values are copied during the scores, the next keys during the softmax and
the values' product. Finished splits keep their outputs in global memory, as in `attention.forward`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from jetrl.kernels.attention.backward import attention_backward
from jetrl.kernels.attention.core import (
    fold_weights,
    inverse,
    log_sum_exp,
    normalize,
    query_codes,
    score_scale,
    slots_of_channels,
    softmax_block,
    value_weights,
)
from jetrl.kernels.attention.layout import (
    BLOCK_KEYS,
    TILE_ROWS,
    KeyValueCodes,
    QueryTiles,
    check_queries,
)
from jetrl.kernels.attention.staging import StagedKeys, TileAttention
from jetrl.kernels.attention.staging import stage_keys as stage_keys
from jetrl.precision.quantize import AMAX_FLOOR, FORMATS
from jetrl.precision.triton import gluon_names, tile

_ROWS = gl.constexpr(64)  # queries per program
_PARTS = TILE_ROWS // 64  # programs per tile and head
_WARPS = 4
_MMA = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[_WARPS, 1], instr_shape=[16, 8])
)
_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# For global memory: a thread has two neighboring factors.
_LINES = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [_WARPS, 1], [1, 0]))


class Blocks(NamedTuple):
    """The staged keys and values of a head, and the block of each in shared memory.

    Attributes:
        kv_ptr: 16-bit, per block 64 keys [64, D], then 64 values.
        f_ptr: float32, per block four rows of 64 factors.
        offsets: int32 [64, D], of the elements of a block; `lines` [4, 64] of its factors.
        own: number to add to a block's index in the sequence; `stem` for the first `stem_blocks`.
        k: [64, D] in shared memory, like v; factors [2, 4, 64], of this block and the next.
    """

    kv_ptr: Any
    f_ptr: Any
    offsets: gl.tensor
    lines: gl.tensor
    own: gl.tensor
    stem: gl.tensor
    stem_blocks: gl.tensor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor


@gluon.constexpr_function
def rows_layout(head_dim):
    """Return the layout of rows in global memory: 8 neighboring channels per thread."""
    return gl.BlockedLayout([1, 8], [256 // head_dim, head_dim // 8], [_WARPS, 1], [1, 0])


@gluon.jit
def _block_of(blocks, b):
    """Return the place of block b of a sequence among the staged blocks, int64."""
    first = gl.where(b < blocks.stem_blocks, blocks.stem, blocks.own)
    return (first + b).to(gl.int64)


@gluon.jit
def _copy_keys(blocks, b, num_blocks, SCALED: gl.constexpr):
    """Start copying the keys and factors of block b, if there is one, as one group."""
    BLOCK_N: gl.constexpr = blocks.k.shape[0]
    D: gl.constexpr = blocks.k.shape[1]
    if b < num_blocks:
        block = _block_of(blocks, b)
        keys = blocks.kv_ptr + block * (2 * BLOCK_N * D)
        gluon_names.async_load(blocks.k, keys + blocks.offsets)
        if SCALED:
            factors = blocks.f_ptr + block * (4 * BLOCK_N)
            gluon_names.async_load(blocks.factors.index(b % 2), factors + blocks.lines)
    async_copy.commit_group()


@gluon.jit
def _copy_values(blocks, b):
    """Start copying the values of block b, as one group."""
    BLOCK_N: gl.constexpr = blocks.v.shape[0]
    D: gl.constexpr = blocks.v.shape[1]
    values = blocks.kv_ptr + _block_of(blocks, b) * (2 * BLOCK_N * D) + BLOCK_N * D
    gluon_names.async_load(blocks.v, values + blocks.offsets)
    async_copy.commit_group()


@gluon.jit
def _attend_block(
    q, blocks, b, num_blocks, m, total, acc, position,
    MASKED: gl.constexpr, SCALED: gl.constexpr, SCORE_SCALE: gl.constexpr,
):  # fmt: skip
    """Return m and total [64] and acc [64, D], float32, updated by block b.

    The copy of its keys is under way, and the copy of the next keys is at the end.
    """
    BLOCK_N: gl.constexpr = blocks.k.shape[0]
    mma: gl.constexpr = acc.type.layout
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    _copy_values(blocks, b)
    # All but the latest group, the values, have arrived; the barrier shows them to all warps.
    async_copy.wait_group(1)
    gluon_names.barrier()
    k = blocks.k.permute((1, 0)).load(right)
    s = mma_v2(q, k, gl.zeros([q.shape[0], BLOCK_N], gl.float32, mma))
    # All warps have read the keys, so that the next may overwrite them.
    gluon_names.barrier()
    _copy_keys(blocks, b + 1, num_blocks, SCALED)
    factors = blocks.factors.index(b % 2)
    e, m, total, decay = softmax_block(
        s, factors, m, total, position, b * BLOCK_N, MASKED, SCALED, SCORE_SCALE, 1
    )
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, mma), assert_trivial=True)[:, None]
    p = value_weights(e, acc, blocks.v.dtype)
    async_copy.wait_group(1)
    gluon_names.barrier()
    acc = mma_v2(p, blocks.v.load(right), acc)
    gluon_names.barrier()  # the next values may overwrite these
    return m, total, acc


@gluon.jit(do_not_specialize=["num_key_blocks", "lse_stride", "scale_stride"])
def tile_kernel(
    q_ptr, kv_ptr, f_ptr, o_ptr, o_scales_ptr, lse_ptr, scratch_ptr, tiles_ptr,
    num_key_blocks, lse_stride, scale_stride,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr,
    SPLIT: gl.constexpr, PARTS: gl.constexpr, SCALED: gl.constexpr, SCORE_SCALE: gl.constexpr,
    QUANTIZE: gl.constexpr, MAXIMUM: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    """Compute causal attention for 64 queries, one of the PARTS of a tile, and one head.

    Args:
        q_ptr: bfloat16 [T, H, D], rotated.
        kv_ptr: 16-bit [G * num_key_blocks * 2 * BLOCK_N, D], `StagedKeys.kv`.
        f_ptr: float32 [G * num_key_blocks * 4, BLOCK_N], read if SCALED.
        o_ptr: bfloat16 or, if QUANTIZE, FP8 [T, H, D] with scales float32 [H, scale_stride];
            written.
        lse_ptr: float32 [H, lse_stride], natural log-sum-exp, written.
        scratch_ptr: float32 [T, H, D], outputs of finished splits, if a context has several.
        tiles_ptr: int32 [n, 6], `QueryTiles.tiles`, longest first.
    """
    # Heads are the fastest program index, so that concurrent programs share keys in L2; the last
    # part of a tile, which has the most keys, comes first.
    wide: gl.constexpr = rows_layout(D)
    row: gl.constexpr = gl.SliceLayout(1, _MMA)
    head = gl.program_id(0) % H
    item = gl.program_id(0) // H
    part = PARTS - 1 - item % PARTS
    record = tiles_ptr + item // PARTS * 6
    row0 = gl.load(record) + part * _ROWS
    num_rows = gl.minimum(gl.load(record + 1) - part * _ROWS, _ROWS)
    if num_rows > 0:
        first_position = gl.load(record + 2) + part * _ROWS
        num_blocks = (first_position + num_rows + BLOCK_N - 1) // BLOCK_N
        full_blocks = gl.minimum((first_position + 1) // BLOCK_N, num_blocks)  # need no mask
        k_smem = gl.allocate_shared_memory(kv_ptr.dtype.element_ty, [BLOCK_N, D], _SHARED)
        v_smem = gl.allocate_shared_memory(kv_ptr.dtype.element_ty, [BLOCK_N, D], _SHARED)
        f_smem = gl.allocate_shared_memory(gl.float32, [2, 4, BLOCK_N], _FLAT)
        r = gl.arange(0, _ROWS, gl.SliceLayout(1, wide))
        d = gl.arange(0, D, gl.SliceLayout(0, wide))

        # Queries go to registers through the memory of the keys.
        at = (row0 + r).to(gl.int64)[:, None] * (H * D) + (head * D + d)[None, :]
        q = query_codes(gl.load(q_ptr + at, mask=(r < num_rows)[:, None], other=0.0), SCALED)
        if SCALED:
            q = slots_of_channels(q)
        k_smem.store(q)
        gluon_names.barrier()
        queries = k_smem.load(gl.DotOperandLayout(0, _MMA, 2))
        gluon_names.barrier()

        n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, wide))
        line = gl.arange(0, 4, gl.SliceLayout(1, _LINES))
        key = gl.arange(0, BLOCK_N, gl.SliceLayout(0, _LINES))
        head_blocks = head // GROUP * num_key_blocks
        blocks = Blocks(
            kv_ptr, f_ptr, n[:, None] * D + d[None, :], line[:, None] * BLOCK_N + key[None, :],
            gl.load(record + 3) + head_blocks, gl.load(record + 5) + head_blocks,
            gl.load(record + 4), k_smem, v_smem, f_smem,
        )  # fmt: skip
        _copy_keys(blocks, 0, num_blocks, SCALED)

        # Each split starts from the empty state and is folded into the earlier ones. One thread
        # writes and reads each element of the scratch, so no barrier is needed.
        position = first_position + gl.arange(0, _ROWS, row)
        big_m = gl.full([_ROWS], float("-inf"), gl.float32, row)
        big_total = gl.zeros([_ROWS], gl.float32, row)
        m = big_m
        total = big_total
        acc = gl.zeros([_ROWS, D], gl.float32, _MMA)
        num_splits = (num_blocks + SPLIT - 1) // SPLIT
        for j in range(0, num_splits):
            m = gl.full([_ROWS], float("-inf"), gl.float32, row)
            total = gl.zeros([_ROWS], gl.float32, row)
            acc = gl.zeros([_ROWS, D], gl.float32, _MMA)
            last = gl.minimum(j * SPLIT + SPLIT, num_blocks)
            middle = gl.maximum(gl.minimum(full_blocks, last), j * SPLIT)
            for b in range(j * SPLIT, middle):
                m, total, acc = _attend_block(
                    queries, blocks, b, num_blocks, m, total, acc, position, False, SCALED,
                    SCORE_SCALE,
                )  # fmt: skip
            for b in range(middle, last):
                m, total, acc = _attend_block(
                    queries, blocks, b, num_blocks, m, total, acc, position, True, SCALED,
                    SCORE_SCALE,
                )  # fmt: skip
            if num_splits > 1:
                m, total, u, w = fold_weights(big_m, big_total, m, total)
                rows = gl.arange(0, _ROWS, row)
                columns = head * D + gl.arange(0, D, gl.SliceLayout(0, _MMA))
                finished = scratch_ptr + (row0 + rows).to(gl.int64)[:, None] * (H * D)
                finished += columns[None, :]
                ok = (rows < num_rows)[:, None]
                old = gl.load(finished, mask=ok & (j > 0), other=0.0)
                acc = gl.fma(acc, w[:, None], old * u[:, None])
                gl.store(finished, acc, mask=ok & (j + 1 < num_splits))
                big_m = m
                big_total = total
        async_copy.wait_group(0)

        # Round to BF16 before quantizing, like the separate quantizer. A head of 128 channels is
        # one 1 x 128 group.
        rows = gl.arange(0, _ROWS, row)
        lse_ptrs = lse_ptr + head.to(gl.int64) * lse_stride + row0 + rows
        gl.store(lse_ptrs, log_sum_exp(m, total), mask=rows < num_rows)
        o = normalize(acc, inverse(total)[:, None], SCALED).to(gl.bfloat16)
        o = gl.convert_layout(o, wide)
        if QUANTIZE:
            rounded = tile.widen(o)
            amax = tile.largest(rounded, 1)
            scale, multiplier = tile.scale_and_multiplier(amax, MAXIMUM, FLOOR, POW2)
            scale_ptrs = o_scales_ptr + head.to(gl.int64) * scale_stride + row0 + r
            gl.store(scale_ptrs, scale, mask=r < num_rows)
            o = rounded * multiplier[:, None]
        at = (row0 + r).to(gl.int64)[:, None] * (H * D) + (head * D + d)[None, :]
        gl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty), mask=(r < num_rows)[:, None])


def _launch(
    q: Tensor, staged: StagedKeys, tiles: QueryTiles, o: Tensor, o_scales: Tensor | None,
    scales: str, split_keys: int,
) -> Tensor:  # fmt: skip
    """Check the arguments, and launch the kernel (see `TileAttention`)."""
    group = check_queries(q, staged.codes)
    num_queries, heads, head_dim = q.shape
    assert num_queries == tiles.num_queries, f"{num_queries} queries, tiles for other lengths"
    lse = q.new_empty(heads, num_queries, dtype=torch.float32)
    # Contexts of one split need no scratch; `lse` is a placeholder here and below.
    scratch = q.new_empty(q.shape, dtype=torch.float32) if tiles.longest > split_keys else lse
    out_scales, scale_stride = (lse, 0) if o_scales is None else (o_scales, o_scales.stride(1))
    if len(tiles.tiles):
        tile_kernel[(heads * len(tiles.tiles) * _PARTS,)](
            q, staged.kv, staged.factors, o, out_scales, lse, scratch, tiles.tiles,
            staged.num_blocks, num_queries, scale_stride,
            heads, group, head_dim, BLOCK_KEYS, split_keys // BLOCK_KEYS, _PARTS,
            staged.codes.scaled, score_scale(head_dim, staged.codes.scaled),
            o_scales is not None, FORMATS["e4m3"][1], AMAX_FLOOR, scales == "pow2",
            num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return lse


_attention = TileAttention(_launch)
attend_tiles = _attention.attend_tiles
attend_batch = _attention.attend_batch
attend_prefill = _attention.attend_prefill
attend_prefill_quantized = _attention.attend_prefill_quantized


@functools.lru_cache(maxsize=8)
def _equal_tiles(tokens: int, length: int, device: torch.device) -> QueryTiles:
    return QueryTiles.packed(range(0, tokens + 1, length), device)


def attend_equal_lengths(
    q: Tensor, k: Tensor, v: Tensor, length: int
) -> tuple[Tensor, *tuple[Tensor, ...]]:
    """Return causal attention of packed sequences of equal length, and the log-sum-exp.

    Takes q, bfloat16 [T, H, D], and k and v [T, G, D]. cuDNN does this on a Hopper GPU.
    """
    tiles = _equal_tiles(len(q), length, q.device)
    return attend_batch(q, KeyValueCodes(k, None, v, None), tiles)


def attend_equal_lengths_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, rest: tuple[Tensor, ...], length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for the output gradient do [T, H, D]."""
    tiles = _equal_tiles(len(q), length, q.device)
    return attention_backward(do, q, KeyValueCodes(k, None, v, None), o, rest[0], tiles)
