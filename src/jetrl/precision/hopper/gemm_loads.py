"""The copies of the FP8 GEMM of few rows: the work of the warp that fills the stages.

Stages, groups of blocks and their two barriers are those of `precision.hopper.gemm_rows`. The
weight's tiles of the first groups are asked for before the kernel in front has ended, X's when they
can be read (`precision.hopper.launch`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jetrl.precision.hopper import gluon_names
from jetrl.precision.hopper.adapter_epilogue import wait_for_rows
from jetrl.precision.hopper.launch import gluon_let_next_start, gluon_wait_for_previous


@gluon.jit
def _load_weights(
    w_desc, w_smem, arrived, group, n0, COUNT: gl.constexpr,
    PARTS: gl.constexpr, BLOCK_N: gl.constexpr, ROUNDS: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_BYTES: gl.constexpr,
):  # fmt: skip
    """Start the copies of the weight's codes for COUNT blocks of a group, from its first block on.

    The barrier is told of all bytes of these blocks, X's too, which `_load_rows` asks for.
    """
    bar = arrived.index(group % ROUNDS)
    mbarrier.expect(bar, COUNT * BLOCK_BYTES)
    for i in gl.static_range(COUNT):
        stage = (group % ROUNDS) * GROUP + i
        for part in gl.static_range(PARTS):
            gluon_names.tma_load(
                w_desc, [n0 + part * BLOCK_N, (group * GROUP + i) * 128], bar,
                w_smem.index(stage * PARTS + part),
            )  # fmt: skip


@gluon.jit
def _load_rows(
    x_desc, s_desc, x_smem, s_smem, arrived, group, m0, COUNT: gl.constexpr,
    BOX_M: gl.constexpr, ROUNDS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Start the copies of X's codes and scales for COUNT blocks of a group.

    Of codes BOX_M rows are copied: a box that reaches past the end of the array is slow.
    """
    bar = arrived.index(group % ROUNDS)
    for i in gl.static_range(COUNT):
        k = group * GROUP + i
        stage = (group % ROUNDS) * GROUP + i
        rows = x_smem.index(stage).slice(0, BOX_M, 0)
        gluon_names.tma_load(x_desc, [m0, k * 128], bar, rows)
        gluon_names.tma_load(s_desc, [k, m0], bar, s_smem.index(stage))


@gluon.jit
def load_operands(
    x_desc, s_desc, w_desc, x_smem, s_smem, w_smem, arrived, left, ready_ptr, m0, n0, early,
    KB: gl.constexpr, PARTS: gl.constexpr, BOX_M: gl.constexpr, BLOCK_N: gl.constexpr,
    ROUNDS: gl.constexpr, GROUP: gl.constexpr, SIGNALLED: gl.constexpr,
):  # fmt: skip
    """Do the loading warp's work: keep every stage that is free asked for.

    Args:
        x_desc: FP8 [M padded, K], boxes of [BOX_M, 128].
        s_desc: float32 [K / 128, M padded], X's scales, boxes of [1, BLOCK_M].
        w_desc: FP8 [N, K], boxes of [BLOCK_N, 128].
        x_smem: FP8 [stages, BLOCK_M, 128] in shared memory.
        s_smem: float32 [stages, 1, BLOCK_M] in shared memory.
        w_smem: FP8 [stages * PARTS, BLOCK_N, 128] in shared memory.
        arrived: a barrier for each group, for its bytes.
        ready_ptr: int32, says when X can be read, with SIGNALLED.
        m0: the program's first row of X.
        n0: the program's first row of the weight.
        early: whether weights are asked for while the kernel in front still runs; outside of a
            captured graph that may be the one that writes them.
        KB: blocks of 128 along K.
        PARTS: as of `gemm_tiles.Tiles`.
        BOX_M: rows of X that are copied.
        BLOCK_N: as of `gemm_tiles.Tiles`.
        ROUNDS: as of `gemm_tiles.Tiles`.
        GROUP: as of `gemm_tiles.Tiles`.
        SIGNALLED: as of `gemm_rows.rows_gemm_kernel`.
    """
    BLOCK_BYTES: gl.constexpr = (
        x_desc.block_type.nbytes + s_desc.block_type.nbytes + PARTS * w_desc.block_type.nbytes
    )
    GROUPS: gl.constexpr = KB // GROUP
    AHEAD: gl.constexpr = ROUNDS if ROUNDS < GROUPS else GROUPS
    # All stages are free at first. The weights of the first groups do not depend on the kernel in
    # front; X, which that writes, does.
    if early == 0:
        gluon_wait_for_previous()
    for group in range(AHEAD):
        _load_weights(
            w_desc, w_smem, arrived, group, n0, GROUP, PARTS, BLOCK_N, ROUNDS, GROUP, BLOCK_BYTES
        )
    wait_for_rows(ready_ptr, SIGNALLED)
    gluon_let_next_start()
    for group in range(AHEAD):
        _load_rows(x_desc, s_desc, x_smem, s_smem, arrived, group, m0, GROUP, BOX_M, ROUNDS, GROUP)
    # From then on a group's stages are asked for again once the multiplying warps have left them.
    # The phase of a barrier flips each time round.
    for group in range(AHEAD, GROUPS):
        mbarrier.wait(left.index(group % ROUNDS), ((group // ROUNDS) & 1) ^ 1)
        _load_weights(
            w_desc, w_smem, arrived, group, n0, GROUP, PARTS, BLOCK_N, ROUNDS, GROUP, BLOCK_BYTES
        )
        _load_rows(x_desc, s_desc, x_smem, s_smem, arrived, group, m0, GROUP, BOX_M, ROUNDS, GROUP)
    # What is left of K is a smaller group.
    if KB % GROUP:
        mbarrier.wait(
            left.index(GROUPS % ROUNDS), ((GROUPS // ROUNDS) & 1) ^ 1, pred=GROUPS >= ROUNDS
        )
        _load_weights(
            w_desc, w_smem, arrived, GROUPS, n0, KB % GROUP, PARTS, BLOCK_N, ROUNDS, GROUP,
            BLOCK_BYTES,
        )  # fmt: skip
        _load_rows(
            x_desc, s_desc, x_smem, s_smem, arrived, GROUPS, m0, KB % GROUP, BOX_M, ROUNDS, GROUP
        )
