"""The dense block on a GPU as one autograd function, with fused quantization.

    total = x + delta;  y = down(swiglu(gate_up(norm(total))))

The kernels of the norm and of SwiGLU write quantized inputs for the next GEMM
(`models.layer_fused`). In backward, one kernel recomputes the input of `down` and writes the
gradient of SwiGLU as the quantized dY of `gate_up`. With adapters, SwiGLU also writes BF16 values,
and only the products with A are saved for backward.

Legend: T tokens, D hidden size, N output features, F inner size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jetrl.models.layer import RMSNorm, Trace, tell
from jetrl.models.layer_fused import NONE, Fixed, enter, entered_again
from jetrl.precision.adapter import adapter_gradients, rank_gradient
from jetrl.precision.formats import DrawKey, GEMMInput, TokenValues
from jetrl.precision.linear import (
    Linear,
    dgrad,
    fprop,
    quantize_for_dgrad,
    quantize_for_wgrad,
    quantize_output_gradient,
    wgrad,
)
from jetrl.precision.plan import Side
from jetrl.precision.quantize import FP8_BLOCK
from jetrl.precision.saved import saved_codes, saved_values


def norm_mlp_fused(
    x: Tensor, delta: Tensor, norm: RMSNorm, linears: tuple[Linear, Linear], side: Side,
    trace: Trace | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return x + delta and the block's output, both bfloat16 [T, D]: `DenseBlock.forward` on a GPU.

    `linears` are `gate_up` and `down`.
    """
    gate_up, down = linears
    fixed = Fixed.of(norm, linears, side, trace)
    if gate_up.adapter is None and down.adapter is None:
        assert gate_up.bias is None, "SwiGLU reads only the product of gate_up"
        total, y = _NormMLP.apply(x, delta, norm.weight, gate_up.weight, down.weight, fixed)
        return total, down.with_bias(y)
    gate_up_a, gate_up_b = fixed.linears[0].masters
    down_a, down_b = fixed.linears[1].masters
    total, y = _AdaptedNormMLP.apply(
        x, delta, norm.weight, gate_up_a, gate_up_b, down_a, down_b, fixed
    )
    return total, y


class _NormMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor, norm: Tensor, gate_up_master: Tensor,
        down_master: Tensor, s: Fixed,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        # The norm and SwiGLU write their outputs quantized for the next GEMM.
        total, inverse, entered, _ = enter(x, delta, s)
        tell(s.trace, "post_norm", entered)
        gate_up = fprop(entered, s.linears[0].weight, s.plan)
        tell(s.trace, "gate_up", gate_up)
        gated = (
            s.kernels.swiglu_quantize(gate_up, s.scales)
            if s.coded
            else s.kernels.swiglu_forward(gate_up)
        )
        tell(s.trace, "swiglu", gated)
        y = fprop(gated, s.linears[1].weight, s.plan)
        if s.keep:
            kept = [value for value in (entered, gated) if isinstance(value, Tensor)]
            ctx.save_for_backward(total, inverse, _saved(gate_up, s), *kept)
        ctx.fixed, ctx.masters = s, (gate_up_master, down_master)
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        s: Fixed = ctx.fixed
        dtotal, dy = grads
        total, inverse, saved, *kept = ctx.saved_tensors
        # `down` and SwiGLU: one kernel computes dY of `gate_up`, and recomputes X of `down`.
        gate_up_key, key = (s.gradients.draw_key(master) for master in ctx.masters)
        rows, tokens = quantize_output_gradient(dy.contiguous(), s.linears[1].weight, s.plan, key)
        dgated = dgrad(rows, s.linears[1].weight)
        gate_up = saved_values(saved)
        gate_up_rows, gate_up_tokens, gated = _swiglu_backward(
            dgated, gate_up, kept[1:], s, gate_up_key
        )
        del dgated, gate_up
        dw_gate_up = dw_down = None
        if ctx.needs_input_grad[4]:
            dw_down = wgrad(tokens, gated, ctx.masters[1], s.gradients)
        del rows, tokens, gated  # the peak memory of backward is here
        # `gate_up`, whose X is recomputed from the norm, and the norm.
        dnormed = dgrad(gate_up_rows, s.linears[0].weight)
        if ctx.needs_input_grad[3]:
            entered = entered_again(total, inverse, kept, s)
            dw_gate_up = wgrad(gate_up_tokens, entered, ctx.masters[0], s.gradients)
            del entered
        del gate_up_rows, gate_up_tokens
        dx, dnorm = s.leave(dnormed, total, inverse, dtotal)
        return dx, dx, dnorm, dw_gate_up, dw_down, None


