"""Products with a weight in NVFP4.

Products are the same sums for any number of rows, on CPU and Hopper. If W is stacked of matrices
with scales of their own, FProp multiplies by the scale of each row of W, and DGrad adds the
matrices' products. FProp's sums have the order of `gemm.bf16_matmul`, in parts of K if a weight has
few rows (`parts_of`); those of DGrad may have any. WGrad does not exist: such a weight is frozen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.precision.backend import Arithmetic, arithmetic_of
from jetrl.precision.exact import exact_matmul
from jetrl.precision.nvfp4 import NVFP4Tensor, NVFP4Weight, OrderedNVFP4, widened


def in_device_order(q: NVFP4Tensor) -> NVFP4Weight:
    """Return a weight [N, K] with its bytes in the order that its device's products read."""
    arithmetic = arithmetic_of(q.codes)
    return q if arithmetic is None else arithmetic.nvfp4_order(q)


def nvfp4_matmul(x: Tensor, w: NVFP4Weight, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return x @ w^T, [M, N], of bfloat16 [M, K] and [N, K], float32 sums rounded to `out_dtype`.

    A row depends on only that row of x and on w.
    """
    if isinstance(w, OrderedNVFP4):
        return _arithmetic(x).nvfp4_matmul(x, w, out_dtype)
    assert (x.dtype, x.shape[1]) == (torch.bfloat16, w.shape[1]), f"{x.dtype} {list(x.shape)}"
    return (exact_matmul(x, widened(w).mT).float() * w.row_scales).to(out_dtype)


def nvfp4_dgrad(dy: Tensor, w: NVFP4Weight) -> Tensor:
    """Return dX = dY @ w, bfloat16 [M, K], of dY bfloat16 [M, N]."""
    if isinstance(w, OrderedNVFP4):
        return _arithmetic(dy).nvfp4_dgrad(dy, w)
    left, wide = dy.float(), widened(w).float()
    if not w.rows:
        return (left @ wide * w.scale).bfloat16()
    parts = zip(left.split(w.rows, 1), wide.split(w.rows), w.scale, strict=True)
    return torch.stack([rows @ part * scale for rows, part, scale in parts]).sum(0).bfloat16()


def _arithmetic(x: Tensor) -> Arithmetic:
    """Return the kernels that read a weight in their order."""
    arithmetic = arithmetic_of(x)
    assert arithmetic is not None, "a weight in the kernels' order is on their device"
    return arithmetic
