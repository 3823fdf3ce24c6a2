"""The one GEMM: Y = A @ B^T with block-scaled FP8 operands, in the canonical order.

For each block of 128 along K: the sum of code products, then one float32 multiply by the two scales
and one float32 add, K blocks in order, no split-K. FProp, DGrad and WGrad are this one function:

    FProp   Y [T, N]  = X  [T, K] (1 x 128)   @  W   [N, K] (128 x 128) ^T
    DGrad   dX [T, K] = dY [T, N] (1 x 128)   @  W^T [K, N] (128 x 128) ^T
    WGrad   dW [N, K] = dY^T [N, T] (1 x 128) @  X^T [K, T] (128 x 128) ^T

The reference is exact: a product of two E4M3 codes has 8 significant bits, and 128 of them add
without rounding in float64 in any order, so a row depends on that row and on B only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.precision.backend import arithmetic_of
from jetrl.precision.exact import exact_matmul
from jetrl.precision.int8 import int8_matmul
from jetrl.precision.quantize import FP8_BLOCK, QTensor, codes_as_float64


def fp8_matmul(a: QTensor, b: QTensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a @ b^T of FP8 operands, [M, N], float32 sums rounded to `out_dtype`.

    Args:
        a: [M, K] in groups of 1 x 128; the last group of a row may be smaller.
        b: [N, K] in groups of 128 x 128, on the CPU also of 1 x 128; the last may be smaller.
    """
    if (arithmetic := arithmetic_of(a.codes)) is not None:
        return arithmetic.fp8_matmul(a, b, out_dtype)
    assert a.shape[1] == b.shape[1], f"[M, K] and [N, K], not {a.shape} and {b.shape}"
    assert a.block == (1, FP8_BLOCK), f"groups {a.block}"
    assert b.block in ((FP8_BLOCK, FP8_BLOCK), (1, FP8_BLOCK)), f"groups {b.block}"
    a_codes, b_codes = codes_as_float64(a.codes), codes_as_float64(b.codes)
    b_scales = b.scales.repeat_interleave(b.block[0], dim=0)[: b.shape[0]]
    out = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.codes.device)
    for block in range(a.scales.shape[1]):
        k = slice(block * FP8_BLOCK, (block + 1) * FP8_BLOCK)
        partial = (a_codes[:, k] @ b_codes[:, k].mT).float()  # exact in float64
        out += partial * (a.scales[:, block, None] * b_scales[None, :, block])
    return out.to(out_dtype)


def coded_matmul(a: QTensor, b: QTensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a @ b^T of codes, [M, N]: of FP8 or INT8."""
    matmul = int8_matmul if b.codes.dtype == torch.int8 else fp8_matmul
    return matmul(a, b, out_dtype)


def bf16_matmul(
    a: Tensor, b: Tensor, out_dtype: torch.dtype = torch.bfloat16, exact: bool = True
) -> Tensor:
    """Return a @ b^T [M, N] of bfloat16 [M, K] and [N, K], batch-invariant.

    `exact` pins the order of sums. False leaves it to a GPU's library, by the number of rows.
    """
    if (arithmetic := arithmetic_of(a)) is not None:
        matmul = arithmetic.bf16_matmul if exact else arithmetic.bf16_matmul_free
        return matmul(a, b, out_dtype)
    return exact_matmul(a, b.mT).float().to(out_dtype)


def free_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in bfloat16: for gradients. A GPU adds in FP32, in any order.

    On a CPU it is exact_matmul(a, b), rounded to float32 and then to bfloat16. b [K, N] is
    bfloat16, or float32 that a device with kernels rounds to bfloat16.
    """
    if arithmetic_of(a) is None:
        return exact_matmul(a, b).float().bfloat16()
    return a @ b.bfloat16()