def _saved(gate_up: Tensor, s: Fixed) -> Tensor:
    """Return the output of gate_up, or its codes, to be saved for backward."""
    return gate_up if s.plan.saved == "off" else saved_codes(gate_up)


def _swiglu_backward(
    dgated: Tensor, gate_up: Tensor, kept: Sequence[Tensor], s: Fixed, key: DrawKey
) -> tuple[GEMMInput, GEMMInput | TokenValues, GEMMInput]:
    """Return dY of gate_up for DGrad and WGrad, and swiglu(gate_up) for WGrad of `down`."""
    plan = s.plan
    if _fuses_swiglu(s, dgated) and not plan.widens_wgrad:
        return s.kernels.swiglu_backward_quantize(dgated, gate_up, "e4m3", plan.scales)
    # The output of SwiGLU overwrites its gradient.
    dgate_up = s.kernels.swiglu_backward(dgated, gate_up, dgated if s.coded else None)
    y = quantize_for_wgrad(dgated, plan) if s.coded else kept[0]
    return *quantize_output_gradient(dgate_up, s.linears[0].weight, plan, key), y


def _fuses_swiglu(s: Fixed, dgated: Tensor) -> bool:
    """Return whether SwiGLU's backward quantizes; no group may span both gate and up."""
    return s.coded and s.plan.grad_output == "e4m3" and dgated.shape[1] % FP8_BLOCK == 0


class _AdaptedNormMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor, norm: Tensor, gate_up_a: Tensor | None,
        gate_up_b: Tensor | None, down_a: Tensor | None, down_b: Tensor | None, s: Fixed,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        total, inverse, entered, values = enter(x, delta, s, with_values=True)
        tell(s.trace, "post_norm", entered)
        gate_up, u_gate_up = s.linears[0].forward(entered, values)
        del entered, values
        tell(s.trace, "gate_up", gate_up)
        if s.coded:
            entered, values = s.kernels.swiglu_quantize_with_values(gate_up, s.scales)
        else:
            entered = values = s.kernels.swiglu_forward(gate_up)
        tell(s.trace, "swiglu", entered)
        y, u_down = s.linears[1].forward(entered, values)
        if s.keep:
            ctx.save_for_backward(total, inverse, _saved(gate_up, s), u_gate_up, u_down)
        ctx.fixed = s
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        s: Fixed = ctx.fixed
        dtotal, dy = grads[0].contiguous(), grads[1].contiguous()
        total, inverse, saved, u_gate_up, u_down = ctx.saved_tensors
        dgate_up, codes, da_down, db_down = _through_swiglu(s, dy, saved_values(saved), u_down)
        values = s.normed(total) if s.linears[0].adapter is not None else NONE
        dnormed, da, db = s.linears[0].backward(dgate_up, values, u_gate_up, codes)
        del values, dgate_up, codes
        dx, dnorm = s.leave(dnormed, total, inverse, dtotal)
        return dx, dx, dnorm, da, db, da_down, db_down, None


def _through_swiglu(
    s: Fixed, dy: Tensor, gate_up: Tensor, u_down: Tensor
) -> tuple[Tensor, GEMMInput | None, Tensor | None, Tensor | None]:
    """Return dY of `gate_up` in BF16 and in codes (or None), and the gradients of `down`'s A, B."""
    down = s.linears[1]
    dgated = dgrad(quantize_for_dgrad(dy, down.weight, down.plan), down.weight)
    du = None
    if down.adapter is not None:
        du = rank_gradient(dy, down.adapter)
        dgated.addmm_(du, down.adapter.down)
    codes: GEMMInput | None = None
    fused = _fuses_swiglu(s, dgated)
    if fused:  # the output of SwiGLU overwrites its gradient
        codes, dgate_up = s.kernels.swiglu_backward_values_(dgated, gate_up, down.plan.scales)
    da = db = None
    if down.adapter is not None:
        values = dgated if fused else s.kernels.swiglu_forward(gate_up)
        da, db, _ = adapter_gradients(dy, values, u_down, down.adapter, du)
        del values
    if not fused:
        dgate_up = s.kernels.swiglu_backward(dgated, gate_up)
    return dgate_up, codes, da, db
