"""RMSNorm: y = x / sqrt(mean(x**2) + eps) * weight, row by row, rounded once to x's dtype.

The sum of squares is exact (`precision.exact`), so a row's bits do not depend on the order in which
a device adds, nor on the other rows. Source: Zhang and Sennrich, Root Mean Square Layer
Normalization (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl.precision.exact import sum_of_squares


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return RMSNorm of each row and each row's inverse rms: the specification of the kernels.

    Args:
        x: bfloat16 or float32 [..., D].
        weight: [D], of x's dtype.

    Returns:
        y like x, and 1 / rms as float32 [..., 1].
    """
    mean = sum_of_squares(x) / x.shape[-1]
    inverse_rms = (1.0 / (mean + eps).sqrt()).float()
    return (x.float() * inverse_rms * weight.float()).to(x.dtype), inverse_rms


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm over the last dimension, differentiable in x and weight.

    Args:
        x: bfloat16 or float32 [..., D].
        weight: [D], already rounded to x's dtype; the gradient passes through that rounding.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        from jetrl.kernels.norm_hopper import rms_norm as rms_norm_hopper

        return rms_norm_hopper(x, weight, eps)
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
        # The rms depends on every value of the row: its part takes out what lies along the row.
        dx = inverse_rms * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        dw = (dy * normed).flatten(0, -2).sum(0)
        return dx.to(x.dtype), dw.to(weight.dtype), None
