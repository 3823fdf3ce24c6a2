"""GEMM of few rows with an NVFP4 weight on Hopper: decode reads 4.5 bits per weight value.

A program processes 32 or 64 rows of the weight over all of K, and up to BLOCK_M rows of X. It
computes a transposed tile of Y: the weight is the left operand, unpacked to BF16 in registers
(`nvfp4_unpack`). Up to 16 rows it uses mma.sync, since a wgmma takes about 30 cycles even for few
columns; beyond that, wgmma.

Sums run along K in order, 16 products at a time, in one float32 accumulator per part of K. Parts
are added in order and multiplied once by the tensor scale, as in cuBLAS for many rows. Instruction,
tile shape and operand order change no bits. A product waits about 33 cycles for the previous one in
its chain, so up to 16 rows, four warps alternate between two parts.

Two more warps load the weight and X into rings of ROUNDS stages of GROUP blocks of 128 along K; X
is zero past K. No kernel writes a frozen weight, so its first stages are loaded before the previous
kernel has ended. An adapter is added in the epilogue, as in `gemm_rows`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jetrl.precision.hopper import MULTIPROCESSORS, SHARED_MEMORY
from jetrl.precision.hopper.adapter import (
    DOWN_PROGRAM_REGISTERS,
    AdapterOperands,
    down_program_bytes,
    load_adapter,
    wait_for_rows,
)
from jetrl.precision.nvfp4 import BLOCK, UNIT, OrderedNVFP4, RowFactors, parts_of
from jetrl.precision.triton import gluon_names
from jetrl.precision.triton.launch import (
    BARRIER,
    fitting_stages,
    gluon_let_next_start,
    overlapped,
    program_bytes,
    remaining_bytes,
)
from jetrl.precision.triton.layout import cdiv
from jetrl.precision.triton.nvfp4_unpack import (
    CODE_WORDS,
    SCALE_LINE,
    step_scales,
    step_words,
    unpack_step,
)

MOST_ROWS = 128  # rows of X per program
_REGISTERS = 65536  # per SM
_UNIT_BYTES = 2048 + 256  # codes and scales of 32 rows and 128 columns


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and pipeline stages of a GEMM.

    Attributes:
        units: units of 32 rows of the weight per four warps: 1 or 2.
        group: blocks of 128 along K per stage: 1 or 2, or 4 if `together`.
        together: whether the parts of K are computed concurrently; only up to 16 rows of X.
        sides: groups of four warps, each with its own units; 1 if `together`.
    """

    units: int
    group: int
    rounds: int
    registers: int
    together: bool = False
    sides: int = 1

    def rings(self, parts: int) -> int:
        """Return the number of rings of stages per program."""
        return cdiv(parts, 2) if self.together else 1

    def chains(self, parts: int) -> int:
        """Return the number of parts of K that a ring alternates between."""
        return min(parts, 2) if self.together else 1

    def block_rows(self, rows: int) -> int:
        """Return the rows of X per program."""
        return min(MOST_ROWS, max(8, 1 << (rows - 1).bit_length()))


def shared_bytes(tiles: Tiles, rows: int, parts: int, rank: int) -> int:
    """Return the maximum shared memory of a program, in bytes; rank 0 means no adapter."""
    stage, beside = _stage_and_other_bytes(tiles, rows, parts, rank)
    return program_bytes(tiles.rounds, stage, beside)


def _stage_and_other_bytes(tiles: Tiles, rows: int, parts: int, rank: int) -> tuple[int, int]:
    """Return the bytes of a stage of all rings, and the bytes of the sums and the adapter."""
    rings, block_m, units = tiles.rings(parts), tiles.block_rows(rows), tiles.sides * tiles.units
    stage = tiles.group * (block_m * BLOCK * 2 + units * _UNIT_BYTES) + 2 * BARRIER
    sums = tiles.chains(parts) * 64 * block_m * 4 + BARRIER if rings > 1 else 0
    adapter = rank * 2 * (tiles.sides * block_m + units * UNIT) + BARRIER if rank else 0
    return rings * stage, sums + adapter


