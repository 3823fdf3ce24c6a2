"""`precision.gemm.bf16_matmul` on a GPU: cuBLAS with a fixed reduction order, or tiles."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from jetrl.precision.triton import float_tiles
from jetrl.precision.triton.layout import padded_rows, placed


def bf16_matmul(a: Tensor, b: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`precision.gemm.bf16_matmul` with batch-invariant bits: no split K, at least 64 rows."""
    # With cuBLAS a gate of one column had other bits in sampling (H200, torch 2.11, CUDA 13.0).
    if len(b) < float_tiles.MANY_ROWS.columns // 2:
        return float_tiles.bf16_matmul(a, b, out_dtype)
    # For few rows cuBLAS would pick other kernels with different bits, so pad to 64 rows.
    rows, columns = a.shape
    padded = placed(a, (padded_rows(rows), columns), (columns, 1))
    with pinned_bf16_reductions():
        return bf16_matmul_free(padded, b, out_dtype)[:rows]


def bf16_matmul_free(a: Tensor, b: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a @ b^T by the fastest cuBLAS algorithm, for plans that are not bitwise consistent.

    Args:
        a: bfloat16 [M, K].
        b: bfloat16 [N, K].
        out_dtype: bfloat16 or float32.
    """
    if out_dtype == torch.bfloat16:
        return torch.mm(a, b.t())
    return torch.mm(a, b.t(), out_dtype=out_dtype)


@contextlib.contextmanager
def pinned_bf16_reductions() -> Iterator[None]:
    """Disable split K and BF16 reductions of cuBLAS within the context.

    Both make the bits of a row depend on the number of rows; elsewhere they are faster.
    """
    _silence_torch_once()
    matmul, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library
    before = library()
    split_k = matmul.allow_bf16_reduced_precision_reduction_split_k
    reductions = (matmul.allow_bf16_reduced_precision_reduction, split_k)
    library("cublaslt")  # the only backend that supports these switches
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        library(before)
        matmul.allow_bf16_reduced_precision_reduction = reductions


@functools.cache
def _silence_torch_once() -> None:
    """Switch the BLAS library once, to silence the warning that torch prints at the first switch.

    The warning passes through Python's filters only inside an autograd operation.
    """

    class Switch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            before = torch.backends.cuda.preferred_blas_library()
            torch.backends.cuda.preferred_blas_library("cublaslt")
            torch.backends.cuda.preferred_blas_library(before)
            return x.clone()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Switch.apply(torch.empty(0))
