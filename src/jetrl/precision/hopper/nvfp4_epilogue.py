"""The end of the few-row GEMM by an NVFP4 weight: the matrix's scale, an adapter, and the store.

The tile in registers is the transpose of a tile of Y, float32 [64, BLOCK_M]. Its rows are rows of
the weight in the order in which warps hold them: eight of the program's first unit of 32, then
eight of its second, for each warp. Where there is one unit, the others are zeros.

With an adapter the tile of Y is rounded to bfloat16, then that of u B^T, then their sum: the bits
of `precision.adapter`, as at the end of the FP8 GEMM (`precision.hopper.adapter_epilogue`). Here B
is the left operand, so its rows are brought into that order as they are read.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Rows and columns of a tile of B: warps have 8 rows of each unit, lanes the places of mma.sync.
_LANES, _WARPS = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]]
_ONE_UNIT = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 8]], _LANES, _WARPS, [], [32, 16]))
_TWO_UNITS = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 8], [32, 0]], _LANES, _WARPS, [], [64, 16])
)


@gluon.jit
def _rows_of_b(b_smem, UNITS: gl.constexpr, layout: gl.constexpr):
    """Return a tile of B in the order of the product's rows, bfloat16 [64, 16].

    Args:
        b_smem: bfloat16 [UNITS * 32, 16], rows as they are in B.
        UNITS: units of 32 rows, 1 or 2; the rows of a second one that is not there are zeros.
    """
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
    """Return the transpose of a tile of u B^T, float32 [64, BLOCK_M], one chain from zero.

    Args:
        u_smem: bfloat16 [sides * STEPS, BLOCK_M, 16], tiles of u.
        b_smem: bfloat16 [sides * STEPS, UNITS * 32, 16], tiles of B.
        UNITS: as of `_rows_of_b`.
        STEPS: tiles, 16 ranks each.
    """
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
        factor: float32, what sums are multiplied by; or a pointer to float32 [N], those of rows of
            the weight.
        m0: the program's first row of X.
        unit: the first unit of 32 rows of the weight of these warps.
        first: with RANK the first column of u for these rows, or -1 where nothing is added.
        u_smem: as of `_added`, with RANK.
        b_smem: as of `_added`, with RANK.
        side: as of `_added`.
        BLOCK_M: rows of X that the program has.
        RANK: columns of the adapter's B; 0: there is no adapter.
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
