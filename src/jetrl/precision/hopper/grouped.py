"""Products of experts on Hopper, for many rows per expert: `triton.grouped_int8`, `grouped_fp8`.

A program multiplies tiles of 128 rows of one expert by 256 columns. A warp copies codes by TMA into
four stages of shared memory, or four warps copy rows by token. Two warpgroups multiply 128 columns
each, and store by TMA what lies in one expert; they share only the stages, so one can multiply
while the other stores. The bits are those of the kernels in Triton, which take few rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jetrl.precision.groups import Groups
from jetrl.precision.quantize import QTensor
from jetrl.precision.triton import gluon_names, grouped_fp8, grouped_int8
from jetrl.precision.triton.grouped_fp8 import Matrices
from jetrl.precision.triton.grouped_int8 import SIDE, blocks_of_rows, has_few_rows, most_tiles
from jetrl.precision.triton.launch import multiprocessors
from jetrl.precision.triton.layout import cdiv
from jetrl.precision.triton.portable_int8 import place

_STAGES = 4
_TILE = gl.constexpr(128)  # rows, codes along K, and the columns of a warpgroup
_COLUMNS = gl.constexpr(256)
_SIDE = gl.constexpr(SIDE)
_SUMS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
)
_CODES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_OUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_place = gluon.jit(place.fn)


class _Ring(NamedTuple):
    """Stages of codes [_STAGES, 128 or 256, 128], and their barriers [_STAGES, 1]."""

    x: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor
    arrived: gl.shared_memory_descriptor
    left: gl.shared_memory_descriptor


class _Work(NamedTuple):
    """The table of `blocks_of_rows`, its blocks of 128 rows, and the tiles across an expert."""

    table: gl.tensor
    down: gl.tensor
    across: gl.tensor


@gluon.jit
def _tile_of(work, item):
    """Return the expert, first row, end of rows and first column of a tile; 0 after the last."""
    inside = item < work.down * work.across
    block, n = _place(gl.where(inside, item, 0), work.down, work.across, _SIDE)
    expert = gl.load(work.table + block, mask=inside, other=0)
    first = gl.load(work.table + work.down + block, mask=inside, other=0)
    end = gl.load(work.table + 2 * work.down + block, mask=inside, other=0)
    return expert, first, end, n * _COLUMNS


@gluon.jit
def _copy(
    x_desc,
    w_desc,
    x_ptr,
    tokens_ptr,
    work,
    ring,
    width,
    x_stride,
    w_expert_row,
    w_expert_column,
    BY_TOKEN: gl.constexpr,
):
    """Copy the codes of all tiles of the program as stages become free."""
    STAGES: gl.constexpr = ring.x.shape[0]
    ROWS: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    step = 0
    expert, first, end, n = _tile_of(work, gl.program_id(0))
    for item in range(gl.program_id(0), work.down * work.across, gl.num_programs(0)):
        following = _tile_of(work, item + gl.num_programs(0))
        if first < end:
            if BY_TOKEN:
                rows = first + gl.arange(0, _TILE, gl.SliceLayout(1, ROWS))
                columns = gl.arange(0, _TILE, gl.SliceLayout(0, ROWS))
                # Past the end, the last row is read again.
                sources = gl.load(tokens_ptr + gl.minimum(rows, end - 1)).to(gl.int64)
                places = x_ptr + sources[:, None] * x_stride + columns[None, :]
            for k in range(0, width, _TILE):
                stage = step % STAGES
                mbarrier.wait(ring.left.index(stage), ((step // STAGES) & 1) ^ 1)
                bar = ring.arrived.index(stage)
                at = [expert * w_expert_row + n, expert * w_expert_column + k]
                if BY_TOKEN:
                    mbarrier.expect(bar, w_desc.block_type.nbytes)
                    mask = (rows >= first)[:, None] & (columns < width - k)[None, :]  # all rows
                    gluon_names.async_load(ring.x.index(stage), places + k, mask=mask)
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                else:
                    mbarrier.expect(bar, x_desc.block_type.nbytes + w_desc.block_type.nbytes)
                    gluon_names.tma_load(x_desc, [first, k], bar, ring.x.index(stage))
                gluon_names.tma_load(w_desc, at, bar, ring.w.index(stage))
                step += 1
        expert, first, end, n = following


@gluon.jit
def _wait_for_stage(ring, step, BY_TOKEN: gl.constexpr):
    """Wait until the codes of a step have arrived; return their stage."""
    STAGES: gl.constexpr = ring.x.shape[0]
    mbarrier.wait(ring.arrived.index(step % STAGES), (step // STAGES) & 1)
    if BY_TOKEN:
        fence_async_shared()  # the tensor core sees copies of threads only after this
    return step % STAGES


@gluon.jit
def _leave_stage(ring, step):
    """Give the stage of a step back, once all warps have read it."""
    STAGES: gl.constexpr = ring.x.shape[0]
    gluon_names.barrier()
    mbarrier.arrive(ring.left.index(step % STAGES), count=1)


@gluon.jit
def _half_product(ring, stage, half: gl.constexpr, part: gl.constexpr, sums, use_acc):
    """Start the product of 64 rows and 128 columns of a stage."""
    rows = ring.x.index(stage).slice(half * 64, 64, 0)
    columns = ring.w.index(stage).slice(part * _TILE, _TILE, 0).permute((1, 0))
    return warpgroup_mma(rows, columns, sums, use_acc=use_acc, is_async=True)


@gluon.jit
def _store_half(y, out_desc, out_ptr, out_smem, top, end, n, N):
    """Store bfloat16 [64, 128] from row `top` and column n on, without rows past the end."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    tma.store_wait(0)
    gluon_names.barrier()
    out_smem.store(y)
    fence_async_shared()
    gluon_names.barrier()
    if top + 64 <= end:
        gluon_names.tma_store(out_desc, [top, n], out_smem)
    else:
        rows = top + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
        columns = n + gl.arange(0, _TILE, gl.SliceLayout(0, WIDE))
        places = out_ptr + rows.to(gl.int64)[:, None] * N + columns[None, :]
        mask = (rows < end)[:, None] & (columns < N)[None, :]
        gl.store(places, out_smem.load(WIDE), mask=mask)


