"""The copies of the few-row GEMM by an NVFP4 weight: stages of X, codes and scales, by one warp.

The rings, stages and parts of K are those of `precision.hopper.nvfp4_rows`. The weight of a frozen
base is written by no kernel that lets the next one start early, so the first stages' codes are
asked for before the kernel in front has ended (`precision.hopper.launch`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jetrl.precision.hopper import gluon_names
from jetrl.precision.hopper.adapter_epilogue import wait_until_ready
from jetrl.precision.hopper.launch import gluon_let_next_start, gluon_wait_for_previous


@gluon.jit
def _block_of(
    ring, stage, PB, i: gl.constexpr, CHAINS: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Return the block along K that is block i of a stage of a ring."""
    EACH: gl.constexpr = GROUP // CHAINS
    return (ring * CHAINS + i // EACH) * PB + stage * EACH + i % EACH


@gluon.jit
def _load_weight(
    w_desc, s_desc, w_smem, s_smem, arrived, ring, stage, unit, KB, PB, CHAINS: gl.constexpr,
    UNITS: gl.constexpr, GROUP: gl.constexpr, ROUNDS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Start the copies of a stage's codes and scales; its barrier is told of X's bytes too."""
    slot = ring * ROUNDS + stage % ROUNDS
    bar = arrived.index(slot)
    mbarrier.expect(bar, BYTES)
    for u in gl.static_range(UNITS):
        for i in gl.static_range(GROUP):
            place = (slot * UNITS + u) * GROUP + i
            block = _block_of(ring, stage, PB, i, CHAINS, GROUP)
            row = ((unit + u) * KB + block) * 16
            gluon_names.tma_load(w_desc, [row, 0], bar, w_smem.index(place))
            gluon_names.tma_load(s_desc, [unit + u, block * 64], bar, s_smem.index(place))


@gluon.jit
def _load_rows(
    x_desc, x_smem, arrived, ring, stage, m0, PB, CHAINS: gl.constexpr, GROUP: gl.constexpr,
    ROUNDS: gl.constexpr,
):  # fmt: skip
    """Start the copies of a stage of X, 64 columns each."""
    slot = ring * ROUNDS + stage % ROUNDS
    for i in gl.static_range(2 * GROUP):
        column = _block_of(ring, stage, PB, i // 2, CHAINS, GROUP) * 128 + i % 2 * 64
        place = x_smem.index(slot * (2 * GROUP) + i)
        gluon_names.tma_load(x_desc, [m0, column], arrived.index(slot), place)


@gluon.jit
def load_stages(
    x_desc, w_desc, s_desc, x_smem, w_smem, s_smem, arrived, left, ready_ptr, m0, unit, KB, PB,
    stages, RINGS: gl.constexpr, CHAINS: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr,
    ROUNDS: gl.constexpr, RANK: gl.constexpr, SIGNALLED: gl.constexpr,
):  # fmt: skip
    """Do the copying warp's work: the stages of all rings, stage by stage.

    Args:
        x_desc, w_desc, s_desc: of X, and of the weight's codes and scales.
        x_smem, w_smem, s_smem: the stages' tiles.
        arrived: a barrier for each stage, for its copies.
        left: a barrier for each stage, for the warps that multiply.
        ready_ptr: int32, says when X can be read, with SIGNALLED.
        m0: first row of X.
        unit: first unit of the weight.
        KB: blocks of 128 along K.
        PB: blocks of a part of K.
        stages: stages of a ring.
        RINGS: rings.
        CHAINS: parts of K that a ring has in turn.
        RANK: columns of the adapter's B, or 0; with an adapter another warp lets the kernel behind
            start.
        SIGNALLED: as of `nvfp4_rows.nvfp4_rows_kernel`.
    """
    BYTES: gl.constexpr = GROUP * (
        2 * x_desc.block_type.nbytes + UNITS * (w_desc.block_type.nbytes + s_desc.block_type.nbytes)
    )
    ahead = gl.minimum(stages, ROUNDS)
    # All stages are free at first. The weight does not depend on the kernel in front; X does.
    for stage in range(ahead):
        for ring in gl.static_range(RINGS):
            _load_weight(
                w_desc, s_desc, w_smem, s_smem, arrived, ring, stage, unit, KB, PB,
                CHAINS, UNITS, GROUP, ROUNDS, BYTES,
            )  # fmt: skip
    if SIGNALLED:
        wait_until_ready(ready_ptr)
    else:
        gluon_wait_for_previous()
    if RANK == 0:
        gluon_let_next_start()
    for stage in range(ahead):
        for ring in gl.static_range(RINGS):
            _load_rows(x_desc, x_smem, arrived, ring, stage, m0, PB, CHAINS, GROUP, ROUNDS)
    # The phase of a barrier flips each time round.
    for stage in range(ahead, stages):
        for ring in gl.static_range(RINGS):
            slot = ring * ROUNDS + stage % ROUNDS
            mbarrier.wait(left.index(slot), ((stage // ROUNDS) & 1) ^ 1)
            _load_weight(
                w_desc, s_desc, w_smem, s_smem, arrived, ring, stage, unit, KB, PB,
                CHAINS, UNITS, GROUP, ROUNDS, BYTES,
            )  # fmt: skip
            _load_rows(x_desc, x_smem, arrived, ring, stage, m0, PB, CHAINS, GROUP, ROUNDS)
