"""Products with a weight in NVFP4: the same sums for any number of rows, on CPU and Hopper.

    FProp   Y [T, N]  = X  [T, K] @ W [N, K]^T      X is BF16
    DGrad   dX [T, K] = dY [T, N] @ W [N, K]        dY is BF16

W is widened to BF16, exactly, and the float32 sum is multiplied by the matrix's scale and rounded
once. If W is stacked of matrices with scales of their own, FProp multiplies by the scale of each
row of W, and DGrad adds the products of the matrices. FProp's sums have the order of
`gemm.bf16_matmul`, in parts of K if a weight has few rows (`nvfp4.parts_of`); those of DGrad may
have any. There is no WGrad: a weight in NVFP4 is never trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.precision.backend import Arithmetic, arithmetic_of
from jetrl.precision.exact import exact_matmul
from jetrl.precision.nvfp4 import HopperNVFP4, NVFP4Tensor, RowFactors, quantize_nvfp4, widened


@dataclass(frozen=True)
class NVFP4Weight:
    """A weight [N, K] in NVFP4: as checkpoints keep it, or on a GPU in the kernels' order."""

    stored: NVFP4Tensor | HopperNVFP4

    @staticmethod
    def of(weight: Tensor) -> NVFP4Weight:
        """Return a float32 or bfloat16 weight [N, K] in NVFP4, on its device."""
        return NVFP4Weight.of_codes(quantize_nvfp4(weight))

    @staticmethod
    def of_codes(quantized: NVFP4Tensor) -> NVFP4Weight:
        """Return a weight [N, K] that is in NVFP4 already, with the same codes and scales."""
        arithmetic = arithmetic_of(quantized.codes)
        return NVFP4Weight(quantized if arithmetic is None else arithmetic.nvfp4_order(quantized))

    @property
    def shape(self) -> torch.Size:
        return self.stored.shape

    @property
    def is_finite(self) -> bool:
        scale = self.stored.factor if isinstance(self.stored, HopperNVFP4) else self.stored.scale
        if isinstance(scale, RowFactors):
            scale = scale.of_rows
        return bool(torch.as_tensor(scale).isfinite().all())

    def tensors(self) -> list[Tensor]:
        return [self.stored.codes, self.stored.scales]

    def moved(self, move: Callable[[Tensor], Tensor]) -> NVFP4Weight:
        """Return the weight with its codes and scales replaced by the results of `move`."""
        codes, scales = move(self.stored.codes), move(self.stored.scales)
        return NVFP4Weight(dataclasses.replace(self.stored, codes=codes, scales=scales))


def nvfp4_matmul(x: Tensor, w: NVFP4Weight, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return x @ w^T [M, N] of x bfloat16 [M, K]; a row depends on that row of x and on w only."""
    stored = w.stored
    if isinstance(stored, HopperNVFP4):
        return _arithmetic(x).nvfp4_matmul(x, stored, out_dtype)
    assert (x.dtype, x.shape[1]) == (torch.bfloat16, w.shape[1]), f"{x.dtype} {list(x.shape)}"
    return (exact_matmul(x, widened(stored).mT).float() * stored.row_scales).to(out_dtype)


def nvfp4_dgrad(dy: Tensor, w: NVFP4Weight) -> Tensor:
    """Return dX = dY @ w, bfloat16 [M, K], of dy bfloat16 [M, N]."""
    stored = w.stored
    if isinstance(stored, HopperNVFP4):
        return _arithmetic(dy).nvfp4_dgrad(dy, stored)
    left, wide = dy.float(), widened(stored).float()
    if not stored.rows:
        return (left @ wide * stored.scale).bfloat16()
    parts = zip(left.split(stored.rows, 1), wide.split(stored.rows), stored.scale, strict=True)
    return torch.stack([rows @ part * scale for rows, part, scale in parts]).sum(0).bfloat16()


def _arithmetic(x: Tensor) -> Arithmetic:
    """Return the kernels that read a weight in their order."""
    arithmetic = arithmetic_of(x)
    assert arithmetic is not None, "a weight in the kernels' order is on their device"
    return arithmetic
