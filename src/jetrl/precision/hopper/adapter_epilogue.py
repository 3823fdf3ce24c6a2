"""The adapter's product with B at the end of a GEMM on Hopper: y + u B^T of a tile in registers.

The tile of the layer's product is rounded to bfloat16, then the tile of u B^T, then their sum: the
bits of `precision.adapter`. The sum over the rank is one chain of tensor-core products from zero,
16 at a time. The instruction is mma.sync, which has the bits of wgmma, and whose result lies in the
registers in which wgmma has the layer's product. A warp of its own copies tiles of B, and of u when
that is there, to shared memory meanwhile.
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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jetrl.precision.hopper import gluon_names
from jetrl.precision.hopper.checks import check_tensor
from jetrl.precision.hopper.launch import gluon_wait_for_previous

LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
MOST_RANKS = 64  # of a part: what fits beside the GEMM's stages


@dataclass(frozen=True)
class AdapterOperands:
    """The adapter's product with A and its B, whose product is added to a layer's.

    Attributes:
        u: bfloat16 [T, P * R], the product with A of every part.
        up: bfloat16 [N, R], s B.
        columns: int32 [N / 64 rounded up], the first column of u for each 64 rows of y, or -1.
        ready: int32 [1], nonzero when what the kernel in front of u's wrote can be read
            (`adapter_rows.ready_word`); None: wait for u instead.
    """

    u: Tensor
    up: Tensor
    columns: Tensor
    ready: Tensor | None = None

    def check(self, rows: int, n: int) -> None:
        """Raise ValueError for tensors that do not fit a product [rows, n]."""
        check_tensor("adapter", "u", self.u, torch.bfloat16, (rows, self.u.shape[1]))
        check_tensor("adapter", "B", self.up, torch.bfloat16, (n, self.up.shape[1]))
        check_tensor("adapter", "columns", self.columns, torch.int32, (-(-n // 64),))
        if self.up.shape[1] % 16:
            raise ValueError(f"adapter: B has columns in multiples of 16, not {self.up.shape[1]}")

    def descriptors(self, box: int, block_n: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Return what describes u and B for bulk copies.

        Args:
            box: Rows of u that are copied at once.
            block_n: Rows of B that are copied at once.
        """
        (rows, width), (n, rank) = self.u.shape, self.up.shape
        return (
            TensorDescriptor(self.u, [rows, width], [self.u.stride(0), 1], [box, 16], LAYOUT),
            TensorDescriptor(self.up, [n, rank], [rank, 1], [block_n, 16], LAYOUT),
        )


@gluon.jit
def wait_for_rows(ready_ptr, SIGNALLED: gl.constexpr):
    """Wait until X can be read.

    A word from the product with A orders the bulk copies behind it too, which are not ordinary
    reads.

    Args:
        ready_ptr: int32, with SIGNALLED nonzero as soon as X can be read
            (`adapter_rows.down_rows_kernel`).
        SIGNALLED: whether a word says so; otherwise X can be read when the kernel in front has
            ended.
    """
    if SIGNALLED:
        gl.inline_asm_elementwise(
            """
            {
            .reg .pred none;
            .reg .b32 word;
            again:
            ld.acquire.gpu.global.b32 word, [$1];
            setp.eq.b32 none, word, 0;
            @none bra again;
            fence.proxy.async.global;
            mov.b32 $0, word;
            }
            """,
            "=r,l", [ready_ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        gluon_wait_for_previous()


@gluon.jit
def load_beside(
    u_desc, b_desc, columns_ptr, u_smem, b_smem, beside, m0, n0, N, early,
    PARTS: gl.constexpr, BOX_M: gl.constexpr, BLOCK_N: gl.constexpr, RANK: gl.constexpr,
):  # fmt: skip
    """Do a warp's work beside the GEMM: copy B's tiles, wait for u's kernel, and copy u's tiles.

    Args:
        u_desc: bfloat16 [M, P * R], u in boxes of [BOX_M, 16].
        b_desc: bfloat16 [N, RANK], B in boxes of [BLOCK_N, 16].
        columns_ptr: int32 [N / 64 rounded up], the first column of u for each 64 rows of B, or -1.
        u_smem: where tiles of u go: RANK / 16 for each part.
        m0: the program's first row of u.
        n0: the program's first row of B; a part lies within 64 that begin at a multiple of 64.
        early: 1 where B may be read before the kernel in front has ended.
        BOX_M: rows of u that are copied.
        BLOCK_N: columns of a tile of y.
        RANK: columns of B, a multiple of 16.
    """
    STEPS: gl.constexpr = RANK // 16
    if early == 0:
        gluon_wait_for_previous()
    bar = beside.index(0)
    mbarrier.expect(bar, PARTS * STEPS * (u_desc.block_type.nbytes + b_desc.block_type.nbytes))
    for part in gl.static_range(PARTS):
        for i in gl.static_range(STEPS):
            place = b_smem.index(part * STEPS + i)
            gluon_names.tma_load(b_desc, [n0 + part * BLOCK_N, i * 16], bar, place)
    firsts = first_columns(columns_ptr, n0, N, PARTS, BLOCK_N)
    gluon_wait_for_previous()
    for part in gl.static_range(PARTS):
        first = gl.maximum(firsts[part], 0)
        for i in gl.static_range(STEPS):
            place = u_smem.index(part * STEPS + i).slice(0, BOX_M, 0)
            gluon_names.tma_load(u_desc, [m0, first + i * 16], bar, place)


@gluon.jit
def first_columns(columns_ptr, n0, N, PARTS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return the first column of u for each of PARTS tiles of BLOCK_N columns of y, or -1.

    Args:
        columns_ptr: int32 [N / 64 rounded up], as of `load_beside`.
        n0: the first tile's first column.
        N: columns of y; past them there is no tile, and what is returned for one does not count.
    """
    firsts = ()
    for part in gl.static_range(PARTS):
        first = gl.load(columns_ptr + gl.minimum(n0 + part * BLOCK_N, N - 1) // 64)
        firsts += (first,)  # type: ignore[assignment]
    return firsts


@gluon.jit
def with_adapter(total, u_smem, b_smem, first, part: gl.constexpr, STEPS: gl.constexpr):
    """Return a tile of the layer's product with the adapter's added, bfloat16 like total.

    Args:
        total: float32 [BLOCK_M, BLOCK_N], the layer's product, in a layout of wgmma.
        u_smem: tiles of u, as of `load_beside`.
        first: the first column of u for this tile, or -1 where nothing is added.
    """
    BLOCK_M: gl.constexpr = total.shape[0]
    BLOCK_N: gl.constexpr = total.shape[1]
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=total.type.layout.warps_per_cta, instr_shape=[16, 8]
    )
    added = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, product)
    for i in gl.static_range(STEPS):
        u = u_smem.index(part * STEPS + i).load(gl.DotOperandLayout(0, product, 2))
        b = b_smem.index(part * STEPS + i).permute((1, 0)).load(gl.DotOperandLayout(1, product, 2))
        added = mma_v2(u, b, added)
    added = gl.convert_layout(added, total.type.layout, assert_trivial=True).to(gl.bfloat16)
    y = total.to(gl.bfloat16)
    both = (y.to(gl.float32) + added.to(gl.float32)).to(gl.bfloat16)
    return gl.where(first >= 0, both, y)
