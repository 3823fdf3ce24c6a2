"""A norm fused with the linear layer after it on a GPU, as one autograd function.

Forward has the bits of the unfused operations in `models.attention` and `models.decoder`
(tests/gpu/test_flow.py). The norm writes the codes for FProp directly, without its BF16 output.
Nothing is saved for WGrad: backward computes the norm's codes again from the residual stream, and
the norm's backward also adds the residual's gradient. Layers in BF16 use the same functions; they
save the input of FProp, which exists anyway.

With adapters, the norm writes BF16 values in addition to codes, in the same pass. The base is
frozen, so backward has no WGrad and quantizes dY only for DGrad. The gradients of adapters are
computed from recomputed values.

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

NONE = torch.empty(0)  # placeholder for tensors of adapters, if a layer has none


@dataclass(frozen=True)
class FusedLinear:
    """The operands of a linear layer on one side; with an adapter its weight is frozen."""

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
        """The master weights A and B of the adapter; None without one."""
        return (None, None) if self.adapter is None else (self.adapter.a, self.adapter.b)

    def forward(self, entered: GEMMInput, values: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output and the adapter's product with A; `values` is X in BF16."""
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
        """Return the gradients of X, A and B; dY is bfloat16 [T, N], `values` is X in BF16."""
        if codes is None:
            codes = quantize_for_dgrad(dy, self.weight, self.plan)
        dx = dgrad(codes, self.weight)
        if self.adapter is None:
            return dx, None, None
        da, db, du = adapter_gradients(dy, values, u, self.adapter)
        return dx.addmm_(du, self.adapter.down), da, db


@dataclass(frozen=True)
class Fixed:
    """The arguments of a fused function that have no gradients; `norm_weight` [D] is rounded.

    `sums` is that of the norm (`models.layer.RMSNorm`).
    """

    eps: float
    norm_weight: Tensor
    linears: tuple[FusedLinear, ...]
    gradients: Gradients
    keep: bool
    trace: Trace | None
    kernels: Kernels
    sums: list[Tensor] | None

    @staticmethod
    def of(norm: RMSNorm, linears: Sequence[Linear], side: Side, trace: Trace | None) -> Fixed:
        fused = tuple(FusedLinear.of(linear, side) for linear in linears)
        return Fixed(
            eps=norm.eps,
            norm_weight=norm.rounded,
            linears=fused,
            gradients=linears[0].gradients,
            keep=torch.is_grad_enabled(),
            trace=trace,
            kernels=device_kernels(norm.rounded),
            sums=norm.sums,
        )

    @property
    def plan(self) -> PrecisionPlan:
        return self.linears[0].plan

    @property
    def coded(self) -> bool:
        """True if the linear layers multiply codes."""
        return format_of(self.linears[0].weight).coded

    @property
    def scales(self) -> str | None:
        """The format of the scales of X; None for INT8 rows, whose scales are float32."""
        return self.plan.scales if format_of(self.linears[0].weight).has_rule else None

    def normed(self, total: Tensor) -> Tensor:
        """Recompute the norm of the residual stream in BF16."""
        return self.kernels.rms_norm_forward(total, self.norm_weight, self.eps)[0]

    def leave(
        self, dnormed: Tensor, total: Tensor, inverse: Tensor, dtotal: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x (and delta), with `dtotal`, and of the norm's weight."""
        weight, dtotal = self.norm_weight, dtotal.contiguous()
        return self.kernels.rms_norm_backward(dnormed, total, weight, inverse, dtotal, self.sums)


def norm_linear_fused(
    x: Tensor, delta: Tensor | None, norm: RMSNorm, linear: Linear, side: Side,
    trace: Trace | None, bias: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`models.attention.norm_linear` on a GPU."""
    fixed = Fixed.of(norm, (linear,), side, trace)
    if linear.adapter is None:
        total, y = _NormLinear.apply(x, delta, norm.weight, linear.weight, fixed)
        return total, linear.with_bias(y) if bias else y
    a, b = fixed.linears[0].masters
    total, y = _AdaptedNormLinear.apply(x, delta, norm.weight, a, b, fixed)
    return total, y


def add_norm_fused(x: Tensor, delta: Tensor, norm: RMSNorm) -> Tensor:
    """`models.decoder.add_norm` on a GPU."""
    return _AddNorm.apply(x, delta, norm.weight, norm.rounded, norm.eps, norm.sums)


def enter(
    x: Tensor, delta: Tensor | None, s: Fixed, with_values: bool = False
) -> tuple[Tensor, Tensor | None, GEMMInput, Tensor | None]:
    """Return x + delta, the inverse rms, and the norm for FProp and, if asked, in BF16."""
    if not s.coded:
        y, inverse, total = s.kernels.rms_norm_forward(x, s.norm_weight, s.eps, delta)
        return total, inverse, y, y
    return s.kernels.rms_norm_quantize(
        x, s.norm_weight, s.eps, delta, s.keep, s.scales, with_values
    )


def entered_again(total: Tensor, inverse: Tensor, kept: Sequence[Tensor], s: Fixed) -> GEMMInput:
    """Return the normalized values for WGrad: recomputed codes, or the saved BF16 values."""
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
        key = s.gradients.draw_key(ctx.master)
        rows, tokens = quantize_output_gradient(dy.contiguous(), weight, s.plan, key)
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
        ctx: Any, x: Tensor, delta: Tensor, norm: Tensor, weight: Tensor, eps: float,
        sums: list[Tensor] | None,
    ) -> Tensor:  # fmt: skip
        y, inverse, total = device_kernels(x).rms_norm_forward(x, weight, eps, delta)
        ctx.save_for_backward(total, inverse)
        ctx.weight, ctx.sums = weight, sums
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, inverse = ctx.saved_tensors
        dy, kernels = grads[0].contiguous(), device_kernels(total)
        dx, dweight = kernels.rms_norm_backward(dy, total, ctx.weight, inverse, None, ctx.sums)
        return dx, dx, dweight, None, None, None
