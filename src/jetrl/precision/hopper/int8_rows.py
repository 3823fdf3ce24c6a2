"""INT8 GEMM for few rows on Hopper: decode, where X has up to 256 rows and the weight dominates.

One warp issues TMA loads, and four or eight warps multiply. In a captured graph, the first weight
tiles are loaded before the previous kernel has ended. Stages form ROUNDS groups of GROUP blocks of
128 along K. Each group has two barriers: `arrived`, when its data has landed, and `left`, when it
has been read. Groups amortize the drain of the tensor cores at each barrier.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jetrl.precision.hopper import MULTIPROCESSORS
from jetrl.precision.quantize import QTensor
from jetrl.precision.triton import gluon_names
from jetrl.precision.triton.int8 import tiles_matmul
from jetrl.precision.triton.launch import gluon_let_next_start, gluon_wait_for_previous, overlapped
from jetrl.precision.triton.layout import FEW_ROWS, cdiv

BLOCK_K = 128


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of a GEMM: rows of X, parts x rows of the weight, and groups of stages."""

    block_m: int
    parts: int
    block_n: int
    rounds: int
    group: int


# By the largest number of rows of X: tiles, and how many of their programs an SM holds. The
# smallest ones that run at once on all SMs are used (docs/kernels.md).
TILES = {
    64: (
        (Tiles(64, 1, 32, 8, 2), 1),
        (Tiles(64, 1, 64, 6, 2), 1),
        (Tiles(64, 1, 64, 3, 2), 2),
        (Tiles(64, 3, 64, 6, 1), 1),
    ),
    128: (
        (Tiles(64, 1, 32, 8, 2), 1),
        (Tiles(64, 1, 64, 6, 2), 1),
        (Tiles(128, 1, 64, 4, 2), 1),
        (Tiles(64, 3, 64, 6, 1), 1),
        (Tiles(128, 3, 64, 5, 1), 1),
    ),
    256: (
        (Tiles(64, 1, 64, 6, 2), 1),
        (Tiles(128, 1, 64, 4, 2), 1),
        (Tiles(64, 3, 64, 3, 2), 1),
        (Tiles(128, 3, 64, 5, 1), 1),
        (Tiles(256, 3, 64, 4, 1), 1),
    ),
}


def tiles_for(rows: int, n: int) -> Tiles:
    """Return the tiles for a GEMM with a weight of n rows; they change no bits."""
    size = next((size for size in TILES if rows <= size), max(TILES))
    choices = TILES[size]
    for tiles, held in choices:
        programs = cdiv(rows, tiles.block_m) * cdiv(n, tiles.parts * tiles.block_n)
        if programs <= held * MULTIPROCESSORS:
            return tiles
    return choices[-1][0]


