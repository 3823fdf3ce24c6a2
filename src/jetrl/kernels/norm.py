"""RMSNorm, and sums of squares for gradient norms.

    y = x / sqrt(mean(x**2) + eps) * weight      per row, rounded once to the dtype of x

The sum of squares in RMSNorm is exact (`precision.exact`), so a row has the same bits on every
device and in every batch. Source: Zhang and Sennrich, Root Mean Square Layer Normalization
(arXiv 1910.07467).

Operation by operation, each rounded once, in float32 unless it says float64:

    inverse = float32(1 / sqrt(sum_of_squares(x) / D + eps))      float64; sqrt to nearest
    y       = (x * inverse) * weight                              rounded to the dtype of x
    n       = x * inverse                                         backward
    s       = dy * weight
    mean    = float32(exact_sum(s * n) / D)                       sum and division in float64
    dx      = inverse * (s - n * mean)                            rounded to the dtype of x
    dweight = sum_of_rows(dy * n)                                 rounded to the dtype of weight

A GPU's backward adds in float32, in the order of its kernel.

`block_squares` sums blocks of 128 rows, so sharding gradients in whole blocks leaves the gradient
norm bitwise unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.backend import kernels_of
from jetrl.precision.exact import exact_sum, square_root, sum_of_rows, sum_of_squares


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return RMSNorm and inverse rms of each row; the reference for all kernels."""
    # Divide by a tensor: for a Python number a GPU multiplies by a rounded reciprocal.
    squares = sum_of_squares(x)
    mean = squares / squares.new_tensor(x.shape[-1])
    inverse_rms = (1.0 / square_root(mean + eps)).float()
    return (x.float() * inverse_rms * weight.float()).to(x.dtype), inverse_rms


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm over the last dimension of x [..., D], differentiable in x and weight.

    Args:
        x: bfloat16 or float32.
        weight: [D], already rounded to the dtype of x; the gradient is straight-through.
    """
    if (kernels := kernels_of(x)) is not None and x.dtype == torch.bfloat16:
        return kernels.rms_norm(x, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, inverse_rms = rms_norm_ref(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        dy, normed = grads[0].float(), x.float() * inverse_rms
        scaled = dy * weight.float()
        # The rms depends on all values of the row; its gradient removes the component along x.
        sums = exact_sum(scaled * normed)[..., None]
        mean = (sums / sums.new_tensor(x.shape[-1])).float()
        dx = inverse_rms * (scaled - normed * mean)
        dw = sum_of_rows((dy * normed).flatten(0, -2))
        return dx.to(x.dtype), dw.to(weight.dtype), None


BLOCK_ROWS = 128


def block_squares(x: Tensor) -> Tensor:
    """Return sums of squares per block of 128 rows, [ceil(N / 128), P], with P terms per block.

    The references return one float64 term: `sum_of_squares` of the block's values as one row. So do
    kernels with their bits; others return several float32 terms. Takes x, float32 [N, K]; any other
    shape is one block.
    """
    if x.dim() != 2:
        x = x.reshape(1, -1)
    if (kernels := kernels_of(x)) is not None:
        return kernels.block_squares(x)
    sums = [sum_of_squares(block.reshape(1, -1)) for block in x.split(BLOCK_ROWS) if len(block)]
    return torch.cat(sums) if sums else x.new_empty((0, 1), dtype=torch.float64)
