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

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jetrl.kernels.attention.core import softmax_block, value_weights
from jetrl.precision.hopper import gluon_names

ROWS = gl.constexpr(64)  # queries of a warpgroup: what one wgmma takes


class Ring(NamedTuple):
    """The program's blocks in shared memory, block b in stage b % STAGES.

    k, v: 16-bit [STAGES, BLOCK_N, D]. factors: float32 [STAGES, 4, BLOCK_N] (`softmax_block`).
    full, empty: barriers [STAGES, 1], of the loading warp and of the warpgroups.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.constexpr_function
def accumulator(columns):
    """The layout of a product [ROWS, columns]."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def wait_for_block(ring, b):
    """Returns the stage that holds block b, when it is there."""
    stages: gl.constexpr = ring.k.shape[0]
    stage = b % stages
    mbarrier.wait(ring.full.index(stage), (b // stages) & 1)
    return stage


@gluon.jit
def release_block(ring, stage):
    """Every warp of the warpgroup has read the stage."""
    gluon_names.barrier()
    mbarrier.arrive(ring.empty.index(stage), count=1)


@gluon.jit
def _start_scores(q, ring, stage):
    keys: gl.constexpr = ring.k.shape[1]
    zero = gl.zeros([ROWS, keys], gl.float32, accumulator(keys))
    k = ring.k.index(stage).permute((1, 0))
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def _scores(q, ring, stage):
    return warpgroup_mma_wait(0, deps=(_start_scores(q, ring, stage),))


@gluon.jit
def _rescale(acc, decay):
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return acc * gl.convert_layout(decay, layout, assert_trivial=True)[:, None]


@gluon.jit
def _start_sums(acc, p, ring, stage):
    return warpgroup_mma(p, ring.v.index(stage), acc, is_async=True)


@gluon.jit
def _sums(acc, p, ring, stage):
    return warpgroup_mma_wait(0, deps=(_start_sums(acc, p, ring, stage),))


@gluon.jit
def _softmax(
    s, ring, stage, m, total, position, first_key, MASKED: gl.constexpr, SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr,
):  # fmt: skip
    factors = ring.factors.index(stage)
    return softmax_block(s, factors, m, total, position, first_key, MASKED, SCALED, SCORE_SCALE, 1)


@gluon.jit
def attend_whole_blocks(
    first, last, q, ring, m, total, acc, SCALED: gl.constexpr, SCORE_SCALE: gl.constexpr
):  # fmt: skip
    """Blocks that every row sees whole; first and last count the program's blocks."""
    if first < last:
        stage = wait_for_block(ring, first)
        s = _scores(q, ring, stage)
        e, m, total, decay = _softmax(s, ring, stage, m, total, m, 0, False, SCALED, SCORE_SCALE)
        acc = _rescale(acc, decay)
        p = value_weights(e, acc, ring.k.dtype)
        for b in range(first + 1, last):
            before = stage
            stage = wait_for_block(ring, b)
            coming = _start_scores(q, ring, stage)
            sums = _start_sums(acc, p, ring, before)
            s = warpgroup_mma_wait(1, deps=(coming,))
            e, m, total, decay = _softmax(
                s, ring, stage, m, total, m, 0, False, SCALED, SCORE_SCALE
            )
            acc, p = warpgroup_mma_wait(0, deps=(sums, p))
            release_block(ring, before)
            acc = _rescale(acc, decay)
            p = value_weights(e, acc, ring.k.dtype)
        acc = _sums(acc, p, ring, stage)
        release_block(ring, stage)
    return m, total, acc


@gluon.jit
def attend_whole_blocks_in_turn(
    first, last, q, ring, m, total, acc, SCALED: gl.constexpr, SCORE_SCALE: gl.constexpr
):  # fmt: skip
    """The same with one product at a time: a block's values, then the scores of the next."""
    if first < last:
        stage = wait_for_block(ring, first)
        s = _scores(q, ring, stage)
        for b in range(first + 1, last):
            before = stage
            e, m, total, decay = _softmax(
                s, ring, before, m, total, m, 0, False, SCALED, SCORE_SCALE
            )
            p = value_weights(e, acc, ring.k.dtype)
            acc = _rescale(acc, decay)
            stage = wait_for_block(ring, b)
            acc = _sums(acc, p, ring, before)
            coming = _start_scores(q, ring, stage)
            release_block(ring, before)
            s = warpgroup_mma_wait(0, deps=(coming,))
        e, m, total, decay = _softmax(s, ring, stage, m, total, m, 0, False, SCALED, SCORE_SCALE)
        p = value_weights(e, acc, ring.k.dtype)
        acc = _rescale(acc, decay)
        acc = _sums(acc, p, ring, stage)
        release_block(ring, stage)
    return m, total, acc


@gluon.jit
def attend_cut_blocks(
    base, first, last, q, ring, m, total, acc, position, SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr,
):  # fmt: skip
    """Blocks of the tile that some row sees in part; base: the program's blocks before the tile."""
    BLOCK_N: gl.constexpr = ring.k.shape[1]
    for b in range(first, last):
        stage = wait_for_block(ring, base + b)
        s = _scores(q, ring, stage)
        e, m, total, decay = _softmax(
            s, ring, stage, m, total, position, b * BLOCK_N, True, SCALED, SCORE_SCALE
        )
        acc = _rescale(acc, decay)
        p = value_weights(e, acc, ring.k.dtype)
        acc = _sums(acc, p, ring, stage)
        release_block(ring, stage)
    return m, total, acc