@gluon.jit
def _sources(tokens_ptr, top, end, BY_TOKEN: gl.constexpr):
    """Return the rows of X of 64 sorted rows; past the end, the last one again."""
    rows = gl.minimum(top + gl.arange(0, 64, gl.SliceLayout(1, _SUMS)), end - 1)
    if BY_TOKEN:
        rows = gl.load(tokens_ptr + rows)
    return rows


@gluon.jit
def _int8_sums(
    part: gl.constexpr, ring, step, x_scales_ptr, w_scales_ptr, tokens_ptr, expert, first, end, n,
    N, width, BY_TOKEN: gl.constexpr,
):  # fmt: skip
    """Multiply INT8 codes over all of K, and scale the sums: two halves [64, 128]."""
    columns = n + gl.arange(0, _TILE, gl.SliceLayout(0, _SUMS))
    w_scales = w_scales_ptr + expert.to(gl.int64) * N + columns
    t = gl.load(w_scales, mask=columns < N, other=0.0)[None, :]
    r = gl.load(x_scales_ptr + _sources(tokens_ptr, first, end, BY_TOKEN))[:, None]
    s = gl.load(x_scales_ptr + _sources(tokens_ptr, first + 64, end, BY_TOKEN))[:, None]
    upper = gl.zeros([64, _TILE], gl.int32, _SUMS)
    lower = upper
    for k in range(0, width, _TILE):
        stage = _wait_for_stage(ring, step, BY_TOKEN)
        upper_started = _half_product(ring, stage, 0, part, upper, k > 0)
        lower_started = _half_product(ring, stage, 1, part, lower, k > 0)
        upper = warpgroup_mma_wait(2, deps=[upper_started])
        lower = warpgroup_mma_wait(2, deps=[lower_started])
        if k > 0:
            _leave_stage(ring, step - 1)
        step += 1
    upper = warpgroup_mma_wait(0, deps=[upper])
    lower = warpgroup_mma_wait(0, deps=[lower])
    _leave_stage(ring, step - 1)
    return step, upper.to(gl.float32) * r * t, lower.to(gl.float32) * s * t


