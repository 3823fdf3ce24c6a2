"""`precision.gemm.bf16_matmul` in Triton, for GPUs of compute capability 8.0 and later.

Libraries choose an algorithm, and with it the order of a sum, by the number of rows. Here every
product has one tile and one loop over K, so a row has the same instructions and the same bits next
to any number of other rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.precision.triton.layout import cdiv
from jetrl.precision.triton.portable_int8 import Tile, load_codes, place, pointers, within

# Never by the number of rows: the tile chooses the instruction. 72 KB of shared memory.
TILE = Tile(rows=64, columns=128, depth=64, warps=4, stages=3)
_GROUP = 8  # tile rows that share columns in L2


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
    if out.numel():
        _product_kernel[(cdiv(rows, TILE.rows) * cdiv(columns, TILE.columns),)](
            a,
            b,
            out,
            rows,
            columns,
            k,
            a.stride(0),
            TILE.rows,
            TILE.columns,
            TILE.depth,
            _GROUP,
            k % TILE.depth == 0,
            num_warps=TILE.warps,
            num_stages=TILE.stages,
        )
    return out
