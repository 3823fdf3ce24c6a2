"""FP8 and NVFP4 linear layers with LoRA adapters on Hopper.

For few rows, the GEMM of the layer overlaps with the GEMM with A and adds the product with B in its
epilogue. Library GEMMs do not support adapters, so a separate pass over y follows. Both forms give
the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from jetrl.precision.hopper.adapter import (
    MOST_RANKS,
    MOST_ROWS,
    AdapterOperands,
    project_down_hopper,
    project_down_quantize,
    project_down_rows,
    ready_word,
)
from jetrl.precision.hopper.gemm import fp8_matmul_hopper, row_operand
from jetrl.precision.hopper.gemm_rows import fused_tiles, rows_matmul
from jetrl.precision.hopper.nvfp4 import nvfp4_matmul_hopper
from jetrl.precision.hopper.nvfp4_rows import nvfp4_rows_matmul
from jetrl.precision.nvfp4 import OrderedNVFP4
from jetrl.precision.quantize import QTensor
from jetrl.precision.triton.adapter import project_up
from jetrl.precision.triton.quantize import quantize_rows

if TYPE_CHECKING:
    from jetrl.precision.adapter_weight import AdapterWeight

Form = Literal["fused", "passes"]
NVFP4_FUSED_ROWS = 128  # up to this many rows of X, the NVFP4 GEMM fuses the adapter


def form_for(rows: int, n: int, rank: int) -> Form:
    """Return the faster form for a GEMM with an adapter and a weight with n rows."""
    fits = rank <= MOST_RANKS and fused_tiles(rows, n, rank) is not None
    return "fused" if fits else "passes"


def _project_down_signaled(x: Tensor, adapter: AdapterWeight) -> tuple[Tensor, AdapterOperands]:
    """Launch the GEMM with A, which signals the next kernel when X is ready."""
    u = project_down_rows(x, adapter.down, adapter.arrived, signal=True)
    return u, AdapterOperands(u, adapter.up, adapter.columns, ready_word(adapter.arrived))


def adapted_matmul(
    a: QTensor, values: Tensor, b: QTensor, adapter: AdapterWeight, form: Form | None = None
) -> tuple[Tensor, Tensor]:
    """Return a @ b^T plus the adapter product, bfloat16 [T, N], and u, bfloat16 [T, P * R].

    Args:
        values: bfloat16 [T, K], the unquantized values of a.
        form: implementation to use; None picks the faster one.
    """
    n, rank = adapter.up.shape
    if (form or form_for(len(values), n, rank)) == "fused":
        u, operands = _project_down_signaled(values, adapter)
        rows, codes, scales = row_operand(a)
        return rows_matmul(rows, codes, scales, b, adapter=operands), u
    u = project_down_hopper(values, adapter.down, adapter.arrived)
    return project_up(fp8_matmul_hopper(a, b), u, adapter.up, adapter.columns), u


def quantized_adapted_matmul(
    x: Tensor, b: QTensor, adapter: AdapterWeight, scales: str
) -> tuple[Tensor, Tensor]:
    """Return quantize(x) @ b^T plus the adapter product, and u = x A^T.

    Args:
        x: bfloat16 [T, K], each row contiguous.
        scales: "fp32" or "pow2" scales of the quantizer.

    Returns:
        bfloat16 [T, N] and bfloat16 [T, P * R].
    """
    if len(x) >= MOST_ROWS:
        return adapted_matmul(quantize_rows(x, "e4m3", scales), x, b, adapter)
    u, a = project_down_quantize(x, adapter.down, adapter.arrived, scales)
    n, rank = adapter.up.shape
    if form_for(len(x), n, rank) == "fused":
        operands = AdapterOperands(u, adapter.up, adapter.columns)
        rows, codes, a_scales = row_operand(a)
        return rows_matmul(rows, codes, a_scales, b, adapter=operands), u
    return project_up(fp8_matmul_hopper(a, b), u, adapter.up, adapter.columns), u


def nvfp4_adapted_matmul(
    x: Tensor, w: OrderedNVFP4, adapter: AdapterWeight, form: Form | None = None
) -> tuple[Tensor, Tensor]:
    """Return x @ w^T plus the adapter product, and u, for x bfloat16 [T, K]."""
    x = x if x.is_contiguous() else x.contiguous()
    fits = len(x) <= NVFP4_FUSED_ROWS and adapter.up.shape[1] <= MOST_RANKS
    if form == "fused" or (form is None and fits):
        u, operands = _project_down_signaled(x, adapter)
        return nvfp4_rows_matmul(x, w, adapter=operands), u
    u = project_down_hopper(x, adapter.down, adapter.arrived)
    return project_up(nvfp4_matmul_hopper(x, w), u, adapter.up, adapter.columns), u