@gluon.jit
def _fp8_sums(
    part: gl.constexpr, ring, step, x_scales_ptr, w_scales_ptr, tokens_ptr, expert, first, end, n,
    N, width, x_scale_block, w_scale_row, w_scale_block, w_scale_expert,
    BY_TOKEN: gl.constexpr,
):  # fmt: skip
    """Sum E4M3 blocks of 128 from zero, and add each with its scales by one fma: two halves."""
    w_scales = w_scales_ptr + expert.to(gl.int64) * w_scale_expert
    w_scales += gl.where(n < N, n // _TILE, 0).to(gl.int64) * w_scale_row
    upper_scales = x_scales_ptr + _sources(tokens_ptr, first, end, BY_TOKEN)
    lower_scales = x_scales_ptr + _sources(tokens_ptr, first + 64, end, BY_TOKEN)
    # Scales are loaded one block ahead.
    t, r, s = gl.load(w_scales), gl.load(upper_scales), gl.load(lower_scales)
    zeros = gl.zeros([64, _TILE], gl.float32, _SUMS)
    upper, lower = zeros, zeros
    for k in range(0, width, _TILE):
        upper_factor, lower_factor = r * t, s * t
        block = gl.where(k + _TILE < width, k // _TILE + 1, 0)
        t = gl.load(w_scales + block * w_scale_block)
        r = gl.load(upper_scales + block * x_scale_block)
        s = gl.load(lower_scales + block * x_scale_block)
        stage = _wait_for_stage(ring, step, BY_TOKEN)
        started = _half_product(ring, stage, 0, part, zeros, False)
        upper = _scaled_sum(upper, warpgroup_mma_wait(0, deps=[started]), upper_factor)
        started = _half_product(ring, stage, 1, part, zeros, False)
        product = warpgroup_mma_wait(0, deps=[started])
        _leave_stage(ring, step)
        lower = _scaled_sum(lower, product, lower_factor)
        step += 1
    return step, upper, lower


@gluon.jit
def _scaled_sum(sums, product, factor):
    factor, product = gl.broadcast(factor[:, None], product)
    return gl.fma(product, factor, sums)


@gluon.jit
def _multiply(
    part: gl.constexpr, out_desc, out_ptr, x_scales_ptr, w_scales_ptr, tokens_ptr, work, ring,
    out_smem, N, width, x_scale_block, w_scale_row, w_scale_block, w_scale_expert,
    BY_TOKEN: gl.constexpr,
):  # fmt: skip
    """Multiply and store one half of the columns of all tiles of the program."""
    step = 0
    expert, first, end, n = _tile_of(work, gl.program_id(0))
    for item in range(gl.program_id(0), work.down * work.across, gl.num_programs(0)):
        following = _tile_of(work, item + gl.num_programs(0))
        if first < end:
            n += part * _TILE
            if ring.x.dtype == gl.int8:
                step, upper, lower = _int8_sums(
                    part, ring, step, x_scales_ptr, w_scales_ptr, tokens_ptr, expert, first, end,
                    n, N, width, BY_TOKEN,
                )  # fmt: skip
            else:
                step, upper, lower = _fp8_sums(
                    part, ring, step, x_scales_ptr, w_scales_ptr, tokens_ptr, expert, first, end,
                    n, N, width, x_scale_block, w_scale_row, w_scale_block, w_scale_expert,
                    BY_TOKEN,
                )  # fmt: skip
            _store_half(upper.to(gl.bfloat16), out_desc, out_ptr, out_smem, first, end, n, N)
            _store_half(lower.to(gl.bfloat16), out_desc, out_ptr, out_smem, first + 64, end, n, N)
        expert, first, end, n = following
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["down", "across"])
def grouped_kernel(
    x_desc,
    w_desc,
    out_desc,
    x_ptr,
    out_ptr,
    x_scales_ptr,
    w_scales_ptr,
    tokens_ptr,
    table_ptr,
    N,
    width,
    down,
    across,
    x_stride,
    w_expert_row,
    w_expert_column,
    x_scale_block,
    w_scale_row,
    w_scale_block,
    w_scale_expert,
    BY_TOKEN: gl.constexpr,
    STAGES: gl.constexpr,
    COPY_WARPS: gl.constexpr,
):
    """Compute the tiles of all experts; codes are [rows, width], in boxes of 128 columns.

    The block of an expert begins at row expert * w_expert_row and column expert * w_expert_column
    of the weight's codes. Other strides are those of `grouped_fp8`.
    """
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, _TILE, _TILE], x_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES, _COLUMNS, _TILE], w_desc.layout)
    out_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, _TILE], out_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    left = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        # A stage has arrived with its TMA copies, and with the copies of each copying thread.
        mbarrier.init(arrived.index(i), count=1 + (COPY_WARPS * 32 if BY_TOKEN else 0))
        mbarrier.init(left.index(i), count=2)
    fence_async_shared()
    gluon_names.barrier()
    ring = _Ring(x_smem, w_smem, arrived, left)
    work = _Work(table_ptr, down, across)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    0,
                    out_desc,
                    out_ptr,
                    x_scales_ptr,
                    w_scales_ptr,
                    tokens_ptr,
                    work,
                    ring,
                    out_smem.index(0),
                    N,
                    width,
                    x_scale_block,
                    w_scale_row,
                    w_scale_block,
                    w_scale_expert,
                    BY_TOKEN,
                ),
            ),
            (
                _multiply,
                (
                    1,
                    out_desc,
                    out_ptr,
                    x_scales_ptr,
                    w_scales_ptr,
                    tokens_ptr,
                    work,
                    ring,
                    out_smem.index(1),
                    N,
                    width,
                    x_scale_block,
                    w_scale_row,
                    w_scale_block,
                    w_scale_expert,
                    BY_TOKEN,
                ),
            ),
            (
                _copy,
                (
                    x_desc,
                    w_desc,
                    x_ptr,
                    tokens_ptr,
                    work,
                    ring,
                    width,
                    x_stride,
                    w_expert_row,
                    w_expert_column,
                    BY_TOKEN,
                ),
            ),
        ],
        [4, COPY_WARPS],
        [216, 56],
    )


