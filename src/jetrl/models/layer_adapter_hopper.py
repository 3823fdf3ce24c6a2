"""The operations of `models.layer` on Hopper where linear layers have adapters.

    norm_linear_adapted   total = x + delta;  y = linear(norm(total))
    norm_mlp_adapted      total = x + delta;  y = down(swiglu(gate_up(norm(total))))

They are `models.layer_hopper`'s, with three differences. The norm and SwiGLU write their BF16
values beside the codes, in the same pass, since an adapter reads the values. The base is frozen, so
backward has no WGrad, and quantizes dY for DGrad alone. And the adapters' own gradients are made
from values that backward makes again from the residual stream and from gate_up: like there, nothing
of them is kept but the small products with A.

Legend: T tokens, D hidden size, N output features, F intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.norm_hopper import rms_norm_backward, rms_norm_forward, rms_norm_quantize
from jetrl.kernels.swiglu_hopper import (
    swiglu_backward,
    swiglu_backward_values_,
    swiglu_forward,
    swiglu_quantize_with_values,
)
from jetrl.models.normed_linears import NormedLinears
from jetrl.models.trace import Trace, tell
from jetrl.precision.adapter import (
    AdapterWeight,
    adapter_gradients,
    rank_gradient,
)
from jetrl.precision.linear import (
    FP8Weight,
    GEMMInput,
    Linear,
    Operand,
    adapted_fprop,
    dgrad,
    fprop,
    quantize_for_dgrad,
)
from jetrl.precision.plan import PrecisionPlan, Side

_NONE = torch.empty(0)


@dataclass(frozen=True)
class _Frozen:
    """A linear layer with a frozen weight, and perhaps an adapter, as one call on a side reads it.

    Attributes:
        bias: The bias, or None.
        adapter: The adapter, or None.
    """

    weight: Operand
    bias: Tensor | None
    adapter: AdapterWeight | None
    plan: PrecisionPlan

    @staticmethod
    def of(linear: Linear, side: Side) -> _Frozen:
        """Read from a layer what one call on a side needs."""
        bias = None if linear.bias is None else linear.bias.detach()
        return _Frozen(linear.operand(side), bias, linear.adapter, linear.plan.on(side))

    @property
    def masters(self) -> tuple[Tensor | None, Tensor | None]:
        """The adapter's master weights, which are inputs for their gradients alone."""
        return (None, None) if self.adapter is None else (self.adapter.a, self.adapter.b)

    def forward(self, entered: GEMMInput, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output, and the adapter's product with A.

        Args:
            values: X in BF16.
        """
        if self.adapter is not None:
            return adapted_fprop(entered, values, self.weight, self.plan, self.bias, self.adapter)
        y = fprop(entered, self.weight, self.plan)
        if self.bias is not None:
            y += self.bias.to(y.dtype)
        return y, _NONE

    def backward(
        self, dy: Tensor, values: Tensor, u: Tensor, codes: GEMMInput | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of X, A and B.

        Args:
            dy: bfloat16 [T, N], the gradient of the output.
            values: X in BF16.
        """
        if codes is None:
            codes = quantize_for_dgrad(dy, self.weight, self.plan)
        dx = dgrad(codes, self.weight)
        if self.adapter is None:
            return dx, None, None
        gradients = adapter_gradients(dy, values, u, self.adapter)
        return dx.addmm_(gradients.u, self.adapter.down), gradients.a, gradients.b


@dataclass(frozen=True)
class _Fixed:
    """The arguments of a fused function that get no gradients.

    Attributes:
        norm_weight: The norm's rounded weight, bfloat16 [D].
        trace: A function that sees the outputs of operations, or None.
    """

    eps: float
    norm_weight: Tensor
    linears: tuple[_Frozen, ...]
    keep: bool
    trace: Trace | None

    @staticmethod
    def of(layers: NormedLinears) -> _Fixed:
        """Read from the layers what one call on a side needs."""
        norm, keep = layers.norm, torch.is_grad_enabled()
        frozen = tuple(_Frozen.of(linear, layers.side) for linear in layers.linears)
        return _Fixed(norm.eps, norm.rounded, frozen, keep, layers.trace)

    @property
    def fp8(self) -> bool:
        """True where the linear layers multiply codes."""
        return isinstance(self.linears[0].weight, FP8Weight)

    def enter(
        self, x: Tensor, delta: Tensor | None
    ) -> tuple[Tensor, Tensor | None, GEMMInput, Tensor]:
        """Return x + delta, the inverse rms, and the norm as FProp reads it and in BF16."""
        if not self.fp8:
            y, inverse, total = rms_norm_forward(x, self.norm_weight, self.eps, delta)
            return total, inverse, y, y
        scales = self.linears[0].plan.scales
        n = rms_norm_quantize(x, self.norm_weight, self.eps, delta, self.keep, scales, True)
        assert n.values is not None, "the values were asked for"
        return n.total, n.inverse_rms, n.rows, n.values

    def gated(self, gate_up: Tensor) -> tuple[GEMMInput, Tensor]:
        """Return SwiGLU's output as FProp reads it and in BF16."""
        if not self.fp8:
            y = swiglu_forward(gate_up)
            return y, y
        return swiglu_quantize_with_values(gate_up, self.linears[0].plan.scales)

    def normed(self, total: Tensor) -> Tensor:
        """Return the norm of the residual stream in BF16 once more."""
        return rms_norm_forward(total, self.norm_weight, self.eps)[0]


def norm_linear_adapted(
    x: Tensor, delta: Tensor | None, layers: NormedLinears
) -> tuple[Tensor, Tensor]:
    """Return x + delta [T, D] and linear(norm(x + delta)) [T, N], as `models.layer.norm_linear`.

    Args:
        x: The residual stream, bfloat16 [T, D].
        delta: What is added to the stream first, bfloat16 [T, D] or None.
    """
    fixed = _Fixed.of(layers)
    total, y = _NormLinear.apply(x, delta, layers.norm.weight, *fixed.linears[0].masters, fixed)
    return total, y


def norm_mlp_adapted(x: Tensor, delta: Tensor, layers: NormedLinears) -> tuple[Tensor, Tensor]:
    """Return x + delta and down(swiglu(gate_up(norm(x + delta)))), as `models.layer.norm_mlp`.

    Args:
        x: The residual stream, bfloat16 [T, D].
        delta: What is added to the stream first, bfloat16 [T, D].
    """
    fixed = _Fixed.of(layers)
    masters = (*fixed.linears[0].masters, *fixed.linears[1].masters)
    total, y = _NormMLP.apply(x, delta, layers.norm.weight, *masters, fixed)
    return total, y


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        norm: Tensor,
        a: Tensor | None,
        b: Tensor | None,
        s: _Fixed,
    ) -> tuple[Tensor, Tensor]:
        total, inverse, entered, values = s.enter(x, delta)
        tell(s.trace, "input_norm", entered)
        y, u = s.linears[0].forward(entered, values)
        if s.keep:
            ctx.save_for_backward(total, inverse, u)
        ctx.fixed, ctx.two_inputs = s, delta is not None
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        s: _Fixed = ctx.fixed
        dtotal, dy = grads
        total, inverse, u = ctx.saved_tensors
        dnormed, da, db = s.linears[0].backward(dy.contiguous(), s.normed(total), u)
        dx, dnorm = rms_norm_backward(dnormed, total, s.norm_weight, inverse, dtotal.contiguous())
        return dx, dx if ctx.two_inputs else None, dnorm, da, db, None


