"""A warpgroup's way through blocks of keys and values: products, and the softmax between them.

A warpgroup has 64 queries, their keys and values come in shared memory, in a ring of stages that
the loading warp fills (`attention_forward`). Of three warpgroups one multiplies while another is in
its softmax. With BF16 keys the scores of a block are issued with the values of the one before it;
with FP8 keys, whose softmax takes more registers and more of the time, one product at a time is
faster (docs/notes-attention.md).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jetrl.kernels.attention_core import softmax_block, value_weights

ROWS = gl.constexpr(64)  # queries of a warpgroup: what one wgmma takes


@gluon.jit
def wait_for_block(full, b, STAGES: gl.constexpr):
    mbarrier.wait(full.index(b % STAGES), (b // STAGES) & 1)


@gluon.jit
def release_block(empty, stage):
    """Every warp of the warpgroup has read the stage."""
    gl.thread_barrier()
    mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def _start_scores(q_smem, k_smem, zero):
    return warpgroup_mma(q_smem, k_smem.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _rescale(acc, decay):
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return acc * gl.convert_layout(decay, layout, assert_trivial=True)[:, None]


@gluon.jit
def attend_whole_blocks(
    first,
    last,
    q_smem,
    k_smem,
    v_smem,
    f_smem,
    full,
    empty,
    m,
    total,
    acc,
    SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    scores: gl.constexpr,
    outputs: gl.constexpr,
):
    """Blocks that every row sees whole; first and last count the program's blocks."""
    dtype: gl.constexpr = k_smem.dtype
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, scores)
    if first < last:
        stage = first % STAGES
        wait_for_block(full, first, STAGES)
        s = warpgroup_mma_wait(0, deps=(_start_scores(q_smem, k_smem.index(stage), zero),))
        e, m, total, decay = softmax_block(
            s, f_smem.index(stage), m, total, m, 0, False, SCALED, SCORE_SCALE, BLOCK_N, scores
        )
        acc = _rescale(acc, decay)
        p = value_weights(e, dtype, outputs)
        for b in range(first + 1, last):
            before = stage
            stage = b % STAGES
            wait_for_block(full, b, STAGES)
            coming = _start_scores(q_smem, k_smem.index(stage), zero)
            sums = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=(coming,))
            e, m, total, decay = softmax_block(
                s, f_smem.index(stage), m, total, m, 0, False, SCALED, SCORE_SCALE, BLOCK_N, scores
            )
            acc, p = warpgroup_mma_wait(0, deps=(sums, p))
            release_block(empty, before)
            acc = _rescale(acc, decay)
            p = value_weights(e, dtype, outputs)
        sums = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(sums,))
        release_block(empty, stage)
    return m, total, acc


@gluon.jit
def attend_whole_blocks_in_turn(
    first,
    last,
    q_smem,
    k_smem,
    v_smem,
    f_smem,
    full,
    empty,
    m,
    total,
    acc,
    SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    scores: gl.constexpr,
    outputs: gl.constexpr,
):
    """The same with one product at a time: a block's values, then the scores of the next."""
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, scores)
    if first < last:
        stage = first % STAGES
        wait_for_block(full, first, STAGES)
        s = warpgroup_mma_wait(0, deps=(_start_scores(q_smem, k_smem.index(stage), zero),))
        for b in range(first + 1, last):
            before = stage
            stage = b % STAGES
            e, m, total, decay = softmax_block(
                s, f_smem.index(before), m, total, m, 0, False, SCALED, SCORE_SCALE, BLOCK_N, scores
            )
            p = value_weights(e, k_smem.dtype, outputs)
            acc = _rescale(acc, decay)
            wait_for_block(full, b, STAGES)
            sums = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(sums,))
            coming = _start_scores(q_smem, k_smem.index(stage), zero)
            release_block(empty, before)
            s = warpgroup_mma_wait(0, deps=(coming,))
        e, m, total, decay = softmax_block(
            s, f_smem.index(stage), m, total, m, 0, False, SCALED, SCORE_SCALE, BLOCK_N, scores
        )
        p = value_weights(e, k_smem.dtype, outputs)
        acc = _rescale(acc, decay)
        sums = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(sums,))
        release_block(empty, stage)
    return m, total, acc


@gluon.jit
def attend_cut_blocks(
    base,
    first,
    last,
    q_smem,
    k_smem,
    v_smem,
    f_smem,
    full,
    empty,
    m,
    total,
    acc,
    position,
    SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    scores: gl.constexpr,
    outputs: gl.constexpr,
):
    """Blocks of the tile that some row sees in part; base: the program's blocks before the tile."""
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, scores)
    for b in range(first, last):
        stage = (base + b) % STAGES
        wait_for_block(full, base + b, STAGES)
        s = warpgroup_mma_wait(0, deps=(_start_scores(q_smem, k_smem.index(stage), zero),))
        e, m, total, decay = softmax_block(
            s, f_smem.index(stage), m, total, position, b * BLOCK_N, True, SCALED, SCORE_SCALE,
            BLOCK_N, scores,
        )  # fmt: skip
        acc = _rescale(acc, decay)
        p = value_weights(e, k_smem.dtype, outputs)
        sums = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(sums,))
        release_block(empty, stage)
    return m, total, acc
