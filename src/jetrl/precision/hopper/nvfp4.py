"""`precision.nvfp4` on Hopper.

For few rows, the GEMM reads the codes (`nvfp4_rows`). For many rows, the weight is dequantized to
BF16 (exact) and multiplied by cuBLAS, which adds in the same order (tests/gpu/test_nvfp4.py). The
BF16 weight takes 3.6 times the memory of the codes and is freed after the GEMM.

Sums are multiplied by the tensor scale before they are rounded. If K has several parts, their
float32 sums are added in order first, for at most `ROWS_AT_ONCE` rows at a time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jetrl.precision.hopper.nvfp4_rows import nvfp4_rows_matmul
from jetrl.precision.nvfp4 import (
    BLOCK,
    FEW_ROWS,
    ROWS_AT_ONCE,
    SCALED_ROWS_AT_ONCE,
    UNIT,
    OrderedNVFP4,
    RowFactors,
    parts_of,
)
from jetrl.precision.triton.bf16 import pinned_bf16_reductions
from jetrl.precision.triton.layout import cdiv
from jetrl.precision.triton.nvfp4_unpack import (
    CODE_WORDS,
    SCALE_WORDS,
    step_scales,
    step_words,
    unpack_step,
)

_STORED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def widen_kernel(
    codes_ptr, scales_ptr, out_ptr, blocks, K, WORDS: gl.constexpr, SCALES: gl.constexpr
):
    """Dequantize 32 rows of 128 values to bfloat16 [N, K], without the tensor scale."""
    place = gl.program_id(0).to(gl.int64)  # blocks of a unit are consecutive
    row = gl.arange(0, 16, gl.SliceLayout(1, WORDS))
    column = gl.arange(0, 32, gl.SliceLayout(0, WORDS))
    words = gl.load(codes_ptr + place * 512 + row[:, None] * 32 + column[None, :])
    scales = gl.load(scales_ptr + place * 64 + gl.arange(0, 64, SCALES))
    words, scales = step_words(words), step_scales(scales)
    rows = gl.arange(0, 32, gl.SliceLayout(1, _STORED))
    columns = gl.arange(0, 64, gl.SliceLayout(0, _STORED))
    corner = out_ptr + (place // blocks) * 32 * K + (place % blocks) * 128
    for i in gl.static_range(2):
        # Permute [w, g, t, q1, q0, h, p] to rows and columns.
        values = gl.reshape(
            gl.permute(unpack_step(words[i], scales[i]), [0, 1, 3, 4, 5, 2, 6]), [32, 64]
        )
        values = gl.convert_layout(values, _STORED)
        gl.store(corner + rows[:, None] * K + (columns + i * 64)[None, :], values)


def widened_hopper(w: OrderedNVFP4) -> Tensor:
    """Return the values of a weight times `WIDENED_FACTOR`, bfloat16 [N, K]."""
    n, k = w.shape
    out = torch.empty(n, k, dtype=torch.bfloat16, device=w.codes.device)
    widen_kernel[(n // UNIT * (k // BLOCK),)](
        w.codes,
        w.scales,
        out,
        k // BLOCK,
        k,
        CODE_WORDS,
        SCALE_WORDS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def nvfp4_matmul_hopper(
    x: Tensor, w: OrderedNVFP4, out_dtype: torch.dtype = torch.bfloat16, widen: bool | None = None
) -> Tensor:
    """Return X @ W^T, out_dtype [M, N]; a row has the same bits at any M."""
    assert (x.dtype, x.shape[1]) == (torch.bfloat16, w.shape[1]), f"{x.dtype} {list(x.shape)}"
    x = x if x.is_contiguous() else x.contiguous()
    if not (x.shape[0] > FEW_ROWS if widen is None else widen):
        return nvfp4_rows_matmul(x, w, out_dtype)
    wide = widened_hopper(w)
    n, k = w.shape
    parts, columns = parts_of(n, k)
    factor = w.factor.of_rows if isinstance(w.factor, RowFactors) else w.factor
    with pinned_bf16_reductions():
        if parts > 1 or isinstance(factor, Tensor):
            return _product_in_parts(x, wide, factor, columns, out_dtype)
        if out_dtype == torch.float32:
            return torch.mm(x, wide.t(), out_dtype=out_dtype).mul_(factor)
        return _scaled_product(x, wide.t(), factor)


def nvfp4_dgrad_hopper(dy: Tensor, w: OrderedNVFP4) -> Tensor:
    """Return dX = dY @ W, bfloat16 [M, K]."""
    wide = widened_hopper(w)
    if not isinstance(w.factor, RowFactors):
        return _scaled_product(dy, wide, w.factor)
    out = torch.empty(dy.shape[0], w.shape[1], dtype=torch.bfloat16, device=dy.device)
    for rows, product in zip(dy.split(ROWS_AT_ONCE), out.split(ROWS_AT_ONCE), strict=True):
        sums = torch.zeros(product.shape, device=dy.device)
        for start, end, own in w.factor.ranges:
            part = torch.mm(rows[:, start:end], wide[start:end], out_dtype=torch.float32)
            sums.add_(part, alpha=own)
            del part  # free its memory for the next product
        product.copy_(sums)
    return out


def _product_in_parts(
    x: Tensor, wide: Tensor, factor: float | Tensor, columns: int, out_dtype: torch.dtype
) -> Tensor:
    """Return X @ W^T times a factor, with the sums over parts of K added in order."""
    out = torch.empty(x.shape[0], wide.shape[0], dtype=out_dtype, device=x.device)
    # Chunk rows to bound the float32 sums. Chunks have similar sizes: for a small remainder, cuBLAS
    # might choose an algorithm with a different reduction order.
    pieces = cdiv(x.shape[0], ROWS_AT_ONCE if columns < x.shape[1] else SCALED_ROWS_AT_ONCE)
    for rows, product in zip(x.chunk(pieces), out.chunk(pieces), strict=True):
        first, *others = zip(rows.split(columns, 1), wide.split(columns, 1), strict=True)
        sums = torch.mm(first[0], first[1].t(), out_dtype=torch.float32)
        for part, weight in others:
            sums += torch.mm(part, weight.t(), out_dtype=torch.float32)
        torch.mul(sums, factor, out=product)
    return out


def _scaled_product(a: Tensor, b: Tensor, factor: float) -> Tensor:
    """Return bfloat16(float32(a @ b) * factor), rounded once."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)
    # With beta = 0, `out` is not read.
    return torch.addmm(out, a, b, beta=0, alpha=factor, out=out)