class _NormMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor,
        norm: Tensor,
        gate_up_a: Tensor | None,
        gate_up_b: Tensor | None,
        down_a: Tensor | None,
        down_b: Tensor | None,
        s: _Fixed,
    ) -> tuple[Tensor, Tensor]:
        total, inverse, entered, values = s.enter(x, delta)
        tell(s.trace, "post_norm", entered)
        gate_up, u_gate_up = s.linears[0].forward(entered, values)
        del entered, values
        tell(s.trace, "gate_up", gate_up)
        entered, values = s.gated(gate_up)
        tell(s.trace, "swiglu", entered)
        y, u_down = s.linears[1].forward(entered, values)
        if s.keep:
            ctx.save_for_backward(total, inverse, gate_up, u_gate_up, u_down)
        ctx.fixed = s
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        s: _Fixed = ctx.fixed
        dtotal, dy = grads[0].contiguous(), grads[1].contiguous()
        total, inverse, gate_up, u_gate_up, u_down = ctx.saved_tensors
        dgate_up, codes, da_down, db_down = _through_swiglu(s, dy, gate_up, u_down)
        values = s.normed(total) if s.linears[0].adapter is not None else _NONE
        dnormed, da, db = s.linears[0].backward(dgate_up, values, u_gate_up, codes)
        del values, dgate_up, codes
        dx, dnorm = rms_norm_backward(dnormed, total, s.norm_weight, inverse, dtotal)
        return dx, dx, dnorm, da, db, da_down, db_down, None


def _through_swiglu(
    s: _Fixed, dy: Tensor, gate_up: Tensor, u_down: Tensor
) -> tuple[Tensor, GEMMInput | None, Tensor | None, Tensor | None]:
    """Return the gradient of gate_up in BF16 and perhaps as codes, and those of `down`'s A and B.

    Args:
        dy: bfloat16 [T, D], the gradient of the output of `down`.
        gate_up: bfloat16 [T, 2F], the output of gate_up.
        u_down: The product with A of `down`.
    """
    down = s.linears[1]
    dgated = dgrad(quantize_for_dgrad(dy, down.weight, down.plan), down.weight)
    du = None
    if down.adapter is not None:
        du = rank_gradient(dy, down.adapter)
        dgated.addmm_(du, down.adapter.down)
    codes: GEMMInput | None = None
    fused = s.fp8 and down.plan.grad_output == "e4m3"
    if fused:  # SwiGLU's output takes the place of its gradient
        codes, dgate_up = swiglu_backward_values_(dgated, gate_up, down.plan.scales)
    da = db = None
    if down.adapter is not None:
        values = dgated if fused else swiglu_forward(gate_up)
        gradients = adapter_gradients(dy, values, u_down, down.adapter, du)
        da, db = gradients.a, gradients.b
        del values
    if not fused:
        dgate_up = swiglu_backward(dgated, gate_up)
    return dgate_up, codes, da, db
