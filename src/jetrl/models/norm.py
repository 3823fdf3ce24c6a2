"""The norm as a layer holds it: an FP32 master and the working copy that both sides multiply by."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jetrl.kernels.norm import rms_norm


class RMSNorm(nn.Module):
    """RMSNorm with an FP32 master weight.

    copy: the weight in the activations' dtype, overwritten in place by `requantize`; what fused
    kernels and forwards without gradient read. With gradients the reference rounds the master
    itself, to the same bits.
    """

    def __init__(self, weight: nn.Parameter, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps
        self.copy = weight.detach().to(dtype)

    def requantize(self) -> None:
        """Round the master into the working copy."""
        self.copy.copy_(self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> the same shape and dtype."""
        weight = self.weight.to(x.dtype) if torch.is_grad_enabled() else self.copy
        return rms_norm(x, weight, self.eps)
