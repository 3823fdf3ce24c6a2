"""`precision.gemm.bf16_matmul` on a GPU: cuBLAS, with its order of sums pinned."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from jetrl.precision.triton.layout import padded_rows, placed


def bf16_matmul(a: Tensor, b: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`precision.gemm.bf16_matmul`, exact: without split K, rows padded to 64."""
    # At few rows cuBLAS would choose other kernels, with other bits: such products run as 64 rows.
    rows, columns = a.shape
    padded = placed(a, (padded_rows(rows), columns), (columns, 1))
    with pinned_bf16_reductions():
        return bf16_matmul_free(padded, b, out_dtype)[:rows]


def bf16_matmul_free(a: Tensor, b: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a @ b^T by the library's fastest algorithm: for plans that promise no bits.

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
    """Forbid cuBLAS, within the context, to split K or to reduce in BF16.

    A row's bits would depend on the number of rows. Elsewhere the ban would cost speed.
    """
    _silence_torch_once()
    matmul, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library
    before = library()
    split_k = matmul.allow_bf16_reduced_precision_reduction_split_k
    reductions = (matmul.allow_bf16_reduced_precision_reduction, split_k)
    library("cublaslt")  # the only one that can forbid it
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        library(before)
        matmul.allow_bf16_reduced_precision_reduction = reductions


@functools.cache
def _silence_torch_once() -> None:
    """Use torch's switch of libraries once where the warning at its first use can be silenced.

    Only within an operation of autograd does the warning pass Python's filters.
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
