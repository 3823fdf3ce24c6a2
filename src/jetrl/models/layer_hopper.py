"""The operations of `models.layer` on Hopper, each one autograd function, so that codes flow.

    norm_linear_hopper   total = x + delta;  y = linear(norm(total))
    norm_mlp_hopper      total = x + delta;  y = down(swiglu(gate_up(norm(total))))
    add_norm_hopper      norm(x + delta)

They are the composition of the operations that `models.layer` names, with the same bits in the
forward (tests/gpu/test_flow.py); what is saved is where a BF16 result would be written only to
be read and quantized by the next operation: the norm and SwiGLU make the codes that FProp reads.
For WGrad nothing of them is kept: backward makes the norm's codes again from the residual stream,
and SwiGLU's in the pass that makes its gradient, which leaves as the codes of gate_up's dY. The
residual's gradient joins inside the norm's. Layers kept in BF16 take the same functions, with BF16
in the place of codes; they keep what FProp read, which had to be written anyway.

Legend: T tokens, D hidden size, N output features, F intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.norm_hopper import (
    rms_norm_backward,
    rms_norm_forward,
    rms_norm_quantize,
    rms_norm_squares,
)
from jetrl.kernels.swiglu_backward_hopper import swiglu_backward_quantize
from jetrl.kernels.swiglu_hopper import swiglu_backward, swiglu_forward, swiglu_quantize
from jetrl.models.norm import RMSNorm
from jetrl.models.normed_linears import NormedLinears
from jetrl.models.trace import Trace, tell
from jetrl.precision.gradients import Gradients
from jetrl.precision.linear import (
    FP8Weight,
    GEMMInput,
    Operand,
    OutputGradient,
    dgrad,
    fprop,
    quantize_for_wgrad,
    quantize_output_gradient,
    wgrad,
)
from jetrl.precision.plan import PrecisionPlan


@dataclass(frozen=True)
class _Fixed:
    """The arguments of a fused function that get no gradients.

    Attributes:
        norm_weight: The norm's rounded weight, bfloat16 [D].
        trace: A function that sees the outputs of operations, or None.
    """

    eps: float
    norm_weight: Tensor
    weights: tuple[Operand, ...]
    plan: PrecisionPlan
    gradients: Gradients
    keep: bool
    trace: Trace | None

    @staticmethod
    def of(layers: NormedLinears) -> _Fixed:
        """Read from the layers what one call on a side needs."""
        norm, first, keep = layers.norm, layers.linears[0], torch.is_grad_enabled()
        weights = tuple(linear.operand(layers.side) for linear in layers.linears)
        plan, gradients, trace = first.plan.on(layers.side), first.gradients, layers.trace
        return _Fixed(norm.eps, norm.rounded, weights, plan, gradients, keep, trace)

    @property
    def fp8(self) -> bool:
        """True where the linear layers multiply codes."""
        return isinstance(self.weights[0], FP8Weight)


def norm_linear_hopper(
    x: Tensor, delta: Tensor | None, layers: NormedLinears
) -> tuple[Tensor, Tensor]:
    """Return x + delta [T, D] and linear(norm(x + delta)) [T, N], as `models.layer.norm_linear`.

    Args:
        x: The residual stream, bfloat16 [T, D].
        delta: What is added to the stream first, bfloat16 [T, D] or None.
    """
    fixed = _Fixed.of(layers)
    [linear] = layers.linears
    total, y = _NormLinear.apply(x, delta, layers.norm.weight, linear.weight, fixed)
    return total, linear.with_bias(y)


def norm_mlp_hopper(x: Tensor, delta: Tensor, layers: NormedLinears) -> tuple[Tensor, Tensor]:
    """Return x + delta and down(swiglu(gate_up(norm(x + delta)))), as `models.layer.norm_mlp`.

    Args:
        x: The residual stream, bfloat16 [T, D].
        delta: What is added to the stream first, bfloat16 [T, D].
    """
    gate_up, down = layers.linears
    assert gate_up.bias is None, "SwiGLU reads the product of gate_up alone"
    fixed = _Fixed.of(layers)
    masters = (gate_up.weight, down.weight)
    total, y = _NormMLP.apply(x, delta, layers.norm.weight, *masters, fixed)
    return total, down.with_bias(y)


def add_norm_hopper(x: Tensor, delta: Tensor, norm: RMSNorm) -> Tensor:
    """Return norm(x + delta), differentiable.

    Args:
        x: The residual stream, bfloat16 [T, D].
        delta: What the last layer adds to the stream, bfloat16 [T, D].
    """
    y: Tensor = _AddNorm.apply(x, delta, norm.weight, norm.rounded, norm.eps)
    return y


def _enter(x: Tensor, delta: Tensor | None, s: _Fixed) -> tuple[Tensor, Tensor | None, GEMMInput]:
    """Return x + delta, the inverse rms, and the normalised values as FProp reads them."""
    if s.fp8:
        n = rms_norm_quantize(x, s.norm_weight, s.eps, delta, s.keep, s.plan.scales)
        return n.total, n.inverse_rms, n.rows
    y, inverse, total = rms_norm_forward(x, s.norm_weight, s.eps, delta)
    return total, inverse, y


def _entered(total: Tensor, inverse: Tensor, kept: Sequence[Tensor], s: _Fixed) -> GEMMInput:
    """Return the normalised values as WGrad reads them: codes made again, or the kept BF16."""
    if not s.fp8:
        return kept[0]
    if s.plan.wgrad_input == "128x128":
        return rms_norm_squares(total, s.norm_weight, inverse, s.plan.scales)
    return quantize_for_wgrad(rms_norm_forward(total, s.norm_weight, s.eps)[0], s.plan)


def _leave(
    dnormed: Tensor, total: Tensor, inverse: Tensor, dtotal: Tensor, s: _Fixed
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (which is delta's as well) and of the norm's weight.

    The gradient of the sum x + delta, which the residual stream brings, joins inside the norm's.
    """
    return rms_norm_backward(dnormed, total, s.norm_weight, inverse, dtotal.contiguous())


