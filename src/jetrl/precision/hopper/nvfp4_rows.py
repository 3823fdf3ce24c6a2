"""The GEMM of few rows by an NVFP4 weight on Hopper: decode, where 4.5 bits per value are read.

A program takes 32 or 64 rows of the weight over the whole of K, and all rows of X up to BLOCK_M. It
computes the transpose of a tile of Y: the weight is the left operand, unpacked to BF16 in registers
(`nvfp4_unpack`). Up to 16 rows the instruction is mma.sync, since a wgmma takes some 30 cycles
however few its columns; beyond, wgmma.

An element's sum goes along K in order, 16 products at a time, in one float32 accumulator per part
of K. Parts are added in order and multiplied once by the matrix's scale, as cuBLAS does for many
rows. Instruction, tile and side of an operand change no bit. A product waits some 33 cycles for the
previous one in its chain, so up to 16 rows four warps make two parts in turn.

Two more warps copy the weight and X into rings of ROUNDS stages of GROUP blocks of 128 along K; X
past K is zeros. No kernel writes a frozen weight, so its first stages are requested before the
previous kernel has ended. An adapter joins before the store, as in `gemm_rows`.
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
    load_beside,
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
    room_beside,
)
from jetrl.precision.triton.layout import cdiv
from jetrl.precision.triton.nvfp4_unpack import (
    CODE_WORDS,
    SCALE_LINE,
    step_scales,
    step_words,
    unpack_step,
)

MOST_ROWS = 128  # of a program
_REGISTERS = 65536  # of an SM
_UNIT_BYTES = 2048 + 256  # of the codes and scales of 32 rows and 128 columns


@dataclass(frozen=True)
class Tiles:
    """The cut of a product into programs and stages.

    Attributes:
        units: units of 32 rows of the weight that a program has: 1 or 2.
        group: blocks of 128 along K of a stage: 1 or 2, or 4 if `together`.
        together: whether the parts of K are made side by side; up to 16 rows of X.
        sides: how many times so many units a program has, each by four warps; 1 if `together`.
    """

    units: int
    group: int
    rounds: int
    registers: int
    together: bool = False
    sides: int = 1

    def rings(self, parts: int) -> int:
        """Return how many rings of stages a program has."""
        return cdiv(parts, 2) if self.together else 1

    def chains(self, parts: int) -> int:
        """Return how many parts of K a ring makes in turn."""
        return min(parts, 2) if self.together else 1

    def block_rows(self, rows: int) -> int:
        """Return the rows of X that a program has."""
        return min(MOST_ROWS, max(8, 1 << (rows - 1).bit_length()))


def shared_bytes(tiles: Tiles, rows: int, parts: int, rank: int) -> int:
    """Return the most bytes of shared memory that a program of a cut takes; rank 0: no adapter."""
    stage, beside = _stage_and_beside(tiles, rows, parts, rank)
    return program_bytes(tiles.rounds, stage, beside)


def _stage_and_beside(tiles: Tiles, rows: int, parts: int, rank: int) -> tuple[int, int]:
    """Return the bytes of a stage of all rings, and those of the sums and the adapter."""
    rings, block_m, units = tiles.rings(parts), tiles.block_rows(rows), tiles.sides * tiles.units
    stage = tiles.group * (block_m * BLOCK * 2 + units * _UNIT_BYTES) + 2 * BARRIER
    sums = tiles.chains(parts) * 64 * block_m * 4 + BARRIER if rings > 1 else 0
    adapter = rank * 2 * (tiles.sides * block_m + units * UNIT) + BARRIER if rank else 0
    return rings * stage, sums + adapter


def tiles_for(rows: int, n: int, parts: int) -> Tiles:
    """Return the cut of a product of some rows of X with a weight of n rows."""
    return _with_stages_in(SHARED_MEMORY, _measured_cut(rows, n, parts), rows, parts, 0)


def _with_stages_in(room: int, tiles: Tiles, rows: int, parts: int, rank: int) -> Tiles:
    """Return a cut whose stages, at least 2, fit in the given bytes of shared memory."""
    stage, beside = _stage_and_beside(tiles, rows, parts, rank)
    return replace(tiles, rounds=fitting_stages(tiles.rounds, stage, beside, room))


def _measured_cut(rows: int, n: int, parts: int) -> Tiles:
    """Return the cut that was fastest at the shapes of the models that were measured.

    If no SM has two programs, stages take more than half of the shared memory: or else two programs
    were put on one SM, and others had none.
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


def tiles_beside(rows: int, n: int, parts: int, rank: int) -> Tiles:
    """Return the cut of a product to which an adapter's is added.

    It leaves room on each SM for the tiles of u and B, and for a program of the product with A.
    """
    tiles = _measured_cut(rows, n, parts)
    threads = 128 * (tiles.rings(parts) * tiles.sides + 1)
    programs = cdiv(rows, tiles.block_rows(rows)) * cdiv(n, UNIT * tiles.units * tiles.sides)
    # Programs of an SM: no more than there are, nor than its registers are enough for.
    most = _REGISTERS // (threads * tiles.registers)
    programs = min(cdiv(programs, MULTIPROCESSORS), most)
    room = room_beside(SHARED_MEMORY, down_program_bytes(rows), programs)
    tiles = _with_stages_in(room, tiles, rows, parts, rank)
    registers = (_REGISTERS - DOWN_PROGRAM_REGISTERS) // (programs * threads) // 8 * 8
    return replace(tiles, registers=min(tiles.registers, registers))