@dataclass(frozen=True)
class _Operands:
    """Codes of X [rows, K] and of the weight, both along K, with scales.

    Attributes:
        row_step, column_step: From the codes of an expert's matrix to those of the next.
        x_scale_block, w_scale_row, w_scale_block, w_scale_expert: Strides of the scales of E4M3.
    """

    x: Tensor
    w: Tensor
    x_scales: Tensor
    w_scales: Tensor
    row_step: int
    column_step: int = 0
    x_scale_block: int = 0
    w_scale_row: int = 0
    w_scale_block: int = 0
    w_scale_expert: int = 0


def int8_grouped_matmul(
    x: QTensor, w: QTensor, groups: Groups, by_token: bool, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """`triton.grouped_int8.int8_grouped_matmul`."""
    columns = w.shape[0] // groups.num_experts
    if out_dtype == torch.bfloat16 and _takes(groups, columns):
        return int8_product(x, w, groups, by_token)
    return grouped_int8.int8_grouped_matmul(x, w, groups, by_token, out_dtype)


def fp8_grouped_matmul(x: QTensor, w: QTensor, groups: Groups, by_token: bool) -> Tensor:
    """`triton.grouped_fp8.fp8_grouped_matmul`."""
    matrices = grouped_fp8.stacked_matrices(w, groups.num_experts)
    matmul = fp8_product if _takes(groups, matrices.rows) else grouped_fp8.product
    return matmul(x, matrices, groups, by_token)


def fp8_grouped_dgrad(dy: QTensor, w: QTensor, groups: Groups) -> Tensor:
    """`triton.grouped_fp8.fp8_grouped_dgrad`."""
    matrices = grouped_fp8.turned_matrices(w, groups.num_experts)
    matmul = fp8_product if _takes(groups, matrices.rows) else grouped_fp8.product
    return matmul(dy, matrices, groups, False)


def _takes(groups: Groups, columns: int) -> bool:
    """Return whether products with this number of columns are for the kernel of this module."""
    rows = len(groups.tokens)
    # TMA writes rows of a multiple of 16 bytes.
    return rows > 0 and columns % 8 == 0 and not has_few_rows(rows, groups.num_experts)


def int8_product(x: QTensor, w: QTensor, groups: Groups, by_token: bool) -> Tensor:
    """Return Y, bfloat16 [R, N], by this module's kernel, N a multiple of 8."""
    columns, k = w.shape[0] // groups.num_experts, w.shape[1]
    assert x.codes.stride() == w.codes.stride() == (k, 1), "codes with K contiguous"
    operands = _Operands(x.codes, w.codes, x.scales, w.scales, row_step=columns)
    return _product(operands, groups, by_token, columns)


def fp8_product(x: QTensor, matrices: Matrices, groups: Groups, by_token: bool) -> Tensor:
    """`triton.grouped_fp8.product` by this module's kernel, N a multiple of 8."""
    a, w = grouped_fp8.rows_of(x, groups, by_token), matrices.weight
    w_scale_row, w_scale_block = w.scales.stride()
    operands = _Operands(
        a.codes,
        w.codes,
        a.scales,
        w.scales,
        row_step=matrices.row_step,
        column_step=matrices.column_step,
        x_scale_block=a.scales.stride(1),
        w_scale_row=w_scale_row,
        w_scale_block=w_scale_block,
        w_scale_expert=grouped_fp8.scale_step(matrices),
    )
    return _product(operands, groups, by_token, matrices.rows)


def _product(operands: _Operands, groups: Groups, by_token: bool, columns: int) -> Tensor:
    x, rows = operands.x, len(groups.tokens)
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=x.device)
    down, across = most_tiles(rows, groups.num_experts, 128), cdiv(columns, 256)
    programs = min(multiprocessors(x.device), down * across)
    if not rows:
        return out
    grouped_kernel[(programs,)](
        _boxes(x, [128, 128], _CODES),
        _boxes(operands.w, [256, 128], _CODES),
        _boxes(out, [64, 128], _OUT),
        x,
        out,
        operands.x_scales,
        operands.w_scales,
        groups.tokens,
        blocks_of_rows(groups, down),
        columns,
        x.shape[1],
        down,
        across,
        x.stride(0),
        operands.row_step,
        operands.column_step,
        operands.x_scale_block,
        operands.w_scale_row,
        operands.w_scale_block,
        operands.w_scale_expert,
        by_token,
        _STAGES,
        4 if by_token else 1,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def _boxes(x: Tensor, box: list[int], layout: Any) -> TensorDescriptor:
    """Return a matrix as TMA copies it."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)
