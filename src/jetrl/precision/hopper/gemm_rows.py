"""FP8 GEMM for few rows on Hopper: decode, where X has up to 128 rows and the weight dominates.

Results are bitwise equal to the libraries' (`precision.hopper.gemm`). The tile shape changes no
bits; docs/kernels.md lists rejected variants.

Speed comes from loading the weight without gaps: a program processes 16 to 192 rows of the weight
over all of K. One warp issues TMA loads into up to 16 stages, and four or eight warps multiply. In
a captured graph, the first weight tiles are loaded before the previous kernel has ended. A stage
holds one block of 128 along K: codes and scales of X, and PARTS tiles of weight codes. Stages form
ROUNDS groups of GROUP blocks. Each group has two barriers: `arrived`, when its data has landed, and
`left`, when it has been read. Groups amortize the drain of the tensor cores at each barrier.

The product with B of an adapter is added in the epilogue (`hopper.adapter`). The kernel that
computes u needs space on the same SMs, so such a GEMM has fewer stages.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jetrl.precision.hopper import MULTIPROCESSORS, SHARED_MEMORY
from jetrl.precision.hopper.adapter import (
    AdapterOperands,
    down_program_bytes,
    first_columns,
    load_adapter,
    wait_for_rows,
    with_adapter,
)
from jetrl.precision.quantize import FP8_BLOCK, QTensor
from jetrl.precision.triton import gluon_names
from jetrl.precision.triton.launch import (
    BARRIER,
    fitting_stages,
    gluon_let_next_start,
    gluon_wait_for_previous,
    overlapped,
    remaining_bytes,
)
from jetrl.precision.triton.layout import cdiv


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and pipeline stages of a GEMM.

    Attributes:
        block_m: rows of X per program: 64 or 128.
        group: blocks of 128 along K that share a pair of barriers.
    """

    block_m: int
    parts: int
    block_n: int
    rounds: int
    group: int


# For up to 64 rows of X: the maximum rows of the weight per SM, and the tiles.
_OF_64_ROWS = (
    (16, Tiles(64, 1, 16, 4, 4)),
    (32, Tiles(64, 1, 32, 4, 4)),
    (64, Tiles(64, 1, 32, 4, 2)),
    (128, Tiles(64, 1, 64, 3, 2)),
    (192, Tiles(64, 3, 64, 6, 1)),
)
_WIDEST = Tiles(64, 2, 64, 4, 1)


def tiles_for(rows: int, n: int) -> Tiles:
    """Return the tiles for a weight with n rows, with all programs in one wave if possible."""
    if rows > 64:
        for tiles in (Tiles(128, 1, 32, 5, 2), Tiles(128, 1, 64, 4, 2), Tiles(128, 3, 32, 7, 1)):
            if cdiv(n, tiles.parts * tiles.block_n) <= MULTIPROCESSORS:
                return tiles
        return Tiles(128, 3, 64, 5, 1)
    return next((t for each, t in _OF_64_ROWS if n <= each * MULTIPROCESSORS), _WIDEST)


def fused_tiles(rows: int, n: int, rank: int) -> Tiles | None:
    """Return the tiles for a GEMM with a fused adapter, or None if a library is faster.

    They leave room for the tiles of u and B, and for a program of the GEMM with A on the same SM.
    """
    tiles = tiles_for(rows, n)
    if rows > 128:
        if rows > 256 or n > 48 * MULTIPROCESSORS:
            return None
        narrow = n <= 32 * MULTIPROCESSORS
        tiles = Tiles(128, 1, 64, 4, 2) if narrow else Tiles(128, 3, 32, 7, 1)
    block = (tiles.block_m + tiles.parts * tiles.block_n) * 128 + tiles.block_m * 4
    adapter = tiles.parts * (tiles.block_m + tiles.block_n) * rank * 2 + BARRIER
    room = remaining_bytes(SHARED_MEMORY, down_program_bytes(rows))
    stage = tiles.group * block + 2 * BARRIER
    return replace(tiles, rounds=fitting_stages(tiles.rounds, stage, adapter, room))


