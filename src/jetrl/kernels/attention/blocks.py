"""The loop of a warpgroup over blocks of keys and values: products and softmax.

The loading warp (`attention.forward`) fills a ring of stages in shared memory. While one of three
warpgroups multiplies, another computes its softmax. With BF16 keys, the scores of a block are
issued together with the values product of the previous block. With quantized keys, whose softmax
takes more registers and time, one product is in flight at a time (docs/kernels.md).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

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
from jetrl.precision.triton import gluon_names

ROWS = gl.constexpr(64)  # queries per warpgroup: M of wgmma


class Ring(NamedTuple):
    """Ring buffer of blocks in shared memory; block b is in stage b % STAGES.

    Attributes:
        k: 16-bit [STAGES, BLOCK_N, D], like v.
        factors: float32 [STAGES, 4, BLOCK_N], the factors of `softmax_block`.
        full: barriers [STAGES, 1], complete when the block of a stage has arrived.
        empty: barriers [STAGES, 1], complete when all warpgroups have released the stage.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.constexpr_function
def accumulator(columns):
    """Return the accumulator layout of a warpgroup, [ROWS, columns]."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def wait_for_block(ring, b):
    """Wait for block b to arrive, and return its stage."""
    # Barrier phases alternate: 0 in the first round of the ring, 1 in the second.
    stages: gl.constexpr = ring.k.shape[0]
    stage = b % stages
    mbarrier.wait(ring.full.index(stage), (b // stages) & 1)
    return stage


@gluon.jit
def release_block(ring, stage):
    """Release a stage to the loading warp, once all warps of the warpgroup have read it."""
    gluon_names.barrier()
    mbarrier.arrive(ring.empty.index(stage), count=1)


@gluon.jit
def _start_scores(q, ring, stage):
    """Start the product of queries and the keys of a stage, float32 [ROWS, BLOCK_N]."""
    # `use_acc=False` saves zeroing the accumulator registers.
    keys: gl.constexpr = ring.k.shape[1]
    zero = gl.zeros([ROWS, keys], gl.float32, accumulator(keys))
    k = ring.k.index(stage).permute((1, 0))
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def _scores(q, ring, stage):
    return warpgroup_mma_wait(0, deps=(_start_scores(q, ring, stage),))


@gluon.jit
def _rescale(acc, decay):
    """Return acc with its rows multiplied by decay; moves no registers."""
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return acc * gl.convert_layout(decay, layout, assert_trivial=True)[:, None]


@gluon.jit
def _start_sums(acc, p, ring, stage):
    """Start adding the product of weights p and the values of a stage to acc."""
    return warpgroup_mma(p, ring.v.index(stage), acc, is_async=True)


@gluon.jit
def _sums(acc, p, ring, stage):
    """Add the product of weights p and the values of a stage to acc, and wait for it."""
    return warpgroup_mma_wait(0, deps=(_start_sums(acc, p, ring, stage),))


@gluon.jit
def _softmax(
    s,
    ring,
    stage,
    m,
    total,
    position,
    first_key,
    MASKED: gl.constexpr,
    SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr,
):
    """Return `softmax_block` with the factors of a stage and keys along columns."""
    factors = ring.factors.index(stage)
    return softmax_block(s, factors, m, total, position, first_key, MASKED, SCALED, SCORE_SCALE, 1)


@gluon.jit
def attend_whole_blocks(
    first, last, q, ring, m, total, acc, SCALED: gl.constexpr, SCORE_SCALE: gl.constexpr
):
    """Process unmasked blocks; the scores of each are issued with the values product before it.

    Returns the new m and total [ROWS] and acc [ROWS, D], float32, for 16-bit queries q [ROWS, D] in
    shared memory.
    """
    # The first block has no preceding values product. (m is a placeholder for the unused position.)
    if first < last:
        stage = wait_for_block(ring, first)
        s = _scores(q, ring, stage)
        # The softmax weights e become the left operand p of the values product, after acc decays.
        e, m, total, decay = _softmax(s, ring, stage, m, total, m, 0, False, SCALED, SCORE_SCALE)
        acc = _rescale(acc, decay)
        p = value_weights(e, acc, ring.k.dtype)
        for b in range(first + 1, last):
            before = stage
            stage = wait_for_block(ring, b)
            # Two products are in flight. They complete in order, so once one is left the scores are
            # ready, and the values product overlaps with the softmax.
            coming = _start_scores(q, ring, stage)
            sums = _start_sums(acc, p, ring, before)
            s = warpgroup_mma_wait(1, deps=(coming,))
            e, m, total, decay = _softmax(
                s, ring, stage, m, total, m, 0, False, SCALED, SCORE_SCALE
            )
            # The PV wgmma reads the registers of p until this wait. A wgmma left in flight across
            # iterations would make ptxas serialize all of them.
            acc, p = warpgroup_mma_wait(0, deps=(sums, p))
            release_block(ring, before)
            acc = _rescale(acc, decay)
            p = value_weights(e, acc, ring.k.dtype)
        # The last values product has no scores to overlap with.
        acc = _sums(acc, p, ring, stage)
        release_block(ring, stage)
    return m, total, acc


@gluon.jit
def attend_whole_blocks_in_turn(
    first, last, q, ring, m, total, acc, SCALED: gl.constexpr, SCORE_SCALE: gl.constexpr
):
    """`attend_whole_blocks` with one product in flight: values, then the next scores."""
    # An iteration starts with the scores of a block and ends with those of the next. The weights
    # are dead before the next scores are computed, which saves registers.
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
            # Release the previous block while the scores of this one are computed.
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
    base,
    first,
    last,
    q,
    ring,
    m,
    total,
    acc,
    position,
    SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr,
):
    """Process the masked blocks on the diagonal; position is int32 [ROWS]."""
    # There are at most two such blocks for 64 rows, so nothing is overlapped.
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
