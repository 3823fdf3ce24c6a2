"""`precision.gemm` in Triton, for GPUs of compute capability 8.0 and later; E4M3 from 8.9 on.

Libraries choose an algorithm, and with it the order of a sum, by the number of rows. Here tiles
have 64 rows and one loop over K, so a row has the same instructions in the same order next to any
number of other rows. The columns of a tile are free: a column does not depend on its neighbors.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.precision.quantize import FP8_BLOCK, QTensor
from jetrl.precision.triton.layout import cdiv, check_fp8_operands, whole_groups
from jetrl.precision.triton.portable_int8 import Tile, load_codes, place, pointers, within

# Few rows have narrow tiles, so that enough programs read the weight. At most 72 KB.
MANY_ROWS = Tile(rows=64, columns=128, depth=64, warps=4, stages=3)
FEW_ROWS = Tile(rows=64, columns=32, depth=64, warps=4, stages=4)
_GROUP = 8  # tile rows that share columns in L2


def tile_for(rows: int) -> Tile:
    """Return the tile of a product with `rows` rows."""
    return FEW_ROWS if rows <= FEW_ROWS.rows else MANY_ROWS


@triton.jit(do_not_specialize=["M"])
def _product_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    M,
    N,
    K,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute a tile of a @ b^T, bfloat16 a [M, K] with rows `stride` apart, and b [N, K]."""
    m, n = place(tl.program_id(0), tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS), GROUP)
    rows = m * ROWS + tl.arange(0, ROWS)
    columns = n * COLUMNS + tl.arange(0, COLUMNS)
    along = tl.arange(0, DEPTH)
    a = pointers(a_ptr, rows, along, stride)
    b = pointers(b_ptr, columns, along, K)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, K, DEPTH):
        x = load_codes(a, rows < M, K - k, EVEN)
        w = load_codes(b, columns < N, K - k, EVEN)
        sums = tl.dot(x, w.T, sums)
        a += DEPTH
        b += DEPTH
    y = sums.to(out_ptr.dtype.element_ty)
    tl.store(pointers(out_ptr, rows, columns, N), y, mask=within(rows, M, columns, N))


def bf16_matmul(a: Tensor, b: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`precision.gemm.bf16_matmul` with batch-invariant bits; a has contiguous rows, like b."""
    (rows, k), columns = a.shape, b.shape[0]
    assert (a.dtype, b.dtype, b.shape[1]) == (torch.bfloat16, torch.bfloat16, k)
    assert (a.stride(1), b.stride()) == (1, (k, 1)), f"strides {a.stride()}, {b.stride()}"
    out = torch.empty(rows, columns, dtype=out_dtype, device=a.device)
    tile = tile_for(rows)
    if out.numel():
        _product_kernel[(cdiv(rows, tile.rows) * cdiv(columns, tile.columns),)](
            a,
            b,
            out,
            rows,
            columns,
            k,
            a.stride(0),
            tile.rows,
            tile.columns,
            tile.depth,
            _GROUP,
            k % tile.depth == 0,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


@triton.jit(do_not_specialize=["M", "a_scale_row", "a_scale_block"])
def _coded_product_kernel(
    a_ptr,
    b_ptr,
    a_scales_ptr,
    b_scales_ptr,
    out_ptr,
    M,
    N,
    K,
    a_stride,
    b_stride,
    a_scale_row,
    a_scale_block,
    b_scale_row,
    b_scale_block,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute a tile of a @ b^T of E4M3 codes, a in groups of 1 x BLOCK, b of BLOCK x BLOCK.

    Codes are stored for whole groups, with zeros past K.
    """
    m, n = place(tl.program_id(0), tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS), GROUP)
    rows = m * ROWS + tl.arange(0, ROWS)
    columns = n * COLUMNS + tl.arange(0, COLUMNS)
    along = tl.arange(0, BLOCK)
    a = pointers(a_ptr, rows, along, a_stride)
    b = pointers(b_ptr, columns, along, b_stride)
    a_scales = a_scales_ptr + rows.to(tl.int64) * a_scale_row
    b_scales = b_scales_ptr + (n * COLUMNS // BLOCK).to(tl.int64) * b_scale_row
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _k in range(0, K, BLOCK):
        x = tl.load(a, mask=(rows < M)[:, None])
        w = tl.load(b, mask=(columns < N)[:, None])
        # Each block from zero; then one multiplication of the scales and one fused step.
        scales = tl.load(a_scales, mask=rows < M, other=0.0) * tl.load(b_scales)
        block = tl.dot(x, w.T)
        sums = tl.fma(block, tl.broadcast_to(scales[:, None], (ROWS, COLUMNS)), sums)
        a += BLOCK
        b += BLOCK
        a_scales += a_scale_block
        b_scales += b_scale_block
    y = sums.to(out_ptr.dtype.element_ty)
    tl.store(pointers(out_ptr, rows, columns, N), y, mask=within(rows, M, columns, N))


def fp8_matmul(a: QTensor, b: QTensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`precision.gemm.fp8_matmul` with batch-invariant bits; codes have contiguous rows."""
    (rows, k), columns = a.shape, b.shape[0]
    check_fp8_operands(a, b)
    out = torch.empty(rows, columns, dtype=out_dtype, device=a.codes.device)
    tile = tile_for(rows)
    a_codes, b_codes = whole_groups(a.codes, rows), whole_groups(b.codes, columns)
    if out.numel():
        _coded_product_kernel[(cdiv(rows, tile.rows) * cdiv(columns, tile.columns),)](
            a_codes,
            b_codes,
            a.scales,
            b.scales,
            out,
            rows,
            columns,
            k,
            a_codes.stride(0),
            b_codes.stride(0),
            a.scales.stride(0),
            a.scales.stride(1),
            b.scales.stride(0),
            b.scales.stride(1),
            tile.rows,
            tile.columns,
            FP8_BLOCK,
            _GROUP,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )
    return out