class _NormLinear(torch.autograd.Function):
    """The master weights are inputs for their gradients alone, as in the functions below."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, norm: Tensor, master: Tensor, s: _Fixed
    ) -> tuple[Tensor, Tensor]:
        total, inverse, entered = _enter(x, delta, s)
        tell(s.trace, "input_norm", entered)
        y = fprop(entered, s.weights[0], s.plan)
        if s.keep:
            kept = (entered,) if isinstance(entered, Tensor) else ()
            ctx.save_for_backward(total, inverse, *kept)
        ctx.fixed, ctx.two_inputs, ctx.master = s, delta is not None, master
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        s: _Fixed = ctx.fixed
        dtotal, dy = grads
        total, inverse, *kept = ctx.saved_tensors
        operands = quantize_output_gradient(dy.contiguous(), s.weights[0], s.plan)
        dnormed = dgrad(operands.rows, s.weights[0])
        dw = None
        if ctx.needs_input_grad[3]:
            dw = wgrad(operands, _entered(total, inverse, kept, s), ctx.master, s.gradients)
        dx, dnorm = _leave(dnormed, total, inverse, dtotal, s)
        return dx, dx if ctx.two_inputs else None, dnorm, dw, None


class _NormMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor,
        norm: Tensor,
        gate_up_master: Tensor,
        down_master: Tensor,
        s: _Fixed,
    ) -> tuple[Tensor, Tensor]:
        # The norm's and SwiGLU's outputs are made as the codes that the GEMM behind them reads.
        total, inverse, entered = _enter(x, delta, s)
        tell(s.trace, "post_norm", entered)
        gate_up = fprop(entered, s.weights[0], s.plan)
        tell(s.trace, "gate_up", gate_up)
        gated = swiglu_quantize(gate_up, s.plan.scales) if s.fp8 else swiglu_forward(gate_up)
        tell(s.trace, "swiglu", gated)
        y = fprop(gated, s.weights[1], s.plan)
        if s.keep:
            kept = [value for value in (entered, gated) if isinstance(value, Tensor)]
            ctx.save_for_backward(total, inverse, gate_up, *kept)
        ctx.fixed, ctx.masters = s, (gate_up_master, down_master)
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        s: _Fixed = ctx.fixed
        dtotal, dy = grads
        total, inverse, gate_up, *kept = ctx.saved_tensors
        # Through `down` and SwiGLU: one kernel makes gate_up's dY and, again, down's X.
        operands = quantize_output_gradient(dy.contiguous(), s.weights[1], s.plan)
        dgate_up, gated = _swiglu_backward(dgrad(operands.rows, s.weights[1]), gate_up, kept[1:], s)
        dw_gate_up = dw_down = None
        if ctx.needs_input_grad[4]:
            dw_down = wgrad(operands, gated, ctx.masters[1], s.gradients)
        del operands, gated  # here a backward holds most
        # Through `gate_up`, whose X the norm makes again, and the norm.
        dnormed = dgrad(dgate_up.rows, s.weights[0])
        if ctx.needs_input_grad[3]:
            entered = _entered(total, inverse, kept, s)
            dw_gate_up = wgrad(dgate_up, entered, ctx.masters[0], s.gradients)
            del entered
        del dgate_up
        dx, dnorm = _leave(dnormed, total, inverse, dtotal, s)
        return dx, dx, dnorm, dw_gate_up, dw_down, None


def _swiglu_backward(
    dgated: Tensor, gate_up: Tensor, kept: Sequence[Tensor], s: _Fixed
) -> tuple[OutputGradient, GEMMInput]:
    """Return dY of gate_up, and swiglu(gate_up) as WGrad of `down` reads the values."""
    plan = s.plan
    if s.fp8 and plan.grad_output == "e4m3" and not plan.widens_wgrad:
        rows, tokens, gated = swiglu_backward_quantize(
            dgated, gate_up, plan.grad_output, plan.scales
        )
        return OutputGradient(rows, tokens), gated
    dgate_up = swiglu_backward(dgated, gate_up)
    y = quantize_for_wgrad(swiglu_forward(gate_up), plan) if s.fp8 else kept[0]
    return quantize_output_gradient(dgate_up, s.weights[0], plan), y


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor, norm: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        y, inverse, total = rms_norm_forward(x, weight, eps, delta)
        ctx.save_for_backward(total, inverse)
        ctx.weight = weight
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, inverse = ctx.saved_tensors
        dx, dweight = rms_norm_backward(grads[0].contiguous(), total, ctx.weight, inverse)
        return dx, dx, dweight, None, None
