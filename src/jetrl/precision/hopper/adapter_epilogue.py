"""The adapter's product with B at the end of a GEMM on Hopper: y + u B^T of a tile in registers.

The tile of the layer's product is rounded to bfloat16, then the tile of u B^T, then their sum: the
bits of `precision.adapter`. The sum over the rank is one chain of tensor-core products from zero,
16 at a time. The instruction is mma.sync, which has the bits of wgmma and takes both operands from
registers: a tile of u and one of B are a few kilobytes, which come straight from memory into the
registers in which the instruction reads them. Its result lies in the registers in which wgmma has
the layer's product.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from jetrl.precision.hopper.checks import check_tensor


@dataclass(frozen=True)
class AdapterOperands:
    """The adapter's product with A and its B, whose product is added to a layer's.

    Attributes:
        u: bfloat16 [T, P * R], the product with A of every part.
        up: bfloat16 [N, R], s B.
        columns: int32 [N / 64 rounded up], the first column of u for each 64 rows of y, or -1.
    """

    u: Tensor
    up: Tensor
    columns: Tensor

    def check(self, rows: int, n: int) -> None:
        """Raise ValueError for tensors that do not fit a product [rows, n]."""
        check_tensor("adapter", "u", self.u, torch.bfloat16, (rows, self.u.shape[1]))
        check_tensor("adapter", "B", self.up, torch.bfloat16, (n, self.up.shape[1]))
        check_tensor("adapter", "columns", self.columns, torch.int32, (-(-n // 64),))
        if self.up.shape[1] % 16:
            raise ValueError(f"adapter: B has columns in multiples of 16, not {self.up.shape[1]}")


@gluon.jit
def prefetch_rows(ptr, first, count, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Ask for rows of a matrix to be in the L2 cache; one lane of each warp that calls does.

    Args:
        ptr: the matrix, bfloat16 [count, COLUMNS], its rows multiples of 16 bytes.
        first: the first row.
        count: rows of the matrix.
        ROWS: how many rows, if there are so many.
        COLUMNS: of the matrix.
    """
    place = (ptr + first.to(gl.int64) * COLUMNS).to(gl.int64)
    size = gl.minimum(ROWS, count - first) * (2 * COLUMNS)
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred one;
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 one, lane, 0;
        @one cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }
        """,
        "=r,l,r", [place, size], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def first_columns(columns_ptr, n0, N, PARTS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return the first column of u for each of PARTS tiles of BLOCK_N columns of y, or -1.

    Args:
        columns_ptr: int32 [N / 64 rounded up], as of `AdapterOperands`.
        n0: the first tile's first column, a multiple of BLOCK_N, which divides 64.
        N: columns of y; past them there is no tile, and what is returned for one does not count.
        PARTS: how many tiles.
        BLOCK_N: columns of a tile.
    """
    firsts = ()
    for part in gl.static_range(PARTS):
        first = gl.load(columns_ptr + gl.minimum(n0 + part * BLOCK_N, N - 1) // 64)
        firsts += (first,)  # type: ignore[assignment]
    return firsts


@gluon.jit
def _add_ranks(
    added, u_ptr, b_ptr, first, m0, n0, M, N, u_stride, RANK: gl.constexpr, START: gl.constexpr
):
    """Return a tile of u B^T with the products of up to 64 ranks added, 16 at a time.

    Their loads are under way at once.

    Args:
        added: float32 [BLOCK_M, BLOCK_N], in a layout of mma.sync.
        u_ptr: as of `with_adapter`.
        b_ptr: as of `with_adapter`.
        first: as of `with_adapter`.
        m0: as of `with_adapter`.
        n0: as of `with_adapter`.
        M: as of `with_adapter`.
        N: as of `with_adapter`.
        u_stride: as of `with_adapter`.
        RANK: as of `with_adapter`.
        START: the first rank.
    """
    COUNT: gl.constexpr = (RANK - START if RANK - START < 64 else 64) // 16
    left: gl.constexpr = gl.DotOperandLayout(0, added.type.layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, added.type.layout, 2)
    rows = m0 + gl.arange(0, added.shape[0], gl.SliceLayout(1, left))
    columns = n0 + gl.arange(0, added.shape[1], gl.SliceLayout(0, right))
    # A multiple of 16, which the compiler is shown: two values of a row are one load.
    start = gl.maximum(first, 0) // 16 * 16
    u_places = rows[:, None] * u_stride + gl.arange(0, 16, gl.SliceLayout(0, left))[None, :]
    b_places = columns[None, :] * RANK + gl.arange(0, 16, gl.SliceLayout(1, right))[:, None]
    us = ()
    bs = ()
    for i in gl.static_range(COUNT):
        u = gl.load(
            u_ptr + (start + START + i * 16) + u_places, mask=(rows < M)[:, None], other=0.0
        )
        us += (u,)  # type: ignore[assignment]
        b = gl.load(b_ptr + (START + i * 16) + b_places, mask=(columns < N)[None, :], other=0.0)
        bs += (b,)  # type: ignore[assignment]
    for i in gl.static_range(COUNT):
        added = mma_v2(us[i], bs[i], added)
    return added


@gluon.jit
def with_adapter(total, u_ptr, b_ptr, first, m0, n0, M, N, u_stride, RANK: gl.constexpr):
    """Return a tile of the layer's product with the adapter's added, bfloat16 like total.

    Args:
        total: float32 [BLOCK_M, BLOCK_N], the layer's product, in a layout of wgmma.
        u_ptr: bfloat16 [M, u_stride].
        b_ptr: bfloat16 [N, RANK].
        first: the first column of u for this tile, or -1 where nothing is added.
        m0: the tile's first row.
        n0: the tile's first column.
        M: rows of y.
        N: columns of y.
        u_stride: columns of u.
        RANK: columns of B, a multiple of 16.
    """
    BLOCK_M: gl.constexpr = total.shape[0]
    BLOCK_N: gl.constexpr = total.shape[1]
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=total.type.layout.warps_per_cta, instr_shape=[16, 8]
    )
    added = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, product)
    for rank in gl.static_range(0, RANK, 64):
        added = _add_ranks(added, u_ptr, b_ptr, first, m0, n0, M, N, u_stride, RANK, rank)
    added = gl.convert_layout(added, total.type.layout, assert_trivial=True).to(gl.bfloat16)
    y = total.to(gl.bfloat16)
    both = (y.to(gl.float32) + added.to(gl.float32)).to(gl.bfloat16)
    return gl.where(first >= 0, both, y)