@gluon.jit
def load_weight(
    w_desc, s_desc, w_smem, s_smem, arrived, left, unit, KB, PB, stages, RINGS: gl.constexpr,
    CHAINS: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr, ROUNDS: gl.constexpr,
):  # fmt: skip
    """Do the work of the warp that copies the weight: all stages of all rings, stage by stage."""
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
    """Do the work of the warp that copies X: all stages of all rings, a part of K at a time."""
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


# Rows and columns of a tile of B: warps have 8 rows of each unit, lanes the places of mma.sync.
_LANES, _WARPS = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]]
_ONE_UNIT = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 8]], _LANES, _WARPS, [], [32, 16]))
_TWO_UNITS = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 8], [32, 0]], _LANES, _WARPS, [], [64, 16])
)


@gluon.jit
def _rows_of_b(b_smem, UNITS: gl.constexpr, layout: gl.constexpr):
    """Return a tile of B in the order of the product's rows, bfloat16 [64, 16]."""
    if UNITS == 2:
        rows = gl.reshape(b_smem.load(_TWO_UNITS), [2, 4, 8, 16])
        rows = gl.reshape(gl.permute(rows, [1, 0, 2, 3]), [64, 16])
    else:
        rows = b_smem.load(_ONE_UNIT)
        both = gl.reshape(gl.join(rows, gl.zeros_like(rows)), [4, 8, 16, 2])
        rows = gl.reshape(gl.permute(both, [0, 3, 1, 2]), [64, 16])
    return gl.convert_layout(rows, layout, assert_trivial=True)


