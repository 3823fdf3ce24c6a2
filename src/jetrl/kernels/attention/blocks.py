"""A warpgroup's way through blocks of keys and values: products, and the softmax between them.

The loading warp (`attention.forward`) fills a ring of stages in shared memory. One of three
warpgroups multiplies while another is in its softmax. With BF16 keys a block's scores are issued
with the values of the block before; with coded keys, whose softmax takes more registers and time,
one product is in flight at a time (docs/kernels.md).
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

ROWS = gl.constexpr(64)  # queries of a warpgroup: what one wgmma takes


class Ring(NamedTuple):
    """The ring of a program's blocks in shared memory, block b in stage b % STAGES.

    Attributes:
        k: 16-bit [STAGES, BLOCK_N, D], like v.
        factors: float32 [STAGES, 4, BLOCK_N], the lines of `softmax_block`.
        full: barriers [STAGES, 1], complete when a stage's block has arrived.
        empty: barriers [STAGES, 1], complete when every warpgroup has released the stage.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.constexpr_function
def accumulator(columns):
    """Return the layout of a warpgroup's product [ROWS, columns]."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def wait_for_block(ring, b):
    """Return the stage of block b, once the block has arrived."""
    # A barrier's phases alternate: 0 in the first round of the ring, 1 in the second.
    stages: gl.constexpr = ring.k.shape[0]
    stage = b % stages
    mbarrier.wait(ring.full.index(stage), (b // stages) & 1)
    return stage


@gluon.jit
def release_block(ring, stage):
    """Give the stage back to the loading warp, once every warp of the warpgroup has read it."""
    gluon_names.barrier()
    mbarrier.arrive(ring.empty.index(stage), count=1)


@gluon.jit
def _start_scores(q, ring, stage):
    """Start the product of the queries and a stage's keys, float32 [ROWS, BLOCK_N]."""
    # Nothing is added up: `use_acc=False` saves writing zeros to the accumulator's registers.
    keys: gl.constexpr = ring.k.shape[1]
    zero = gl.zeros([ROWS, keys], gl.float32, accumulator(keys))
    k = ring.k.index(stage).permute((1, 0))
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def _scores(q, ring, stage):
    return warpgroup_mma_wait(0, deps=(_start_scores(q, ring, stage),))


@gluon.jit
def _rescale(acc, decay):
    """Return the rows of acc multiplied by decay, whose registers fit acc's rows."""
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return acc * gl.convert_layout(decay, layout, assert_trivial=True)[:, None]


@gluon.jit
def _start_sums(acc, p, ring, stage):
    """Start adding the product of weights p and a stage's values to acc."""
    return warpgroup_mma(p, ring.v.index(stage), acc, is_async=True)


@gluon.jit
def _sums(acc, p, ring, stage):
    """Return acc with the product of weights p and a stage's values added, waited for."""
    return warpgroup_mma_wait(0, deps=(_start_sums(acc, p, ring, stage),))


@gluon.jit
def _softmax(
    s, ring, stage, m, total, position, first_key, MASKED: gl.constexpr, SCALED: gl.constexpr,
    SCORE_SCALE: gl.constexpr,
):  # fmt: skip
    """Return `softmax_block` of scores with a stage's factors, keys along columns."""
    factors = ring.factors.index(stage)
    return softmax_block(s, factors, m, total, position, first_key, MASKED, SCALED, SCORE_SCALE, 1)


@gluon.jit
def attend_whole_blocks(
    first, last, q, ring, m, total, acc, SCALED: gl.constexpr, SCORE_SCALE: gl.constexpr
):  # fmt: skip
    """Attend to whole blocks, each block's scores issued with the values of the one before.

    Returns the new m and total [ROWS] and acc [ROWS, D], float32, for 16-bit queries q [ROWS, D] in
    shared memory.
    """
    # The first block has no values before it. (Without a mask, m stands for `position`.)
    if first < last:
        stage = wait_for_block(ring, first)
        s = _scores(q, ring, stage)
        # The softmax leaves weights e, which become the left operand p of the values' product; what
        # acc has so far decays first.
        e, m, total, decay = _softmax(s, ring, stage, m, total, m, 0, False, SCALED, SCORE_SCALE)
        acc = _rescale(acc, decay)
        p = value_weights(e, acc, ring.k.dtype)
        for b in range(first + 1, last):
            before = stage
            stage = wait_for_block(ring, b)
            # Two products in flight: products end in order, so with one left the scores are ready,
            # and the values' product may run next to the softmax.
            coming = _start_scores(q, ring, stage)
            sums = _start_sums(acc, p, ring, before)
            s = warpgroup_mma_wait(1, deps=(coming,))
            e, m, total, decay = _softmax(
                s, ring, stage, m, total, m, 0, False, SCALED, SCORE_SCALE
            )
            # The weights are in registers that the product reads until here. No product is carried
            # into the next turn: ptxas would then serialize all of them.
            acc, p = warpgroup_mma_wait(0, deps=(sums, p))
            release_block(ring, before)
            acc = _rescale(acc, decay)
            p = value_weights(e, acc, ring.k.dtype)
        # The last block's values have no scores next to them.
        acc = _sums(acc, p, ring, stage)
        release_block(ring, stage)
    return m, total, acc


@gluon.jit
def attend_whole_blocks_in_turn(
    first, last, q, ring, m, total, acc, SCALED: gl.constexpr, SCORE_SCALE: gl.constexpr
):  # fmt: skip
    """Do what `attend_whole_blocks` does, one product at a time: values, then the next scores."""
    # A turn begins with a block's scores at hand and ends with those of the next. The weights are
    # then dead before the scores of the next block are made, which saves their registers.
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
            # The block before is released while the scores of this one are computed.
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
    """Attend to the blocks on the diagonal, which rows see up to their position, int32 [ROWS]."""
    # At most two blocks for 64 rows, so nothing is overlapped here.
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