@gluon.jit
def _copy(
    x_desc,
    w_desc,
    x_smem,
    w_smem,
    arrived,
    left,
    m0,
    n0,
    early,
    num_blocks,
    PARTS: gl.constexpr,
    BOX_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ROUNDS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Load operands into each stage once it has been read; blocks past K are zeros."""
    BYTES: gl.constexpr = GROUP * (x_desc.block_type.nbytes + PARTS * w_desc.block_type.nbytes)
    ahead = gl.minimum(num_blocks, ROUNDS)
    if early == 0:
        gluon_wait_for_previous()
    for group in range(ahead):
        bar = arrived.index(group)
        mbarrier.expect(bar, BYTES)
        for i in gl.static_range(GROUP):
            for part in gl.static_range(PARTS):
                gluon_names.tma_load(
                    w_desc,
                    [n0 + part * BLOCK_N, (group * GROUP + i) * 128],
                    bar,
                    w_smem.index((group * GROUP + i) * PARTS + part),
                )
    gluon_wait_for_previous()
    gluon_let_next_start()
    for group in range(ahead):
        for i in gl.static_range(GROUP):
            rows = x_smem.index(group * GROUP + i).slice(0, BOX_M, 0)
            gluon_names.tma_load(
                x_desc, [m0, (group * GROUP + i) * 128], arrived.index(group), rows
            )
    for group in range(ahead, num_blocks):
        at = group % ROUNDS
        mbarrier.wait(left.index(at), ((group // ROUNDS) & 1) ^ 1)
        bar = arrived.index(at)
        mbarrier.expect(bar, BYTES)
        for i in gl.static_range(GROUP):
            k = (group * GROUP + i) * 128
            for part in gl.static_range(PARTS):
                gluon_names.tma_load(
                    w_desc,
                    [n0 + part * BLOCK_N, k],
                    bar,
                    w_smem.index((at * GROUP + i) * PARTS + part),
                )
            rows = x_smem.index(at * GROUP + i).slice(0, BOX_M, 0)
            gluon_names.tma_load(x_desc, [m0, k], bar, rows)


@gluon.jit
def _multiply(
    x_smem,
    w_smem,
    arrived,
    left,
    x_scales_ptr,
    w_scales_ptr,
    y_ptr,
    m0,
    n0,
    M,
    N,
    num_blocks,
    PARTS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ROUNDS: gl.constexpr,
    GROUP: gl.constexpr,
    mma: gl.constexpr,
):
    """Multiply the tiles of the program over all of K, and store them."""
    sums = ()
    for _ in gl.static_range(PARTS):
        sums += (gl.zeros([BLOCK_M, BLOCK_N], gl.int32, mma),)  # type: ignore[assignment]
    for group in range(num_blocks):
        at = group % ROUNDS
        mbarrier.wait(arrived.index(at), (group // ROUNDS) & 1)
        for i in gl.static_range(GROUP):
            started = ()
            for part in gl.static_range(PARTS):
                w_part = w_smem.index((at * GROUP + i) * PARTS + part).permute((1, 0))
                x_part = x_smem.index(at * GROUP + i)
                started += (  # type: ignore[assignment]
                    warpgroup_mma(x_part, w_part, sums[part], is_async=True),
                )
            sums = started
        ended = ()
        for part in gl.static_range(PARTS):
            ended += (warpgroup_mma_wait(0, deps=[sums[part]]),)  # type: ignore[assignment]
        sums = ended
        gluon_names.barrier()  # all warps have read these stages
        mbarrier.arrive(left.index(at), count=1)
    gluon_wait_for_previous()
    rows = m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(1, mma))
    columns = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, mma))
    places = y_ptr + rows.to(gl.int64)[:, None] * N + columns[None, :]
    x_scales = gl.load(x_scales_ptr + rows, mask=rows < M, other=0.0)
    for part in gl.static_range(PARTS):
        inside = columns + part * BLOCK_N < N
        w_scales = gl.load(w_scales_ptr + columns + part * BLOCK_N, mask=inside, other=0.0)
        y = sums[part].to(gl.float32) * x_scales[:, None] * w_scales[None, :]
        mask = (rows < M)[:, None] & inside[None, :]
        gl.store(places + part * BLOCK_N, y.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["M", "early"])
def rows_kernel(
    x_desc,
    w_desc,
    x_scales_ptr,
    w_scales_ptr,
    y_ptr,
    M,
    N,
    early,
    num_blocks,
    PARTS: gl.constexpr,
    BOX_M: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ROUNDS: gl.constexpr,
    GROUP: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Multiply BLOCK_M rows of X by PARTS * BLOCK_N rows of the weight, over all of K."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_N, 32]
    )
    STAGES: gl.constexpr = ROUNDS * GROUP
    m0 = gl.program_id(0) * BLOCK_M
    n0 = gl.program_id(1) * (BLOCK_N * PARTS)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, 128], x_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES * PARTS, BLOCK_N, 128], w_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [ROUNDS, 1], mbarrier.MBarrierLayout())
    left = gl.allocate_shared_memory(gl.int64, [ROUNDS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(ROUNDS):
        mbarrier.init(arrived.index(i), count=1)
        mbarrier.init(left.index(i), count=1)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    x_smem,
                    w_smem,
                    arrived,
                    left,
                    x_scales_ptr,
                    w_scales_ptr,
                    y_ptr,
                    m0,
                    n0,
                    M,
                    N,
                    num_blocks,
                    PARTS,
                    BLOCK_M,
                    BLOCK_N,
                    ROUNDS,
                    GROUP,
                    mma,
                ),
            ),
            (
                _copy,
                (
                    x_desc,
                    w_desc,
                    x_smem,
                    w_smem,
                    arrived,
                    left,
                    m0,
                    n0,
                    early,
                    num_blocks,
                    PARTS,
                    BOX_M,
                    BLOCK_N,
                    ROUNDS,
                    GROUP,
                ),
            ),
        ],
        [1],
        [24],
    )


_CODES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


def rows_matmul(
    a: QTensor, b: QTensor, out_dtype: torch.dtype = torch.bfloat16, tiles: Tiles | None = None
) -> Tensor:
    """Return a @ b^T for few rows of a, [M, N]."""
    (rows, k), n = a.shape, b.shape[0]
    out = torch.empty(rows, n, dtype=out_dtype, device=a.codes.device)
    if not rows:
        return out
    tiles = tiles or tiles_for(rows, n)
    box = min(tiles.block_m, max(16, 1 << (rows - 1).bit_length()))
    stored = (a.codes.untyped_storage().nbytes() - a.codes.storage_offset()) // k
    warps = min(8, tiles.block_m // 16)
    rows_kernel[(cdiv(rows, tiles.block_m), cdiv(n, tiles.parts * tiles.block_n))](
        TensorDescriptor(a.codes, [stored, k], [k, 1], [box, BLOCK_K], _CODES),
        TensorDescriptor(b.codes, [n, k], [k, 1], [tiles.block_n, BLOCK_K], _CODES),
        a.scales,
        b.scales,
        out,
        rows,
        n,
        int(torch.cuda.is_current_stream_capturing()),
        cdiv(k, BLOCK_K * tiles.group),
        tiles.parts,
        box,
        tiles.block_m,
        tiles.block_n,
        tiles.rounds,
        tiles.group,
        num_warps=warps,
        maxnreg=128 if warps == 4 else 168,
        enable_fp_fusion=False,
        **overlapped(),
    )
    return out


def int8_matmul(a: QTensor, b: QTensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`precision.int8.int8_matmul`; integer sums make both kernels bitwise equal."""
    matmul = rows_matmul if a.shape[0] <= FEW_ROWS else tiles_matmul
    return matmul(a, b, out_dtype)
