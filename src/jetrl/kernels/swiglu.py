"""SwiGLU: silu(gate) * up, computed in float32 and rounded once.

Source: Shazeer, GLU Variants Improve Transformer (arXiv 2002.05202).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.backend import Kernels, kernels_of
from jetrl.precision.exact import sigmoid


def swiglu_ref(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up; the reference for all kernels."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * sigmoid(gate) * up).to(gate_up.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [T, F], differentiable in both.

    Args:
        gate_up: bfloat16 or float32 [T, 2F], gate columns first.
    """
    return _SwiGLU.apply(gate_up)


def _kernels(gate_up: Tensor) -> Kernels | None:
    return kernels_of(gate_up) if gate_up.dtype == torch.bfloat16 else None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        kernels = _kernels(gate_up)
        return swiglu_ref(gate_up) if kernels is None else kernels.swiglu_forward(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        if (kernels := _kernels(gate_up)) is not None:
            return kernels.swiglu_backward(grads[0].to(torch.bfloat16).contiguous(), gate_up)
        gate, up = gate_up.float().chunk(2, dim=-1)
        dy, gated = grads[0].float(), sigmoid(gate)
        # d silu(g) / dg = sigmoid(g) * (1 + g * (1 - sigmoid(g)))
        dgate = dy * up * gated * (1.0 + gate * (1.0 - gated))
        return torch.cat([dgate, dy * gate * gated], dim=-1).to(gate_up.dtype)