@gluon.jit
def _load_weights(
    w_desc,
    w_smem,
    arrived,
    group,
    n0,
    COUNT: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ROUNDS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_BYTES: gl.constexpr,
):
    """Start TMA loads of weight codes for the first COUNT blocks of a group."""
    bar = arrived.index(group % ROUNDS)
    mbarrier.expect(bar, COUNT * BLOCK_BYTES)
    for i in gl.static_range(COUNT):
        stage = (group % ROUNDS) * GROUP + i
        for part in gl.static_range(PARTS):
            gluon_names.tma_load(
                w_desc,
                [n0 + part * BLOCK_N, (group * GROUP + i) * 128],
                bar,
                w_smem.index(stage * PARTS + part),
            )


@gluon.jit
def _load_rows(
    x_desc,
    s_desc,
    x_smem,
    s_smem,
    arrived,
    group,
    m0,
    COUNT: gl.constexpr,
    BOX_M: gl.constexpr,
    ROUNDS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Start TMA loads of codes and scales of X for COUNT blocks of a group."""
    bar = arrived.index(group % ROUNDS)
    for i in gl.static_range(COUNT):
        k = group * GROUP + i
        stage = (group % ROUNDS) * GROUP + i
        rows = x_smem.index(stage).slice(0, BOX_M, 0)
        gluon_names.tma_load(x_desc, [m0, k * 128], bar, rows)
        gluon_names.tma_load(s_desc, [k, m0], bar, s_smem.index(stage))


@gluon.jit
def load_operands(
    x_desc,
    s_desc,
    w_desc,
    x_smem,
    s_smem,
    w_smem,
    arrived,
    left,
    ready_ptr,
    m0,
    n0,
    early,
    KB: gl.constexpr,
    PARTS: gl.constexpr,
    BOX_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ROUNDS: gl.constexpr,
    GROUP: gl.constexpr,
    SIGNALLED: gl.constexpr,
):
    """Load operands into each stage once it has been read (the loading warp).

    Args:
        x_desc: FP8 [M padded, K], boxes of [BOX_M, 128].
        s_desc: float32 [K / 128, M padded], scales of X, boxes of [1, BLOCK_M].
        w_desc: FP8 [N, K], boxes of [BLOCK_N, 128].
        early: 1 to read the weight before the previous kernel has ended.
    """
    BLOCK_BYTES: gl.constexpr = (
        x_desc.block_type.nbytes + s_desc.block_type.nbytes + PARTS * w_desc.block_type.nbytes
    )
    GROUPS: gl.constexpr = KB // GROUP
    AHEAD: gl.constexpr = ROUNDS if ROUNDS < GROUPS else GROUPS
    # All stages are free at first. The weight does not depend on the previous kernel; X does.
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
    # Reload the stages of a group once the multiplying warps have released them. The phase of a
    # barrier flips each round.
    for group in range(AHEAD, GROUPS):
        mbarrier.wait(left.index(group % ROUNDS), ((group // ROUNDS) & 1) ^ 1)
        _load_weights(
            w_desc, w_smem, arrived, group, n0, GROUP, PARTS, BLOCK_N, ROUNDS, GROUP, BLOCK_BYTES
        )
        _load_rows(x_desc, s_desc, x_smem, s_smem, arrived, group, m0, GROUP, BOX_M, ROUNDS, GROUP)
    # The remainder of K is a smaller group.
    if KB % GROUP:
        mbarrier.wait(
            left.index(GROUPS % ROUNDS), ((GROUPS // ROUNDS) & 1) ^ 1, pred=GROUPS >= ROUNDS
        )
        _load_weights(
            w_desc,
            w_smem,
            arrived,
            GROUPS,
            n0,
            KB % GROUP,
            PARTS,
            BLOCK_N,
            ROUNDS,
            GROUP,
            BLOCK_BYTES,
        )
        _load_rows(
            x_desc, s_desc, x_smem, s_smem, arrived, GROUPS, m0, KB % GROUP, BOX_M, ROUNDS, GROUP
        )


_CODES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_SCALES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.jit
def _multiply_group(
    x_smem,
    s_smem,
    w_smem,
    arrived,
    ws_ptr,
    ws_stride,
    group,
    n0,
    N,
    totals,
    COUNT: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ROUNDS: gl.constexpr,
    GROUP: gl.constexpr,
    mma: gl.constexpr,
):
    """Return totals with COUNT blocks of K added in order; their tensor-core products overlap."""
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, mma)
    first = (group % ROUNDS) * GROUP
    last_line = (N - 1) // 128
    # Load the weight scales from global memory before the wait, to hide their latency. A tile is
    # within one row of scales. Past N the row is clamped, and the result is not stored.
    w_scales = ()
    for i in gl.static_range(COUNT):
        for part in gl.static_range(PARTS):
            line = ws_ptr + gl.minimum((n0 + part * BLOCK_N) // 128, last_line) * ws_stride
            w_scales += (gl.load(line + group * GROUP + i),)  # type: ignore[assignment]
    mbarrier.wait(arrived.index(group % ROUNDS), (group // ROUNDS) & 1)

    # Each block accumulates from zero, so that it can be scaled separately. Start all, then wait
    # for one at a time: K in order, two to four products in flight. (An accumulator in flight
    # across the back edge of the loop would make ptxas serialize every wgmma.)
    sums = ()
    scales = ()
    for i in gl.static_range(COUNT):
        for part in gl.static_range(PARTS):
            w_part = w_smem.index((first + i) * PARTS + part)
            block = warpgroup_mma(
                x_smem.index(first + i), w_part.permute((1, 0)), zero, use_acc=False, is_async=True
            )
            sums += (block,)  # type: ignore[assignment]
        x_scale = s_smem.index(first + i).reshape([BLOCK_M]).load(gl.SliceLayout(1, mma))
        scales += (x_scale,)  # type: ignore[assignment]
    for i in gl.static_range(COUNT):
        new_totals = ()
        for part in gl.static_range(PARTS):
            # The number of products that may still be in flight.
            block = warpgroup_mma_wait(
                (COUNT - i) * PARTS - part - 1, deps=[sums[i * PARTS + part]]
            )
            scale = gl.expand_dims(scales[i] * w_scales[i * PARTS + part], 1)
            total = gl.fma(block, scale.broadcast_to(block.shape), totals[part])
            new_totals += (total,)  # type: ignore[assignment]
        totals = new_totals
    return totals


@gluon.jit
def _multiply(
    x_smem,
    s_smem,
    w_smem,
    arrived,
    left,
    ws_ptr,
    ws_stride,
    y_ptr,
    columns_ptr,
    u_smem,
    b_smem,
    beside,
    m0,
    n0,
    M,
    N,
    early,
    KB: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ROUNDS: gl.constexpr,
    GROUP: gl.constexpr,
    RANK: gl.constexpr,
    mma: gl.constexpr,
):
    """Multiply the tiles of the program over all of K, and store them (the multiplying warps)."""
    totals = ()
    for _ in gl.static_range(PARTS):
        totals += (gl.zeros([BLOCK_M, BLOCK_N], gl.float32, mma),)  # type: ignore[assignment]
    if early == 0:
        gluon_wait_for_previous()  # the previous kernel may write the weight scales
    if RANK > 0:
        firsts = first_columns(columns_ptr, n0, N, PARTS, BLOCK_N)
    for group in range(KB // GROUP):
        totals = _multiply_group(
            x_smem,
            s_smem,
            w_smem,
            arrived,
            ws_ptr,
            ws_stride,
            group,
            n0,
            N,
            totals,
            GROUP,
            PARTS,
            BLOCK_M,
            BLOCK_N,
            ROUNDS,
            GROUP,
            mma,
        )
        # The scales of X were read by ordinary loads, and a barrier alone does not order those
        # before the next TMA load (docs/kernels.md, "When a stage may be copied over").
        fence_async_shared()
        gluon_names.barrier()  # all warps have read these stages
        mbarrier.arrive(left.index(group % ROUNDS), count=1)
    if KB % GROUP:
        totals = _multiply_group(
            x_smem,
            s_smem,
            w_smem,
            arrived,
            ws_ptr,
            ws_stride,
            KB // GROUP,
            n0,
            N,
            totals,
            KB % GROUP,
            PARTS,
            BLOCK_M,
            BLOCK_N,
            ROUNDS,
            GROUP,
            mma,
        )
    # Rows past M and columns past N are arbitrary, and not stored.
    rows = m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(1, mma))
    columns = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, mma))
    places = y_ptr + rows.to(gl.int64)[:, None] * N + columns[None, :]
    if RANK > 0:
        mbarrier.wait(beside.index(0), 0)
    for part in gl.static_range(PARTS):
        in_columns = (columns + part * BLOCK_N < N)[None, :]
        if RANK > 0:
            y = with_adapter(totals[part], u_smem, b_smem, firsts[part], part, RANK // 16)
        else:
            y = totals[part].to(gl.bfloat16)
        gl.store(places + part * BLOCK_N, y, mask=(rows < M)[:, None] & in_columns)


@gluon.jit(do_not_specialize=["M", "early"])
def rows_gemm_kernel(
    x_desc,
    s_desc,
    w_desc,
    u_desc,
    b_desc,
    ws_ptr,
    y_ptr,
    columns_ptr,
    ready_ptr,
    M,
    N,
    ws_stride,
    early,
    KB: gl.constexpr,
    PARTS: gl.constexpr,
    BOX_M: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ROUNDS: gl.constexpr,
    GROUP: gl.constexpr,
    RANK: gl.constexpr,
    SIGNALLED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Multiply BLOCK_M rows of X by PARTS * BLOCK_N rows of the weight, over all of K.

    Args:
        ws_ptr: float32 [N / 128, K / 128], weight scales, with row stride ws_stride.
        y_ptr: bfloat16 [M, N], written.
        early: 1 to read the weight before the previous kernel has ended.
        RANK: rank of the adapter; 0: no adapter.
        SIGNALLED: whether a flag at `ready_ptr` tells when X is ready (`adapter.wait_for_rows`).
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_N, 32]
    )
    STAGES: gl.constexpr = ROUNDS * GROUP
    m0 = gl.program_id(0) * BLOCK_M
    n0 = gl.program_id(1) * (BLOCK_N * PARTS)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, 128], x_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES * PARTS, BLOCK_N, 128], w_desc.layout)
    s_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], s_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [ROUNDS, 1], mbarrier.MBarrierLayout())
    left = gl.allocate_shared_memory(gl.int64, [ROUNDS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(ROUNDS):
        mbarrier.init(arrived.index(i), count=1)
        mbarrier.init(left.index(i), count=1)
    # Without an adapter, its buffers are placeholders.
    COUNT: gl.constexpr = PARTS * (RANK // 16)
    u_smem = w_smem
    b_smem = w_smem
    beside = arrived
    if RANK > 0:
        u_smem = gl.allocate_shared_memory(u_desc.dtype, [COUNT, BLOCK_M, 16], u_desc.layout)
        b_smem = gl.allocate_shared_memory(b_desc.dtype, [COUNT, BLOCK_N, 16], b_desc.layout)
        beside = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(beside.index(0), count=1)
    # The multiplying warps, the loading warp, and the loading warp of the adapter, if there is one.
    COPIES: gl.constexpr = 2 if RANK > 0 else 1
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    x_smem,
                    s_smem,
                    w_smem,
                    arrived,
                    left,
                    ws_ptr,
                    ws_stride,
                    y_ptr,
                    columns_ptr,
                    u_smem,
                    b_smem,
                    beside,
                    m0,
                    n0,
                    M,
                    N,
                    early,
                    KB,
                    PARTS,
                    BLOCK_M,
                    BLOCK_N,
                    ROUNDS,
                    GROUP,
                    RANK,
                    mma,
                ),
            ),
            (
                load_operands,
                (
                    x_desc,
                    s_desc,
                    w_desc,
                    x_smem,
                    s_smem,
                    w_smem,
                    arrived,
                    left,
                    ready_ptr,
                    m0,
                    n0,
                    early,
                    KB,
                    PARTS,
                    BOX_M,
                    BLOCK_N,
                    ROUNDS,
                    GROUP,
                    SIGNALLED,
                ),
            ),
            (
                load_adapter,
                (
                    u_desc,
                    b_desc,
                    columns_ptr,
                    u_smem,
                    b_smem,
                    beside,
                    m0,
                    n0,
                    N,
                    early,
                    PARTS,
                    BOX_M,
                    BLOCK_N,
                    RANK,
                ),
            ),
        ][: 1 + COPIES],
        [1, 1][:COPIES],
        [24, 24][:COPIES],
    )


def rows_matmul(
    rows: int,
    codes: Tensor,
    scales: Tensor,
    b: QTensor,
    tiles: Tiles | None = None,
    adapter: AdapterOperands | None = None,
) -> Tensor:
    """Return codes @ b^T for the first `rows` rows, bfloat16 [rows, N].

    In a captured graph, the kernel must not directly follow the one that writes b.

    Args:
        codes: float8_e4m3fn [padded, K] contiguous, padded at least 64.
        scales: float32 [padded, K / 128] with strides (1, padded).
        b: 128 x 128 groups [N, K], with codes padded to whole groups (`layout`).
        tiles: tile sizes to benchmark; None picks the fastest.
        adapter: adapter to add; the kernel directly before this one must compute its u.
    """
    padded, k = codes.shape
    n = b.shape[0]
    assert b.codes.stride(0) >= k, f"strides {list(b.codes.stride())} of {k}"
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=codes.device)
    if not rows:
        return out
    rank = 0 if adapter is None else adapter.up.shape[1]
    if tiles is None:
        tiles = (fused_tiles(rows, n, rank) if rank else None) or tiles_for(rows, n)
    b_scales = b.scales if b.scales.stride(1) == 1 else b.scales.contiguous()
    # No more rows than X has, since a box past the end of an array is slow; at least 16.
    box = min(tiles.block_m, max(16, 1 << (rows - 1).bit_length()))
    weight = TensorDescriptor(
        b.codes, [n, k], [b.codes.stride(0), 1], [tiles.block_n, FP8_BLOCK], _CODES_LAYOUT
    )
    # A kernel cannot take None: without an adapter, other tensors are placeholders.
    u, up, columns, ready = weight, weight, out, None
    if adapter is not None:
        u, up = adapter.descriptors(box, tiles.block_n)
        columns, ready = adapter.columns, adapter.ready
    grid = (cdiv(rows, tiles.block_m), cdiv(n, tiles.parts * tiles.block_n))
    rows_gemm_kernel[grid](
        TensorDescriptor(codes, [padded, k], [k, 1], [box, FP8_BLOCK], _CODES_LAYOUT),
        TensorDescriptor(
            scales,
            [k // FP8_BLOCK, padded],
            [scales.stride(1), 1],
            [1, tiles.block_m],
            _SCALES_LAYOUT,
        ),
        weight,
        u,
        up,
        b_scales,
        out,
        columns,
        columns if ready is None else ready,
        rows,
        n,
        b_scales.stride(0),
        int(torch.cuda.is_current_stream_capturing()),
        k // FP8_BLOCK,
        tiles.parts,
        box,
        tiles.block_m,
        tiles.block_n,
        tiles.rounds,
        tiles.group,
        rank,
        ready is not None,
        num_warps=tiles.block_m // 16,
        # For all warps: the multiplying warps take over most registers of the loading ones.
        maxnreg=128 if tiles.block_m == 64 else 168,
        enable_fp_fusion=False,
        **overlapped(),
    )
    return out