def tiles_for(rows: int, n: int, parts: int) -> Tiles:
    """Return the tiles for a number of rows of X and a weight with n rows."""
    return _with_stages_in(SHARED_MEMORY, _measured_cut(rows, n, parts), rows, parts, 0)


def _with_stages_in(room: int, tiles: Tiles, rows: int, parts: int, rank: int) -> Tiles:
    """Return tiles with as many stages as fit `room` bytes of shared memory, at least 2."""
    stage, beside = _stage_and_other_bytes(tiles, rows, parts, rank)
    return replace(tiles, rounds=fitting_stages(tiles.rounds, stage, beside, room))


def _measured_cut(rows: int, n: int, parts: int) -> Tiles:
    """Return the fastest tiles, as measured on the shapes of supported models.

    If there is at most one program per SM, stages take more than half of the shared memory.
    Otherwise the GPU placed two programs on some SMs and none on others.
    """
    narrow, wide = n <= 32 * MULTIPROCESSORS, n > 64 * MULTIPROCESSORS
    if rows <= 16 and parts > 1:
        if not narrow and parts == 2:
            return Tiles(2, 4, 5, 112, True) if rows <= 8 else Tiles(2, 4, 4, 80, True)
        if not narrow:
            return Tiles(2, 2, 9 if rows <= 8 else 7, 80, True)
        if parts == 2:
            return Tiles(1, 4, 7 if rows <= 8 else 5, 80, True)
        return Tiles(1, 4, 4 if rows <= 8 else 3, 80, True)
    if wide and 16 < rows <= 64 and n <= 192 * MULTIPROCESSORS:
        return Tiles(2, 1, 6, 112, sides=3)
    if rows <= 32:
        units = 1 if narrow or (rows <= 16 and not wide) else 2
        rounds = 6 if narrow else 4 if wide else 5
        return Tiles(units, 2, rounds, 80 if rows <= 16 or narrow else 112)
    if rows <= 64:
        return Tiles(1, 2, 4, 128) if narrow else Tiles(2, 1 if wide else 2, 4, 128)
    return Tiles(2, 1, 3, 128) if wide or rows > 128 else Tiles(2, 2, 3, 168)


def fused_tiles(rows: int, n: int, parts: int, rank: int) -> Tiles:
    """Return the tiles for a GEMM with a fused adapter.

    They leave room on each SM for the tiles of u and B, and for a program of the GEMM with A.
    """
    tiles = _measured_cut(rows, n, parts)
    threads = 128 * (tiles.rings(parts) * tiles.sides + 1)
    programs = cdiv(rows, tiles.block_rows(rows)) * cdiv(n, UNIT * tiles.units * tiles.sides)
    # Programs per SM, limited by the number of programs and by registers.
    most = _REGISTERS // (threads * tiles.registers)
    programs = min(cdiv(programs, MULTIPROCESSORS), most)
    room = remaining_bytes(SHARED_MEMORY, down_program_bytes(rows), programs)
    tiles = _with_stages_in(room, tiles, rows, parts, rank)
    registers = (_REGISTERS - DOWN_PROGRAM_REGISTERS) // (programs * threads) // 8 * 8
    return replace(tiles, registers=min(tiles.registers, registers))


@gluon.jit
def load_weight(
    w_desc, s_desc, w_smem, s_smem, arrived, left, unit, KB, PB, stages, RINGS: gl.constexpr,
    CHAINS: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr, ROUNDS: gl.constexpr,
):  # fmt: skip
    """Load the weight into all stages of all rings, as they become free (one warp)."""
    EACH: gl.constexpr = GROUP // CHAINS
    BYTES: gl.constexpr = UNITS * CHAINS * (w_desc.block_type.nbytes + s_desc.block_type.nbytes)
    for stage in range(stages):
        for ring in gl.static_range(RINGS):
            slot = ring * ROUNDS + stage % ROUNDS
            # All stages are free at first. The phase of a barrier flips each round.
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
    """Load X into all stages of all rings, one part of K at a time (one warp)."""
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


