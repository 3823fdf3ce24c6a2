"""A norm and the linear layer after it on a GPU, each one autograd function, so that codes flow.

They compose the operations that `models.attention` and `models.decoder` name, with the same bits in
the forward (tests/gpu/test_flow.py). The norm writes the codes that FProp reads, so its BF16 result
is neither written nor read. For WGrad nothing is kept: backward makes the norm's codes again from
the residual stream, and the residual's gradient joins inside the norm's. Layers kept in BF16 use
the same functions with BF16 instead of codes; they keep FProp's input, which had to be written
anyway.

With adapters the norm writes its BF16 values next to the codes, in the same pass. The base is
frozen, so backward has no WGrad and quantizes dY for DGrad only; the adapters' own gradients come
from values that backward makes again.

Legend: T tokens, D hidden size, N output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.backend import Kernels, device_kernels
from jetrl.models.layer import RMSNorm, Trace, tell
from jetrl.precision.adapter import adapter_gradients
from jetrl.precision.adapter_weight import AdapterWeight
from jetrl.precision.formats import GEMMInput, StoredWeight, format_of
from jetrl.precision.gradients import Gradients
from jetrl.precision.linear import (
    Linear,
    adapted_fprop,
    dgrad,
    fprop,
    quantize_for_dgrad,
    quantize_for_wgrad,
    quantize_output_gradient,
    wgrad,
)
from jetrl.precision.plan import PrecisionPlan, Side

NONE = torch.empty(0)  # instead of a tensor that a layer without an adapter does not have


@dataclass(frozen=True)
class FusedLinear:
    """A linear layer as one call on a side reads it; with an adapter its weight is frozen."""

    weight: StoredWeight
    bias: Tensor | None
    adapter: AdapterWeight | None
    plan: PrecisionPlan

    @staticmethod
    def of(linear: Linear, side: Side) -> FusedLinear:
        bias = None if linear.bias is None else linear.bias.detach()
        return FusedLinear(linear.operand(side), bias, linear.adapter, linear.plan.on(side))

    @property
    def masters(self) -> tuple[Tensor | None, Tensor | None]:
        """The adapter's master weights, which are inputs only for their gradients."""
        return (None, None) if self.adapter is None else (self.adapter.a, self.adapter.b)

    def forward(self, entered: GEMMInput, values: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the layer's output, and the adapter's product with A; `values` is X in BF16."""
        if self.adapter is not None:
            assert values is not None, "an adapter reads values"
            return adapted_fprop(entered, values, self.weight, self.plan, self.bias, self.adapter)
        y = fprop(entered, self.weight, self.plan)
        if self.bias is not None:
            y += self.bias.to(y.dtype)
        return y, NONE

    def backward(
        self, dy: Tensor, values: Tensor, u: Tensor, codes: GEMMInput | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of X, A and B, from dY bfloat16 [T, N] and X in BF16 (`values`)."""
        if codes is None:
            codes = quantize_for_dgrad(dy, self.weight, self.plan)
        dx = dgrad(codes, self.weight)
        if self.adapter is None:
            return dx, None, None
        da, db, du = adapter_gradients(dy, values, u, self.adapter)
        return dx.addmm_(du, self.adapter.down), da, db


@dataclass(frozen=True)
class Fixed:
    """The arguments of a fused function without gradients; `norm_weight` [D] is the rounded one."""

    eps: float
    norm_weight: Tensor
    linears: tuple[FusedLinear, ...]
    gradients: Gradients
    keep: bool
    trace: Trace | None
    kernels: Kernels

    @staticmethod
    def of(norm: RMSNorm, linears: Sequence[Linear], side: Side, trace: Trace | None) -> Fixed:
        fused = tuple(FusedLinear.of(linear, side) for linear in linears)
        keep, gradients, weight = torch.is_grad_enabled(), linears[0].gradients, norm.rounded
        return Fixed(norm.eps, weight, fused, gradients, keep, trace, device_kernels(weight))

    @property
    def plan(self) -> PrecisionPlan:
        return self.linears[0].plan

    @property
    def coded(self) -> bool:
        """True if the linear layers multiply codes."""
        return format_of(self.linears[0].weight).coded

    @property
    def scales(self) -> str | None:
        """The rule of the scales of codes that FProp reads; None: those of INT8 rows have none."""
        return self.plan.scales if format_of(self.linears[0].weight).has_rule else None

    def normed(self, total: Tensor) -> Tensor:
        """Return the norm of the residual stream in BF16, computed again."""
        return self.kernels.rms_norm_forward(total, self.norm_weight, self.eps)[0]

    def leave(
        self, dnormed: Tensor, total: Tensor, inverse: Tensor, dtotal: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x (and delta), with `dtotal`, and of the norm's weight."""
        weight, dtotal = self.norm_weight, dtotal.contiguous()
        return self.kernels.rms_norm_backward(dnormed, total, weight, inverse, dtotal)


def norm_linear_fused(
    x: Tensor, delta: Tensor | None, norm: RMSNorm, linear: Linear, side: Side, trace: Trace | None
) -> tuple[Tensor, Tensor]:
    """`models.attention.norm_linear` on a GPU."""
    fixed = Fixed.of(norm, (linear,), side, trace)
    if linear.adapter is None:
        total, y = _NormLinear.apply(x, delta, norm.weight, linear.weight, fixed)
        return total, linear.with_bias(y)
    a, b = fixed.linears[0].masters
    total, y = _AdaptedNormLinear.apply(x, delta, norm.weight, a, b, fixed)
    return total, y


def add_norm_fused(x: Tensor, delta: Tensor, norm: RMSNorm) -> Tensor:
    """`models.decoder.add_norm` on a GPU."""
    y: Tensor = _AddNorm.apply(x, delta, norm.weight, norm.rounded, norm.eps)
    return y


def enter(
    x: Tensor, delta: Tensor | None, s: Fixed, with_values: bool = False
) -> tuple[Tensor, Tensor | None, GEMMInput, Tensor | None]:
    """Return x + delta, the inverse rms, and the norm as FProp reads it and in BF16 if asked."""
    if not s.coded:
        y, inverse, total = s.kernels.rms_norm_forward(x, s.norm_weight, s.eps, delta)
        return total, inverse, y, y
    return s.kernels.rms_norm_quantize(
        x, s.norm_weight, s.eps, delta, s.keep, s.scales, with_values
    )


def entered_again(total: Tensor, inverse: Tensor, kept: Sequence[Tensor], s: Fixed) -> GEMMInput:
    """Return the normalized values as WGrad reads them: codes made again, or the kept BF16."""
    if not s.coded:
        return kept[0]
    if s.plan.wgrad_input == "128x128" and s.plan.backward_format.grouped:
        return s.kernels.rms_norm_squares(total, s.norm_weight, inverse, s.plan.scales)
    return quantize_for_wgrad(s.normed(total), s.plan)


class _NormLinear(torch.autograd.Function):
    """The master weights are inputs only for their gradients, as in the functions below."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, norm: Tensor, master: Tensor, s: Fixed
    ) -> tuple[Tensor, Tensor]:
        total, inverse, entered, _ = enter(x, delta, s)
        tell(s.trace, "input_norm", entered)
        y = fprop(entered, s.linears[0].weight, s.plan)
        if s.keep:
            kept = (entered,) if isinstance(entered, Tensor) else ()
            ctx.save_for_backward(total, inverse, *kept)
        ctx.fixed, ctx.two_inputs, ctx.master = s, delta is not None, master
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        s: Fixed = ctx.fixed
        dtotal, dy = grads
        total, inverse, *kept = ctx.saved_tensors
        weight = s.linears[0].weight
        rows, tokens = quantize_output_gradient(dy.contiguous(), weight, s.plan)
        dnormed = dgrad(rows, weight)
        dw = None
        if ctx.needs_input_grad[3]:
            dw = wgrad(tokens, entered_again(total, inverse, kept, s), ctx.master, s.gradients)
        dx, dnorm = s.leave(dnormed, total, inverse, dtotal)
        return dx, dx if ctx.two_inputs else None, dnorm, dw, None


class _AdaptedNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, norm: Tensor, a: Tensor | None, b: Tensor | None,
        s: Fixed,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        total, inverse, entered, values = enter(x, delta, s, with_values=True)
        tell(s.trace, "input_norm", entered)
        y, u = s.linears[0].forward(entered, values)
        if s.keep:
            ctx.save_for_backward(total, inverse, u)
        ctx.fixed, ctx.two_inputs = s, delta is not None
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        s: Fixed = ctx.fixed
        dtotal, dy = grads
        total, inverse, u = ctx.saved_tensors
        dnormed, da, db = s.linears[0].backward(dy.contiguous(), s.normed(total), u)
        dx, dnorm = s.leave(dnormed, total, inverse, dtotal)
        return dx, dx if ctx.two_inputs else None, dnorm, da, db, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor, norm: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        y, inverse, total = device_kernels(x).rms_norm_forward(x, weight, eps, delta)
        ctx.save_for_backward(total, inverse)
        ctx.weight = weight
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, inverse = ctx.saved_tensors
        dy, kernels = grads[0].contiguous(), device_kernels(total)
        dx, dweight = kernels.rms_norm_backward(dy, total, ctx.weight, inverse)
        return dx, dx, dweight, None, None