@gluon.jit
def _added(
    u_smem, b_smem, side: gl.constexpr, layout: gl.constexpr, BLOCK_M: gl.constexpr,
    UNITS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Return the transpose of a tile of u B^T, float32 [64, BLOCK_M], one chain from zero."""
    # mma.sync has the bits of wgmma, and its result lies where wgmma has the layer's product.
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
    """Store the product times the factor, with the adapter's product added.

    Args:
        total: float32 [64, BLOCK_M], the sums.
        y_ptr: [M, N], written; bfloat16 with an adapter.
        factor: float32, or a pointer to float32 [N], the factors of rows of the weight.
        unit: the first unit of 32 rows of the weight of these warps.
        first: with RANK the first column of u for these rows, or -1 if nothing is added.
    """
    # Warps hold 8 rows of each unit. Columns past M are products of zeros.
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
        added = _added(u_smem, b_smem, side, mma, BLOCK_M, UNITS, RANK // 16).to(gl.bfloat16)
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
    """Return the words of a stage: for each unit the words of all steps' codes, then scales."""
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
    """Return a step of 64 along K of 64 rows of the weight, as the tensor core's left operand."""
    STEPS: gl.constexpr = 2 * GROUP
    lower = unpack_step(parts[step], parts[STEPS + step])
    if UNITS == 2:
        both = gl.join(lower, unpack_step(parts[2 * STEPS + step], parts[3 * STEPS + step]))
    else:
        both = gl.join(lower, gl.zeros_like(lower))
    # [w, g, t, q1, q0, h, p, unit] to the order of rows and columns
    operand = gl.reshape(gl.permute(both, [0, 7, 1, 3, 4, 5, 2, 6]), [64, 64])
    return gl.convert_layout(operand, layout, assert_trivial=True)


@gluon.jit
def _add_product(x_smem, weight, total, mma: gl.constexpr):
    """Return total plus the product of a tile of X and a step of the weight, by mma.sync."""
    return mma_v2(weight, x_smem.permute((1, 0)).load(gl.DotOperandLayout(1, mma, 2)), total)


@gluon.jit
def _leave(left, SYNC: gl.constexpr):
    """Let a stage be copied over, once every warp has read it.

    A barrier does not keep a bulk copy behind ordinary reads of X that are still under way: without
    the fence, products of 16 rows had wrong columns within a hundred forwards. wgmma has read X
    when it has ended.
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
    """Return the sums of the two chains of products of a ring, float32 [64, BLOCK_M]."""
    EACH: gl.constexpr = 2 * GROUP // CHAINS  # steps of a chain in a stage
    layout: gl.constexpr = gl.DotOperandLayout(0, parent=mma, k_width=2)
    SYNC: gl.constexpr = BLOCK_M <= 16
    gl.static_assert(SYNC or CHAINS == 1, "wgmma has one chain")
    gl.static_assert(PARTS == 1 or CHAINS == 1, "parts are made in turn or one after the other")
    total = gl.zeros([64, BLOCK_M], gl.float32, mma)
    second = total
    first_slot = ring * ROUNDS
    mbarrier.wait(arrived.index(first_slot), 0)
    TILES: gl.constexpr = UNITS * CHAINS  # of a side
    first_tile = (first_slot * SIDES + side) * TILES
    parts = _stage_words(w_smem, s_smem, first_tile, CHAINS, UNITS, GROUP, WORDS, SCALES)
    first = _weight_operand(parts, 0, UNITS, GROUP, layout)
    for stage in range(stages):
        slot = first_slot + stage % ROUNDS
        # Each step is unpacked while the one before multiplies, and the first step of the next
        # stage while the last one of this does. (An accumulator in flight across the loop's back
        # edge would make the assembler serialize every wgmma.)
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
            _leave(left.index(slot), SYNC)
        following = gl.minimum(stage + 1, stages - 1)
        slot_following = first_slot + following % ROUNDS
        mbarrier.wait(arrived.index(slot_following), (following // ROUNDS) & 1)
        tile_following = (slot_following * SIDES + side) * TILES
        parts = _stage_words(w_smem, s_smem, tile_following, CHAINS, UNITS, GROUP, WORDS, SCALES)
        first = _weight_operand(parts, 0, UNITS, GROUP, layout)
        if not SYNC:
            total = warpgroup_mma_wait(0, deps=[total])
            _leave(left.index(slot), SYNC)
        if PARTS > 1:  # noqa: SIM102 (known when it is compiled)
            if (stage + 1) % part_stages == 0:
                second += total  # of the parts before
                total = gl.zeros([64, BLOCK_M], gl.float32, mma)
    if PARTS > 1:
        total = second + total  # of the last part, or zeros
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
    """Run one warp group's share: multiply for a ring or a side, or copy operands."""
    COPIES: gl.constexpr = RINGS * SIDES  # the first place behind the warps that multiply
    if place == COPIES + 2:
        load_beside(u_desc, b_desc, columns_ptr, u_smem, b_smem, beside, m0, unit * 32, N, early,
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
        if RANK > 0:  # here, since memory is far away
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
    """Multiply BLOCK_M rows of X by SIDES * UNITS * 32 rows of the weight, over the whole of K.

    Args:
        x_desc: bfloat16 [K / 64, M, 64], X, boxes of [2 * GROUP / CHAINS, BLOCK_M, 64].
        w_desc: int32, the weight's codes, boxes of [GROUP / CHAINS * 16, 32].
        s_desc: int32, the weight's scales, boxes of [GROUP / CHAINS, 64].
        y_ptr: bfloat16, or without an adapter float32, [M, N], written.
        PB: blocks of a part of K but the last, a multiple of 2 if there are several.
        early: 1 if the adapter's B may be read before the previous kernel has ended.
        SIGNALLED: whether a word at `ready_ptr` says when X can be read (`adapter.wait_for_rows`).
    """
    SYNC: gl.constexpr = BLOCK_M <= 16
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2 if SYNC else 3, 0],
        warps_per_cta=[4, 1],
        instr_shape=[16, 8] if SYNC else [16, BLOCK_M, 16],
    )
    flat: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
    # Programs that share a part of the weight follow each other.
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
    # A barrier that nothing waited for would lie where a tile of B goes, and its first words were
    # seen to arrive behind that tile's. So what is not used is named and not there.
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
    # Of a ring; of parts that are made side by side, the last may end earlier: zeros follow.
    blocks = KB if RINGS * CHAINS == 1 else PB * CHAINS
    stages = (blocks + GROUP - 1) // GROUP
    # The first four warps, those of the other rings or sides, and those that copy.
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
    """Return X @ W^T, out_dtype [M, N], reading the weight once for each 128 rows of X.

    Args:
        x: bfloat16 [M, K], contiguous.
        out_dtype: bfloat16 or float32; bfloat16 with an adapter.
        tiles: A cut to measure.
        adapter: The adapter whose product is added; the kernel directly in front makes its u.
            Captured in a graph, neither may directly follow what writes A or B.
    """
    rows, k = x.shape
    n = w.shape[0]
    out = torch.empty(rows, n, dtype=out_dtype, device=x.device)
    if not rows:
        return out
    parts, columns = parts_of(n, k)
    rank = 0 if adapter is None else adapter.up.shape[1]
    if tiles is None:
        tiles = tiles_beside(rows, n, parts, rank) if rank else tiles_for(rows, n, parts)
    block_m, rings, chains = tiles.block_rows(rows), tiles.rings(parts), tiles.chains(parts)
    each, blocks = tiles.group // chains, w.codes.shape[0] // 16
    codes = TensorDescriptor(w.codes, [blocks * 16, 32], [32, 1], [each * 16, 32], _CODES_LAYOUT)
    # A kernel takes no None: without an adapter other tensors stand for its operands.
    u, up, first_columns, ready = codes, codes, out, None
    if adapter is not None:
        u, up = adapter.descriptors(block_m, UNIT * tiles.units)
        first_columns, ready = adapter.columns, adapter.ready
    factor = w.factor.of_rows if isinstance(w.factor, RowFactors) else w.factor
    copies = 2 if adapter is None else 3  # warps
    others = rings * tiles.sides - 1  # groups of four warps behind the first
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