# Layouts of a tile of B: each warp has 8 rows of each unit, with lanes as mma.sync needs them.
_LANES, _WARPS = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]]
_ONE_UNIT = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 8]], _LANES, _WARPS, [], [32, 16]))
_TWO_UNITS = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 8], [32, 0]], _LANES, _WARPS, [], [64, 16])
)


@gluon.jit
def _rows_of_b(b_smem, UNITS: gl.constexpr, layout: gl.constexpr):
    """Load a tile of B with rows in the order of the accumulator, bfloat16 [64, 16]."""
    if UNITS == 2:
        rows = gl.reshape(b_smem.load(_TWO_UNITS), [2, 4, 8, 16])
        rows = gl.reshape(gl.permute(rows, [1, 0, 2, 3]), [64, 16])
    else:
        rows = b_smem.load(_ONE_UNIT)
        both = gl.reshape(gl.join(rows, gl.zeros_like(rows)), [4, 8, 16, 2])
        rows = gl.reshape(gl.permute(both, [0, 3, 1, 2]), [64, 16])
    return gl.convert_layout(rows, layout, assert_trivial=True)


@gluon.jit
def _up_tile(
    u_smem, b_smem, side: gl.constexpr, layout: gl.constexpr, BLOCK_M: gl.constexpr,
    UNITS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Return a transposed tile of u B^T, float32 [64, BLOCK_M], accumulated from zero."""
    # mma.sync gives the bits of wgmma, in the same accumulator layout.
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]
    )
    total = gl.zeros([64, BLOCK_M], gl.float32, product)
    for i in gl.static_range(STEPS):
        b = _rows_of_b(b_smem.index(side * STEPS + i), UNITS, gl.DotOperandLayout(0, product, 2))
        u = u_smem.index(side * STEPS + i).permute((1, 0)).load(gl.DotOperandLayout(1, product, 2))
        total = mma_v2(b, u, total)
    return gl.convert_layout(total, layout, assert_trivial=True)


@gluon.jit
def store_product(
    total, y_ptr, factor, m0, unit, M, N, first, u_smem, b_smem, beside, side: gl.constexpr,
    BLOCK_M: gl.constexpr, UNITS: gl.constexpr, RANK: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Store the sums times the factor, plus the adapter product.

    Args:
        total: float32 [64, BLOCK_M], the sums.
        y_ptr: [M, N], written; bfloat16 with an adapter.
        factor: float32, or a pointer to float32 [N] with one factor per row of the weight.
        unit: first unit of 32 rows of the weight for these warps.
        first: if RANK, first column of u for these rows, or -1 for no adapter.
    """
    # Each warp holds 8 rows of each unit. Columns past M are zeros.
    places = gl.arange(0, 64, gl.SliceLayout(1, mma))
    n = ((unit + ((places >> 3) & 1)) * 32 + (places >> 4) * 8 + (places & 7))[:, None]
    m = m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(0, mma))[None, :]
    limit = gl.minimum(N, (unit + UNITS) * 32)
    if factor.dtype.is_ptr():
        factor = gl.load(factor + n, mask=n < limit, other=0.0)
    total = total * factor
    y = total.to(y_ptr.dtype.element_ty)
    if RANK > 0:
        mbarrier.wait(beside.index(0), 0)
        added = _up_tile(u_smem, b_smem, side, mma, BLOCK_M, UNITS, RANK // 16).to(gl.bfloat16)
        both = (y.to(gl.float32) + added.to(gl.float32)).to(gl.bfloat16)
        y = gl.where(first >= 0, both, y)
    gl.store(y_ptr + m.to(gl.int64) * N + n, y, mask=(n < limit) & (m < M))


_CODES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
_SCALES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
_X_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_X_COPY_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


@gluon.jit
def _stage_words(
    w_smem, s_smem, first_tile, CHAINS: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr,
    WORDS: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Load the words of a stage: for each unit, code words of all steps, then scale words."""
    EACH: gl.constexpr = GROUP // CHAINS
    parts = ()
    for u in gl.static_range(UNITS):
        for i in gl.static_range(GROUP):
            codes = w_smem.index(first_tile + u * CHAINS + i // EACH)
            parts += step_words(codes.slice(i % EACH * 16, 16, 0).load(WORDS))
        for i in gl.static_range(GROUP):
            scales = s_smem.index(first_tile + u * CHAINS + i // EACH)
            parts += step_scales(scales.slice(i % EACH, 1, 0).load(SCALES))
    return parts


@gluon.jit
def _weight_operand(
    parts, step: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return 64 rows of the weight, for a step of 64 along K, as a left tensor-core operand."""
    STEPS: gl.constexpr = 2 * GROUP
    lower = unpack_step(parts[step], parts[STEPS + step])
    if UNITS == 2:
        both = gl.join(lower, unpack_step(parts[2 * STEPS + step], parts[3 * STEPS + step]))
    else:
        both = gl.join(lower, gl.zeros_like(lower))
    # Permute [w, g, t, q1, q0, h, p, unit] to rows and columns.
    operand = gl.reshape(gl.permute(both, [0, 7, 1, 3, 4, 5, 2, 6]), [64, 64])
    return gl.convert_layout(operand, layout, assert_trivial=True)


@gluon.jit
def _add_product(x_smem, weight, total, mma: gl.constexpr):
    """Return total plus the product of a step of the weight and a tile of X, by mma.sync."""
    return mma_v2(weight, x_smem.permute((1, 0)).load(gl.DotOperandLayout(1, mma, 2)), total)


@gluon.jit
def _release_stage(left, SYNC: gl.constexpr):
    """Release a stage once all warps have read it.

    A barrier does not order a TMA load after ordinary loads of X that are still in flight: without
    the fence, GEMMs of 16 rows had wrong columns within a hundred forwards. wgmma has read X by the
    time that it completes.
    """
    if SYNC:
        fence_async_shared()
    gluon_names.barrier()
    mbarrier.arrive(left, count=1)


@gluon.jit
def _sum(
    x_smem, w_smem, s_smem, arrived, left, ring, side, stages, part_stages, BLOCK_M: gl.constexpr,
    CHAINS: gl.constexpr, PARTS: gl.constexpr, SIDES: gl.constexpr, UNITS: gl.constexpr,
    GROUP: gl.constexpr, ROUNDS: gl.constexpr, WORDS: gl.constexpr, SCALES: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """Return the sums of both chains of a ring, float32 [64, BLOCK_M] each."""
    EACH: gl.constexpr = 2 * GROUP // CHAINS  # steps per chain and stage
    layout: gl.constexpr = gl.DotOperandLayout(0, parent=mma, k_width=2)
    SYNC: gl.constexpr = BLOCK_M <= 16
    gl.static_assert(SYNC or CHAINS == 1, "wgmma has one chain")
    gl.static_assert(PARTS == 1 or CHAINS == 1, "parts are made in turn or one after the other")
    total = gl.zeros([64, BLOCK_M], gl.float32, mma)
    second = total
    first_slot = ring * ROUNDS
    mbarrier.wait(arrived.index(first_slot), 0)
    TILES: gl.constexpr = UNITS * CHAINS  # per side
    first_tile = (first_slot * SIDES + side) * TILES
    parts = _stage_words(w_smem, s_smem, first_tile, CHAINS, UNITS, GROUP, WORDS, SCALES)
    first = _weight_operand(parts, 0, UNITS, GROUP, layout)
    for stage in range(stages):
        slot = first_slot + stage % ROUNDS
        # Unpack each step while the previous one multiplies, and the first step of the next stage
        # while the last step of this stage does. (An accumulator in flight across the back edge of
        # the loop would make ptxas serialize every wgmma.)
        for step in gl.static_range(EACH):
            for chain in gl.static_range(CHAINS):
                weight = first
                if step + chain > 0:
                    weight = _weight_operand(parts, chain * EACH + step, UNITS, GROUP, layout)
                x = x_smem.index(slot * 2 * GROUP + chain * EACH + step)
                if not SYNC:
                    total = warpgroup_mma(weight, x.permute((1, 0)), total, is_async=True)
                elif chain == 0:
                    total = _add_product(x, weight, total, mma)
                else:
                    second = _add_product(x, weight, second, mma)
        if SYNC:
            _release_stage(left.index(slot), SYNC)
        following = gl.minimum(stage + 1, stages - 1)
        slot_following = first_slot + following % ROUNDS
        mbarrier.wait(arrived.index(slot_following), (following // ROUNDS) & 1)
        tile_following = (slot_following * SIDES + side) * TILES
        parts = _stage_words(w_smem, s_smem, tile_following, CHAINS, UNITS, GROUP, WORDS, SCALES)
        first = _weight_operand(parts, 0, UNITS, GROUP, layout)
        if not SYNC:
            total = warpgroup_mma_wait(0, deps=[total])
            _release_stage(left.index(slot), SYNC)
        if PARTS > 1:  # noqa: SIM102 (a compile-time condition)
            if (stage + 1) % part_stages == 0:
                second += total  # sum of finished parts
                total = gl.zeros([64, BLOCK_M], gl.float32, mma)
    if PARTS > 1:
        total = second + total  # add the last part, or zeros
    return total, second


@gluon.jit
def _work(
    x_desc, w_desc, s_desc, u_desc, b_desc, x_smem, copied_x, w_smem, s_smem, u_smem, b_smem,
    arrived, left, beside, sums_smem, done, y_ptr, columns_ptr, ready_ptr, factor, m0, unit, M, N,
    KB, PB, stages, early, place: gl.constexpr, RINGS: gl.constexpr, CHAINS: gl.constexpr,
    PARTS: gl.constexpr, BLOCK_M: gl.constexpr, SIDES: gl.constexpr, UNITS: gl.constexpr,
    GROUP: gl.constexpr, ROUNDS: gl.constexpr, RANK: gl.constexpr, SIGNALLED: gl.constexpr,
    WORDS: gl.constexpr, SCALES: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Run the role of one warp partition: multiply for a ring or side, or load operands."""
    COPIES: gl.constexpr = RINGS * SIDES  # index of the first loading warp
    if place == COPIES + 2:
        load_adapter(u_desc, b_desc, columns_ptr, u_smem, b_smem, beside, m0, unit * 32, N, early,
                    SIDES, BLOCK_M, UNITS * 32, RANK)  # fmt: skip
    elif place == COPIES + 1:
        load_rows(x_desc, copied_x, arrived, left, ready_ptr, m0, PB, stages, RINGS, CHAINS,
                  GROUP, ROUNDS, SIGNALLED)  # fmt: skip
    elif place == COPIES:
        load_weight(w_desc, s_desc, w_smem, s_smem, arrived, left, unit, KB, PB, stages, RINGS,
                    CHAINS, SIDES * UNITS, GROUP, ROUNDS)  # fmt: skip
    else:
        mine = unit + place % SIDES * UNITS
        first = 0
        if RANK > 0:  # load early, to hide the latency
            first = gl.load(columns_ptr + gl.minimum(mine * 32, N - 1) // 64)
        total, second = _sum(
            x_smem, w_smem, s_smem, arrived, left, place // SIDES, place % SIDES, stages,
            PB // GROUP, BLOCK_M, CHAINS, PARTS, SIDES, UNITS, GROUP, ROUNDS, WORDS, SCALES, mma,
        )  # fmt: skip
        if place // SIDES > 0:
            sums_smem.index(0).store(total)
            if CHAINS > 1:
                sums_smem.index(1).store(second)
            gluon_names.barrier()
            mbarrier.arrive(done, count=1)
        else:
            if CHAINS > 1:
                total += second
            if RINGS > 1:
                mbarrier.wait(done, 0)
                for chain in gl.static_range(CHAINS):
                    total += sums_smem.index(chain).load(mma)
            store_product(total, y_ptr, factor, m0, mine, M, N, first, u_smem, b_smem, beside,
                          place % SIDES, BLOCK_M, UNITS, RANK, mma)  # fmt: skip


@gluon.jit(do_not_specialize=["M", "factor", "KB", "PB", "early"])
def nvfp4_rows_kernel(
    x_desc, w_desc, s_desc, u_desc, b_desc, y_ptr, columns_ptr, ready_ptr, factor, M, N, KB, PB,
    early, RINGS: gl.constexpr, CHAINS: gl.constexpr, PARTS: gl.constexpr, SIDES: gl.constexpr,
    UNITS: gl.constexpr, BLOCK_M: gl.constexpr, GROUP: gl.constexpr, ROUNDS: gl.constexpr,
    RANK: gl.constexpr, SIGNALLED: gl.constexpr, WARPS: gl.constexpr, REGISTERS: gl.constexpr,
    WORDS: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_M rows of X by SIDES * UNITS * 32 rows of the weight, over all of K.

    Args:
        x_desc: bfloat16 [K / 64, M, 64], X, boxes of [2 * GROUP / CHAINS, BLOCK_M, 64].
        w_desc: int32 weight codes, boxes of [GROUP / CHAINS * 16, 32].
        s_desc: int32 weight scales, boxes of [GROUP / CHAINS, 64].
        y_ptr: bfloat16 (or float32 without an adapter) [M, N], written.
        PB: blocks per part of K except the last, a multiple of 2 if there are several.
        early: 1 to read B of the adapter before the previous kernel has ended.
        SIGNALLED: whether a flag at `ready_ptr` tells when X is ready (`adapter.wait_for_rows`).
    """
    SYNC: gl.constexpr = BLOCK_M <= 16
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2 if SYNC else 3, 0],
        warps_per_cta=[4, 1],
        instr_shape=[16, 8] if SYNC else [16, BLOCK_M, 16],
    )
    flat: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
    # Consecutive programs share rows of the weight.
    row_blocks = (M + BLOCK_M - 1) // BLOCK_M
    m0 = (gl.program_id(0) % row_blocks) * BLOCK_M
    unit = (gl.program_id(0) // row_blocks) * (SIDES * UNITS)
    SLOTS: gl.constexpr = RINGS * ROUNDS
    TILES: gl.constexpr = SLOTS * SIDES * UNITS * CHAINS
    EACH: gl.constexpr = GROUP // CHAINS
    BOXES: gl.constexpr = SLOTS * CHAINS
    copied_x = gl.allocate_shared_memory(gl.bfloat16, [BOXES, 2 * EACH, BLOCK_M, 64], x_desc.layout)
    x_smem = gluon_names.reinterpret(
        copied_x, gl.bfloat16, [BOXES * 2 * EACH, BLOCK_M, 64], _X_LAYOUT
    )
    w_smem = gl.allocate_shared_memory(gl.int32, [TILES, EACH * 16, 32], w_desc.layout)
    s_smem = gl.allocate_shared_memory(gl.int32, [TILES, EACH, 64], s_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    left = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(arrived.index(i), count=2)
        mbarrier.init(left.index(i), count=SIDES)
    # Do not allocate unused barriers: one that nothing waited for shared memory with a tile of B,
    # and its initialization was seen to overwrite that tile. Use placeholders instead.
    done = arrived
    sums_smem = s_smem
    if RINGS > 1:
        done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(done, count=1)
        sums_smem = gl.allocate_shared_memory(gl.float32, [CHAINS, 64, BLOCK_M], flat)
    u_smem = s_smem
    b_smem = s_smem
    beside = arrived
    if RANK > 0:
        COUNT: gl.constexpr = SIDES * (RANK // 16)
        u_smem = gl.allocate_shared_memory(gl.bfloat16, [COUNT, BLOCK_M, 16], u_desc.layout)
        b_smem = gl.allocate_shared_memory(gl.bfloat16, [COUNT, UNITS * 32, 16], b_desc.layout)
        beside = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(beside.index(0), count=1)
    # Blocks per ring. If parts are computed concurrently, the last may be shorter: zeros follow.
    blocks = KB if RINGS * CHAINS == 1 else PB * CHAINS
    stages = (blocks + GROUP - 1) // GROUP
    # The first four warps, those of the other rings or sides, and the loading warps.
    gl.warp_specialize(
        [
            (_work, (x_desc, w_desc, s_desc, u_desc, b_desc, x_smem, copied_x, w_smem, s_smem,
                     u_smem, b_smem, arrived, left, beside, sums_smem, done, y_ptr, columns_ptr,
                     ready_ptr, factor, m0, unit, M, N, KB, PB, stages, early, gl.constexpr(place),
                     RINGS, CHAINS, PARTS, BLOCK_M, SIDES, UNITS, GROUP, ROUNDS, RANK, SIGNALLED,
                     WORDS, SCALES, mma))
            for place in (0, 1, 2, 3, 4, 5)[: RINGS * SIDES + (3 if RANK > 0 else 2)]
        ],
        WARPS,
        REGISTERS,
    )  # fmt: skip


def nvfp4_rows_matmul(
    x: Tensor,
    w: OrderedNVFP4,
    out_dtype: torch.dtype = torch.bfloat16,
    tiles: Tiles | None = None,
    adapter: AdapterOperands | None = None,
) -> Tensor:
    """Return X @ W^T, out_dtype [M, N], reading the weight once per 128 rows of X.

    Args:
        x: bfloat16 [M, K], contiguous.
        out_dtype: bfloat16 or float32; bfloat16 with an adapter.
        tiles: tile sizes to benchmark; None picks the fastest.
        adapter: adapter to add; the kernel directly before this one must compute its u. In a
            captured graph, neither kernel may directly follow one that writes A or B.
    """
    rows, k = x.shape
    n = w.shape[0]
    out = torch.empty(rows, n, dtype=out_dtype, device=x.device)
    if not rows:
        return out
    parts, columns = parts_of(n, k)
    rank = 0 if adapter is None else adapter.up.shape[1]
    if tiles is None:
        tiles = fused_tiles(rows, n, parts, rank) if rank else tiles_for(rows, n, parts)
    block_m, rings, chains = tiles.block_rows(rows), tiles.rings(parts), tiles.chains(parts)
    each, blocks = tiles.group // chains, w.codes.shape[0] // 16
    codes = TensorDescriptor(w.codes, [blocks * 16, 32], [32, 1], [each * 16, 32], _CODES_LAYOUT)
    # A kernel cannot take None: without an adapter, other tensors are placeholders.
    u, up, first_columns, ready = codes, codes, out, None
    if adapter is not None:
        u, up = adapter.descriptors(block_m, UNIT * tiles.units)
        first_columns, ready = adapter.columns, adapter.ready
    factor = w.factor.of_rows if isinstance(w.factor, RowFactors) else w.factor
    copies = 2 if adapter is None else 3  # warps
    others = rings * tiles.sides - 1  # groups of four warps after the first
    grid = (cdiv(rows, block_m) * cdiv(n, UNIT * tiles.units * tiles.sides),)
    nvfp4_rows_kernel[grid](
        TensorDescriptor(
            x, [k // 64, rows, 64], [64, k, 1], [2 * each, block_m, 64], _X_COPY_LAYOUT
        ),
        codes,
        TensorDescriptor(w.scales, [blocks, 64], [64, 1], [each, 64], _SCALES_LAYOUT),
        u, up, out, first_columns, first_columns if ready is None else ready, factor, rows, n,
        k // BLOCK, columns // BLOCK, int(torch.cuda.is_current_stream_capturing()), rings, chains,
        parts // (rings * chains), tiles.sides, tiles.units, block_m, tiles.group, tiles.rounds,
        rank, ready is not None, (*[4] * others, *[1] * copies),
        (*[tiles.registers] * others, *[24] * copies), CODE_WORDS, SCALE_LINE,
        num_warps=4, maxnreg=tiles.registers, enable_fp_fusion=False, **overlapped(),
    )  # fmt: skip
    return out
