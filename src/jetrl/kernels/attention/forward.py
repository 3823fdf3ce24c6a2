"""Attention with many queries per sequence: training forward and chunked prefill.

`attention.staging` first widens keys and values to 16-bit operands, in blocks of 64.

A program processes 192 queries of one head: three warpgroups of 64 rows, and a warp that loads
blocks by TMA into five stages. The warpgroups share only these blocks, so one can multiply while
another computes its softmax (`attention.blocks`). One persistent program per SM loops over tiles,
longest first. Finished splits keep their state in global memory, one float32 row per query: in
registers it would leave no room for a third warpgroup. Alternatives: docs/kernels.md.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jetrl.kernels.attention.blocks import (
    ROWS,
    Ring,
    accumulator,
    attend_cut_blocks,
    attend_whole_blocks,
    attend_whole_blocks_in_turn,
    release_block,
    wait_for_block,
)
from jetrl.kernels.attention.core import (
    fold_weights,
    inverse,
    log_sum_exp,
    normalize,
    query_codes,
    score_scale,
    slots_of_channels,
)
from jetrl.kernels.attention.layout import BLOCK_KEYS, TILE_ROWS, QueryTiles, check_queries
from jetrl.kernels.attention.staging import StagedKeys, TileAttention
from jetrl.kernels.attention.staging import stage_keys as stage_keys
from jetrl.precision.quantize import AMAX_FLOOR, FORMATS
from jetrl.precision.triton import gluon_names
from jetrl.precision.triton import tile as tile_rules
from jetrl.precision.triton.launch import multiprocessors

_STAGES = 5  # the maximum that fits shared memory: 33 KB per block with quantized keys
# Shared-memory layouts that TMA writes and wgmma reads.
_TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_CODES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
_LINE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.jit
def _item_of_turn(turn):
    """Return the work item of this program in a turn; snake order mixes long and short items."""
    step = gl.num_programs(0)
    place = gl.program_id(0)
    return turn * step + gl.where(turn % 2 == 0, place, step - 1 - place)


@gluon.jit
def _load_blocks(
    kv_desc, f_desc, tiles_ptr, ring, num_items, num_key_blocks,
    H: gl.constexpr, GROUP: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Load the blocks of all tiles of the program as stages become free (the loading warp)."""
    # `base` counts the blocks of earlier tiles, so that stages and barrier phases continue from
    # tile to tile. The warpgroups keep the same count.
    STAGES: gl.constexpr = ring.k.shape[0]
    BLOCK_N: gl.constexpr = ring.k.shape[1]
    base = 0
    for turn in range(0, (num_items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = _item_of_turn(turn)
        if item < num_items:
            # Load all blocks that the last row of the tile attends to. Heads are the fastest item
            # index, so that concurrent programs share keys in L2.
            tile = tiles_ptr + (item // H) * 6
            num_blocks = (gl.load(tile + 1) + gl.load(tile + 2) + BLOCK_N - 1) // BLOCK_N
            # The blocks of the run follow those of its stem, if it has one.
            head_blocks = (item % H // GROUP) * num_key_blocks
            own_block0 = gl.load(tile + 3) + head_blocks
            stem_blocks = gl.load(tile + 4)
            stem_block0 = gl.load(tile + 5) + head_blocks
            for b in range(0, num_blocks):
                # A stage is free once all three warpgroups have released it. In the first round,
                # waiting for the preceding phase succeeds at once.
                stage = (base + b) % STAGES
                mbarrier.wait(ring.empty.index(stage), (((base + b) // STAGES) & 1) ^ 1)
                bar = ring.full.index(stage)
                block = gl.where(b < stem_blocks, stem_block0, own_block0) + b
                row = block * 2 * BLOCK_N
                # The barrier completes once keys, values and factors have arrived.
                if SCALED:
                    mbarrier.expect(bar, 2 * kv_desc.block_type.nbytes + f_desc.block_type.nbytes)
                    factors = ring.factors.index(stage)
                    gluon_names.tma_load(f_desc, [block * 4, 0], bar, factors)
                else:
                    mbarrier.expect(bar, 2 * kv_desc.block_type.nbytes)
                gluon_names.tma_load(kv_desc, [row, 0], bar, ring.k.index(stage))
                gluon_names.tma_load(kv_desc, [row + BLOCK_N, 0], bar, ring.v.index(stage))
            base += num_blocks


@gluon.jit
def _attend_rows(
    part, q_smem, q_ptr, o_ptr, o_scales_ptr, lse_ptr, scratch_ptr, tiles_ptr, ring,
    num_items, lse_stride, scale_stride,
    H: gl.constexpr, D: gl.constexpr, SPLIT: gl.constexpr, SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr, QUANTIZE: gl.constexpr, MAXIMUM: gl.constexpr,
    FLOOR: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    """Compute attention for rows [64 part, 64 part + 64) of each tile (one warpgroup)."""
    # Rows have three layouts: that of scores, that of outputs, and `wide` for global memory, with 8
    # neighboring channels of a row per thread.
    BLOCK_N: gl.constexpr = ring.k.shape[1]
    outputs: gl.constexpr = accumulator(D)
    row: gl.constexpr = gl.SliceLayout(1, accumulator(BLOCK_N))
    output_row: gl.constexpr = gl.SliceLayout(1, outputs)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    r = gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    d = gl.arange(0, D, gl.SliceLayout(0, wide))
    skip = part * ROWS
    base = 0
    for turn in range(0, (num_items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = _item_of_turn(turn)
        if item < num_items:
            # The rows of this part and their blocks: `full_blocks` need no mask, since the first
            # row attends to all their keys; the others, up to `num_blocks`, do. Later rows of the
            # tile may need more blocks, `all_blocks`, which also pass through the ring.
            tile = tiles_ptr + (item // H) * 6
            head = item % H
            row0 = gl.load(tile) + skip
            num_rows = gl.load(tile + 1) - skip  # not positive for the last parts of a short tile
            first_position = gl.load(tile + 2) + skip
            all_blocks = (first_position + num_rows + BLOCK_N - 1) // BLOCK_N
            seen = (first_position + gl.minimum(num_rows, ROWS) + BLOCK_N - 1) // BLOCK_N
            num_blocks = gl.where(num_rows > 0, seen, 0)
            full_blocks = gl.minimum((first_position + 1) // BLOCK_N, num_blocks)

            # Put queries in shared memory for wgmma, since registers are full. For quantized keys,
            # prescale them and permute them to the channel order of the staged keys.
            at = (row0 + r).to(gl.int64)[:, None] * (H * D) + (head * D + d)[None, :]
            q = gl.load(q_ptr + at, mask=(r < num_rows)[:, None], other=0.0)
            q = query_codes(q, SCALED)
            if SCALED:
                q = slots_of_channels(q)
            q_smem.store(q)
            # Reload here and below, to save registers in the loops.
            num_rows = gl.load(tile + 1, volatile=True) - skip
            # The tensor core sees stores of threads only after this fence.
            fence_async_shared()
            gluon_names.barrier()

            # Each split starts from the empty state.
            position = first_position + gl.arange(0, ROWS, row)
            big_m = gl.full([ROWS], float("-inf"), gl.float32, row)
            big_total = gl.zeros([ROWS], gl.float32, row)
            m = big_m
            total = big_total
            acc = gl.zeros([ROWS, D], gl.float32, outputs)
            num_splits = (num_blocks + SPLIT - 1) // SPLIT
            for j in range(0, num_splits):
                m = gl.full([ROWS], float("-inf"), gl.float32, row)
                total = gl.zeros([ROWS], gl.float32, row)
                acc = gl.zeros([ROWS, D], gl.float32, outputs)
                first = j * SPLIT
                last = gl.minimum(first + SPLIT, num_blocks)
                middle = gl.maximum(gl.minimum(full_blocks, last), first)
                # Unmasked blocks first, in the product order that is faster for the format; then
                # the diagonal.
                if SCALED:
                    m, total, acc = attend_whole_blocks_in_turn(
                        base + first, base + middle, q_smem, ring, m, total, acc, SCALED,
                        SCORE_SCALE,
                    )  # fmt: skip
                else:
                    m, total, acc = attend_whole_blocks(
                        base + first, base + middle, q_smem, ring, m, total, acc, SCALED,
                        SCORE_SCALE,
                    )  # fmt: skip
                m, total, acc = attend_cut_blocks(
                    base, middle, last, q_smem, ring, m, total, acc, position, SCALED, SCORE_SCALE
                )
                # Fold the split into the earlier ones. Their maxima and sums are in registers;
                # their outputs are loaded from memory, and stored again unless this is the last
                # split. One thread writes and reads each element, so no barrier is needed.
                if num_splits > 1:
                    m, total, u, w = fold_weights(big_m, big_total, m, total)
                    u = gl.convert_layout(u, output_row, assert_trivial=True)
                    w = gl.convert_layout(w, output_row, assert_trivial=True)
                    rows = gl.arange(0, ROWS, output_row)
                    cols = gl.arange(0, D, gl.SliceLayout(0, outputs))
                    start = (gl.load(tile, volatile=True) + skip).to(gl.int64) * (H * D) + head * D
                    finished = scratch_ptr + start + rows[:, None] * (H * D) + cols[None, :]
                    ok = (rows < num_rows)[:, None]
                    old = gl.load(finished, mask=ok & (j > 0), other=0.0)
                    acc = gl.fma(acc, w[:, None], old * u[:, None])
                    gl.store(finished, acc, mask=ok & (j + 1 < num_splits))
                    big_m = m
                    big_total = total
            # Release the blocks that only later rows of the tile need, since a stage needs all
            # three releases. Wait for each block first, so that its release is not counted early.
            for b in range(base + num_blocks, base + all_blocks):
                release_block(ring, wait_for_block(ring, b))
            base += all_blocks

            # Round outputs to BF16. Codes come from the rounded row, like those of the separate
            # quantizer. A head of 128 channels is one 1 x 128 group.
            inv = gl.convert_layout(inverse(total), output_row, assert_trivial=True)
            o = normalize(acc, inv[:, None], SCALED).to(gl.bfloat16)
            row0 = gl.load(tile, volatile=True) + skip
            left = gl.load(tile + 1, volatile=True) - skip
            if QUANTIZE:
                rounded = o.to(gl.float32)
                amax = tile_rules.largest(rounded, 1)
                scale, factor = tile_rules.scale_and_multiplier(amax, MAXIMUM, FLOOR, POW2)
                o = (rounded * factor[:, None]).to(o_ptr.dtype.element_ty)
                rows = gl.arange(0, ROWS, output_row)
                scale_ptrs = o_scales_ptr + head.to(gl.int64) * scale_stride + row0 + rows
                gl.store(scale_ptrs, scale, mask=rows < left)
            # Go through the shared memory of the queries, so that a thread writes 16 (8) bytes.
            if QUANTIZE:
                codes = gluon_names.reinterpret(q_smem, o.dtype, [2 * ROWS, D], _CODES)
                o_smem = codes.slice(0, ROWS)
            else:
                layout: gl.constexpr = q_smem.layout
                o_smem = gluon_names.reinterpret(q_smem, o.dtype, [ROWS, D], layout)
            # All warps have read the queries by now. The last barrier below protects these outputs
            # from the queries of the next tile.
            gluon_names.barrier()
            o_smem.store(o)
            gluon_names.barrier()
            rows = gl.arange(0, ROWS, row)
            lse_ptrs = lse_ptr + head.to(gl.int64) * lse_stride + row0 + rows
            gl.store(lse_ptrs, log_sum_exp(m, total), mask=rows < left)
            at = (row0 + r).to(gl.int64)[:, None] * (H * D) + (head * D + d)[None, :]
            gl.store(o_ptr + at, o_smem.load(wide), mask=(r < left)[:, None])
            gluon_names.barrier()


# Sizes change from batch to batch, so do not specialize on their divisibility.
@gluon.jit(do_not_specialize=["num_items", "num_key_blocks", "lse_stride", "scale_stride"])
def forward_kernel(
    q_ptr, kv_desc, f_desc, o_ptr, o_scales_ptr, lse_ptr, scratch_ptr, tiles_ptr,
    num_items, num_key_blocks, lse_stride, scale_stride,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr, SCALED: gl.constexpr, SCORE_SCALE: gl.constexpr,
    QUANTIZE: gl.constexpr, MAXIMUM: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    """Compute causal attention for tiles of 192 queries of one head; one program per SM.

    Args:
        q_ptr: bfloat16 [T, H, D], rotated.
        kv_desc: 16-bit [G * num_key_blocks * 2 * BLOCK_N, D], in boxes [BLOCK_N, D].
        f_desc: float32 [G * num_key_blocks * 4, BLOCK_N], in boxes [4, BLOCK_N].
        o_ptr: bfloat16 or, if QUANTIZE, FP8 [T, H, D] with scales float32 [H, scale_stride];
            written.
        lse_ptr: float32 [H, lse_stride], natural log-sum-exp, written.
        scratch_ptr: float32 [T, H, D], outputs of finished splits, if a context has several.
        tiles_ptr: int32 [n, 6], `QueryTiles.tiles`; a work item is a tile and a head.
    """
    # Shared memory: the queries of each warpgroup, and the ring of blocks.
    dtype: gl.constexpr = kv_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [3, ROWS, D], kv_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], kv_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], kv_desc.layout)
    f_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 4, BLOCK_N], f_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # A stage is full once its TMA loads have arrived, and empty once three warpgroups have released
    # it. The fence makes the initialized barriers visible to TMA.
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=3)
    fence_async_shared()
    gluon_names.barrier()
    ring = Ring(k_smem, v_smem, f_smem, full, empty)
    # Four roles: three warpgroups of 4 warps (the first is the program's default) and the loading
    # warp. Registers per thread: 160 for the second and third warpgroup, 24 for the loading warp;
    # the compiler gives the rest to the first.
    # Constexprs do not survive in a named tuple, so each argument list is written out.
    gl.warp_specialize(
        [
            (_attend_rows, (
                0, q_smem.index(0), q_ptr, o_ptr, o_scales_ptr, lse_ptr, scratch_ptr, tiles_ptr,
                ring, num_items, lse_stride, scale_stride, H, D, SPLIT, SCALED, SCORE_SCALE,
                QUANTIZE, MAXIMUM, FLOOR, POW2,
            )),
            (_attend_rows, (
                1, q_smem.index(1), q_ptr, o_ptr, o_scales_ptr, lse_ptr, scratch_ptr, tiles_ptr,
                ring, num_items, lse_stride, scale_stride, H, D, SPLIT, SCALED, SCORE_SCALE,
                QUANTIZE, MAXIMUM, FLOOR, POW2,
            )),
            (_attend_rows, (
                2, q_smem.index(2), q_ptr, o_ptr, o_scales_ptr, lse_ptr, scratch_ptr, tiles_ptr,
                ring, num_items, lse_stride, scale_stride, H, D, SPLIT, SCALED, SCORE_SCALE,
                QUANTIZE, MAXIMUM, FLOOR, POW2,
            )),
            (_load_blocks, (
                kv_desc, f_desc, tiles_ptr, ring, num_items, num_key_blocks, H, GROUP, SCALED,
            )),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )  # fmt: skip


def _launch(
    q: Tensor, staged: StagedKeys, tiles: QueryTiles, o: Tensor, o_scales: Tensor | None,
    scales: str, split_keys: int,
) -> Tensor:  # fmt: skip
    """Check the arguments, and launch the kernel (see `TileAttention`)."""
    group = check_queries(q, staged.codes)
    num_queries, heads, head_dim = q.shape
    assert num_queries == tiles.num_queries, f"{num_queries} queries, tiles for other lengths"
    assert TILE_ROWS == 3 * 64, "the kernel has three warpgroups of 64 rows"
    lse = q.new_empty(heads, num_queries, dtype=torch.float32)
    # Contexts of one split need no scratch. A kernel cannot take None, so `lse` is a placeholder
    # here and below.
    scratch = q.new_empty(q.shape, dtype=torch.float32) if tiles.longest > split_keys else lse
    items = heads * len(tiles.tiles)
    programs = multiprocessors(q.device)
    out_scales, scale_stride = (lse, 0) if o_scales is None else (o_scales, o_scales.stride(1))
    forward_kernel[(min(items, programs),)](
        q,
        TensorDescriptor.from_tensor(staged.kv, [BLOCK_KEYS, head_dim], _TILE_LAYOUT),
        TensorDescriptor.from_tensor(staged.factors, [4, BLOCK_KEYS], _LINE_LAYOUT),
        o, out_scales, lse, scratch, tiles.tiles, items, staged.num_blocks, num_queries,
        scale_stride,
        heads, group, head_dim, BLOCK_KEYS, split_keys // BLOCK_KEYS, _STAGES, staged.codes.scaled,
        score_scale(head_dim, staged.codes.scaled),
        o_scales is not None, FORMATS["e4m3"][1], AMAX_FLOOR, scales == "pow2",
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return lse


_attention = TileAttention(_launch)
attend_tiles = _attention.attend_tiles
attend_prefill = _attention.attend_prefill
attend_prefill_quantized = _attention.attend_prefill_quantized
