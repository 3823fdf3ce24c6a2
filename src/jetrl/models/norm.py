"""RMSNorm as a layer holds it: an FP32 master weight, rounded to what both sides multiply by."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jetrl.kernels.norm import rms_norm
from jetrl.precision.quantized_weight import QuantizedWeight


class RMSNorm(nn.Module):
    """RMSNorm with an FP32 master weight.

    Fused kernels and forwards without gradient read the rounded weight. With gradients the
    reference rounds the master weight itself, to the same bits, so that autograd reaches it.

    Args:
        quantized: The weight [D], in the activations' dtype on both sides.
    """

    def __init__(self, quantized: QuantizedWeight, eps: float) -> None:
        super().__init__()
        self.quantized, self.weight, self.eps = quantized, quantized.master, eps

    @property
    def rounded(self) -> Tensor:
        """The weight [D] in the activations' dtype."""
        weight = self.quantized.operand("train")
        assert isinstance(weight, Tensor), "a norm's weight is never FP8"
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., D], with the same shape and dtype."""
        if not torch.is_grad_enabled():
            return rms_norm(x, self.rounded, self.eps)
        noise = self.quantized.noise
        weight = self.weight if noise is None else self.weight + noise
        return rms_norm(x, weight.to(x.dtype), self.eps)
