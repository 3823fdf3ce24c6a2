"""The copies of the few-row GEMM by an NVFP4 weight: a warp for the codes and scales, one for X.

The rings, stages and parts of K are those of `precision.hopper.nvfp4_rows`. A copy takes one thread
some dozens of cycles to ask for, of the hundreds in which a stage is multiplied: so what lies
together is copied at once, and X has a warp of its own. The weight of a frozen
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
from jetrl.precision.hopper.adapter_epilogue import wait_for_rows
from jetrl.precision.hopper.launch import gluon_let_next_start


@gluon.jit
def load_weight(
    w_desc, s_desc, w_smem, s_smem, arrived, left, unit, KB, PB, stages, RINGS: gl.constexpr,
    CHAINS: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr, ROUNDS: gl.constexpr,
):  # fmt: skip
    """Do the work of the warp that copies the weight: all stages of all rings, stage by stage.

    Args:
        w_smem: tiles of codes, one for each unit and chain of a stage.
        KB: blocks of 128 along K.
    """
    EACH: gl.constexpr = GROUP // CHAINS
    BYTES: gl.constexpr = UNITS * CHAINS * (w_desc.block_type.nbytes + s_desc.block_type.nbytes)
    for stage in range(stages):
        for ring in gl.static_range(RINGS):
            slot = ring * ROUNDS + stage % ROUNDS
            # All stages are free at first. The phase of a barrier flips each time round.
            mbarrier.wait(left.index(slot), ((stage // ROUNDS) & 1) ^ 1)
            bar = arrived.index(slot)
            mbarrier.expect(bar, BYTES)
            for u in gl.static_range(UNITS):
                for chain in gl.static_range(CHAINS):
                    place = (slot * UNITS + u) * CHAINS + chain
                    block = (unit + u) * KB + (ring * CHAINS + chain) * PB + stage * EACH
                    gluon_names.tma_load(w_desc, [block * 16, 0], bar, w_smem.index(place))
                    gluon_names.tma_load(s_desc, [block, 0], bar, s_smem.index(place))


@gluon.jit
def load_rows(
    x_desc, copied_x, arrived, left, ready_ptr, m0, PB, stages, RINGS: gl.constexpr,
    CHAINS: gl.constexpr, GROUP: gl.constexpr, ROUNDS: gl.constexpr, SIGNALLED: gl.constexpr,
):  # fmt: skip
    """Do the work of the warp that copies X: all stages of all rings, a part of K at a time.

    Args:
        x_desc: bfloat16 [K / 64, M, 64], X in boxes of the neighbouring blocks of a stage.
        arrived: as of `load_weight`.
        left: as of `load_weight`.
        ready_ptr: int32, says when X can be read, with SIGNALLED.
        PB: as of `load_weight`.
        stages: as of `load_weight`.
        RINGS: as of `load_weight`.
        CHAINS: as of `load_weight`.
        GROUP: as of `load_weight`.
        ROUNDS: as of `load_weight`.
        SIGNALLED: as of `nvfp4_rows.nvfp4_rows_kernel`.
    """
    EACH: gl.constexpr = GROUP // CHAINS
    wait_for_rows(ready_ptr, SIGNALLED)
    gluon_let_next_start()
    for stage in range(stages):
        for ring in gl.static_range(RINGS):
            slot = ring * ROUNDS + stage % ROUNDS
            mbarrier.wait(left.index(slot), ((stage // ROUNDS) & 1) ^ 1)
            bar = arrived.index(slot)
            mbarrier.expect(bar, CHAINS * x_desc.block_type.nbytes)
            for chain in gl.static_range(CHAINS):
                block = (ring * CHAINS + chain) * PB + stage * EACH
                box = copied_x.index(slot * CHAINS + chain)
                gluon_names.tma_load(x_desc, [block * 2, m0, 0], bar, box)
