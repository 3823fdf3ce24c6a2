"""`precision.gemm` on Hopper: cuBLAS, DeepGEMM and our own kernel, with the same bits.

All use the canonical order at any number of rows: for each 128 of K, the tensor core accumulates
from zero, then one float32 multiply-add applies both scales, with K blocks in order
(tests/gpu/test_gemm.py). The one known exception is that cuBLAS may split K for few rows, so rows
are padded to 64 and to a multiple of 4.

cuBLAS is called through `torch.nn.functional.scaled_mm` (torch >= 2.11). DeepGEMM, if installed, is
faster for BF16 outputs; its kernels compile on first use. `gemm_rows` is faster still for a decode
step: up to 64 rows, or 128 for wide weights (DeepGEMM 0.1.4 takes 88 us for 96 to 128 rows by
24576 x 4096, and 44 us for 256).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from jetrl.errors import UserError
from jetrl.precision.hopper import MULTIPROCESSORS
from jetrl.precision.hopper.gemm_rows import rows_matmul
from jetrl.precision.quantize import FP8_BLOCK, QTensor
from jetrl.precision.triton.layout import (
    check_fp8_operands,
    first_rows,
    is_ragged,
    padded_rows,
    placed,
    round_up,
    whole_groups,
)

Backend = Literal["cublas", "deep_gemm", "triton"]
_FEW_ROWS = 64  # one wgmma tile: `gemm_rows` is the fastest for any weight
# DeepGEMM is slow for weights with more rows than this and 65 to 128 rows of X.
_WIDE = 128 * MULTIPROCESSORS


@functools.cache
def deep_gemm_installed() -> bool:
    return importlib.util.find_spec("deep_gemm") is not None


def backend_for(a: QTensor, b: QTensor, out_dtype: torch.dtype) -> Backend:
    """Return the default backend of `fp8_matmul_hopper`; all give the same bits."""
    # The other two write only BF16.
    if out_dtype != torch.bfloat16:
        return "cublas"
    rows, wide = a.shape[0], b.shape[0] > _WIDE
    if rows <= _FEW_ROWS or (rows <= 2 * _FEW_ROWS and (wide or not deep_gemm_installed())):
        return "triton"
    return "deep_gemm" if deep_gemm_installed() else "cublas"


def fp8_matmul_hopper(
    a: QTensor, b: QTensor, out_dtype: torch.dtype = torch.bfloat16, backend: Backend | None = None
) -> Tensor:
    """`precision.gemm.fp8_matmul` on Hopper; copies operands that have another layout."""
    check_fp8_operands(a, b)
    chosen = backend or backend_for(a, b, out_dtype)
    if is_ragged(b.shape[1]):
        b = replace(b, codes=whole_groups(b.codes, b.shape[0]))
    # The libraries need padded rows, whose results are dropped; our kernel writes only real rows.
    rows, codes, scales = row_operand(a)
    if chosen == "triton":
        return rows_matmul(rows, codes, scales, b)
    if chosen == "deep_gemm":
        return first_rows(_deep_gemm(codes, scales, b), rows)
    return first_rows(_cublas(codes, scales, b, out_dtype), rows)


def _cublas(codes: Tensor, scales: Tensor, b: QTensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply by cuBLAS, for padded codes [M, K] and scales [M, K / 128]."""
    return scaled_mm(
        codes,
        b.codes.t(),
        scales,
        ScalingType.BlockWise1x128,
        _weight_scales(b, 4).t(),  # without padding, cuBLAS silently misreads them
        ScalingType.BlockWise128x128,
        output_dtype=out_dtype,
    )


def _deep_gemm(codes: Tensor, scales: Tensor, b: QTensor) -> Tensor:
    """Multiply by DeepGEMM, bfloat16, for padded codes [M, K] and scales [M, K / 128]."""
    out = torch.empty(codes.shape[0], b.shape[0], dtype=torch.bfloat16, device=codes.device)
    weight = (b.codes, _weight_scales(b, 1))
    _load_deep_gemm().fp8_gemm_nt((codes, scales), weight, out, recipe=(1, FP8_BLOCK, FP8_BLOCK))
    return out


@functools.cache
def _load_deep_gemm() -> Any:
    """Import DeepGEMM; raise UserError if it lacks a CUDA toolkit."""
    try:
        library = importlib.import_module("deep_gemm")
        compiler = Path(library.find_cuda_home(), "bin", "nvcc")
        problem = "" if compiler.is_file() else f"there is no {compiler}"
    except (AssertionError, ImportError, OSError, RuntimeError) as error:
        problem = str(error) or "there is no CUDA toolkit"  # asserted without a message
    if problem:
        raise UserError(
            f"DeepGEMM is unusable: {problem}; set CUDA_HOME to a CUDA 13 toolkit with nvcc, or "
            "`pip uninstall sgl-deep-gemm` (cuBLAS gives the same bits, but decode is slower)"
        )
    library.set_pdl(True)  # programmatic dependent launch, as in `precision.triton.launch`
    return library


def row_operand(a: QTensor) -> tuple[int, Tensor, Tensor]:
    """Return the number of rows of a, and codes and scales padded to `padded_rows`."""
    rows, padded = a.shape[0], padded_rows(a.shape[0])
    codes = whole_groups(a.codes, padded)
    return rows, codes, placed(a.scales, (padded, a.scales.shape[1]), (1, padded))


def _weight_scales(b: QTensor, multiple: int) -> Tensor:
    """Return the scales of b [N/128, K/128] as contiguous [N/128, K/128 rounded up to multiple]."""
    # Scales of weights are stored with padding (`layout.empty_weight`); those of X in WGrad are
    # not, and are copied for cuBLAS.
    outer, blocks = b.scales.shape
    length = round_up(blocks, multiple)
    return placed(b.scales, (outer, length), (length, 1), zeros=length > blocks)
