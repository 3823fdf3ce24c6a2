"""The parts of a decoder layer on Hopper, each one autograd function, so that codes flow.

    norm_linear    total = x + delta;  y = linear(norm(total))
    mlp            total = x + delta;  y = down(swiglu(gate_up(norm(total))))
    attend_packed  qkv -> QK norm, rotary, quantized keys and values -> attention
    add_norm       norm(x + delta)

They are the composition of the operations that the decoder's reference names, with the same bits in
the forward (tests/gpu/test_flow.py); what is saved is where a BF16 result would be written only to
be read and quantized by the next operation: the norm and SwiGLU make the codes that FProp reads.
For WGrad nothing of them is kept: in backward the norm's are made anew from the residual stream,
and SwiGLU's in the pass that makes its gradient, which leaves as the codes of gate_up's dY. The
residual's gradient joins inside the norm's. Layers kept in BF16 take the same functions, with BF16
in the place of codes; they keep what FProp read, which had to be written anyway.

Legend: T tokens, D hidden size, F intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.attention.backward import attention_backward
from jetrl.kernels.attention.cudnn import (
    attend_equal_lengths,
    attend_equal_lengths_backward,
)
from jetrl.kernels.attention.forward import attend_tiles
from jetrl.kernels.attention.hopper import stored_values
from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles
from jetrl.kernels.attention.stage import stage_keys
from jetrl.kernels.norm_hopper import (
    rms_norm_backward,
    rms_norm_forward,
    rms_norm_quantize,
    rms_norm_squares,
)
from jetrl.kernels.rotary_backward_hopper import qk_norm_rotary_backward
from jetrl.kernels.rotary_hopper import dense_cache, qk_norm_rotary_cache
from jetrl.kernels.swiglu_backward_hopper import swiglu_backward_quantize
from jetrl.kernels.swiglu_hopper import swiglu_backward, swiglu_forward, swiglu_quantize
from jetrl.models.attention import Rotary, Trace, values_of
from jetrl.models.norm import RMSNorm
from jetrl.precision.linear import (
    FP8Weight,
    GEMMInput,
    Linear,
    Operand,
    OutputGradient,
    dgrad,
    fprop,
    quantize_for_wgrad,
    quantize_output_gradient,
    wgrad,
)
from jetrl.precision.plan import PrecisionPlan, Side


@dataclass(frozen=True)
class _Settings:
    """What the functions need besides tensors that get gradients. keep: save for backward."""

    eps: float
    norm_weight: Tensor
    weights: tuple[Operand, ...]
    plan: PrecisionPlan
    keep: bool
    trace: Trace | None

    @property
    def fp8(self) -> bool:
        """All linears of a layer have one format."""
        return isinstance(self.weights[0], FP8Weight)

    def tell(self, name: str, value: GEMMInput) -> None:
        """Trace an operation's output."""
        if self.trace is not None:
            self.trace(name, values_of(value))


def norm_linear(
    x: Tensor,
    delta: Tensor | None,
    norm: RMSNorm,
    linear: Linear,
    side: Side,
    trace: Trace | None,
) -> tuple[Tensor, Tensor]:
    """(x + delta, linear(norm(x + delta))) of bfloat16 x, delta [T, D], differentiable."""
    settings = _settings(norm, (linear,), side, trace)
    total, y = _NormLinear.apply(x, delta, norm.weight, linear.weight, settings)
    return total, linear.add_bias(y)


def mlp(
    x: Tensor,
    delta: Tensor | None,
    norm: RMSNorm,
    gate_up: Linear,
    down: Linear,
    side: Side,
    trace: Trace | None,
) -> tuple[Tensor, Tensor]:
    """(x + delta, down(swiglu(gate_up(norm(x + delta))))) of bfloat16 x, delta [T, D]."""
    settings = _settings(norm, (gate_up, down), side, trace)
    total, y = _MLP.apply(x, delta, norm.weight, gate_up.weight, down.weight, settings)
    return total, y


def add_norm(x: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
    """norm(x + delta) of bfloat16 [T, D], differentiable."""
    y: Tensor = _AddNorm.apply(x, delta, norm.weight, norm.copy, norm.eps)
    return y


def attend_packed(
    qkv: Tensor, rope: Rotary, tiles: QueryTiles, plan: PrecisionPlan, length: int | None
) -> Tensor:
    """Causal attention of a packed batch from qkv bfloat16 [T, (H + 2G) * D] to [T, H * D].

    length: that of every sequence, or None where they differ. A plan that promises no bits takes
    cuDNN for sequences of one length, and for others the exact kernels: they are faster than
    torch's FlashAttention-2, the library's only other form for packed sequences.
    """
    masters = (None, None) if rope.norms is None else (rope.norms[0].weight, rope.norms[1].weight)
    if length is not None and plan.kv == "bf16" and not plan.exact:
        out: Tensor = _LibraryAttention.apply(qkv, *masters, rope, plan, length)
    else:
        out = _PackedAttention.apply(qkv, *masters, rope, tiles, plan)
    return out


def _settings(
    norm: RMSNorm, linears: Sequence[Linear], side: Side, trace: Trace | None
) -> _Settings:
    weights = tuple(linear.operand(side) for linear in linears)
    keep = torch.is_grad_enabled()
    return _Settings(norm.eps, norm.copy, weights, linears[0].plan, keep, trace)


def _enter(
    x: Tensor, delta: Tensor | None, s: _Settings
) -> tuple[Tensor, Tensor | None, GEMMInput]:
    """(x + delta, inverse rms, the normalised values as FProp reads them)."""
    if s.fp8:
        n = rms_norm_quantize(x, s.norm_weight, s.eps, delta, s.keep, s.plan.scales)
        return n.total, n.inverse_rms, n.rows
    y, inverse, total = rms_norm_forward(x, s.norm_weight, s.eps, delta)
    return total, inverse, y


def _entered(total: Tensor, inverse: Tensor, kept: Sequence[Tensor], s: _Settings) -> GEMMInput:
    """The normalised values as WGrad reads them: BF16 that was kept, or codes made anew."""
    if s.fp8:
        return rms_norm_squares(total, s.norm_weight, inverse, s.plan.scales)
    return kept[0]


def _leave(
    dnormed: Tensor, total: Tensor, inverse: Tensor, dtotal: Tensor, s: _Settings
) -> tuple[Tensor, Tensor]:
    """Through the norm, joining the residual's gradient: (dx, which is also ddelta; dweight)."""
    return rms_norm_backward(dnormed, total, s.norm_weight, inverse, dtotal.contiguous())


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, norm: Tensor, master: Tensor, s: _Settings
    ) -> tuple[Tensor, Tensor]:
        total, inverse, entered = _enter(x, delta, s)
        s.tell("input_norm", entered)
        y = fprop(entered, s.weights[0], s.plan)
        if s.keep:
            kept = (entered,) if isinstance(entered, Tensor) else ()
            ctx.save_for_backward(total, inverse, *kept)
        ctx.settings, ctx.two_inputs, ctx.master = s, delta is not None, master
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        s: _Settings = ctx.settings
        dtotal, dy = grads
        total, inverse, *kept = ctx.saved_tensors
        operands = quantize_output_gradient(dy.contiguous(), s.weights[0], s.plan)
        dnormed = dgrad(operands, s.weights[0])
        dw = None
        if ctx.needs_input_grad[3]:
            dw = wgrad(operands, _entered(total, inverse, kept, s), ctx.master)
        dx, dnorm = _leave(dnormed, total, inverse, dtotal, s)
        return dx, dx if ctx.two_inputs else None, dnorm, dw, None


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        norm: Tensor,
        gate_up_master: Tensor,
        down_master: Tensor,
        s: _Settings,
    ) -> tuple[Tensor, Tensor]:
        total, inverse, entered = _enter(x, delta, s)
        s.tell("post_norm", entered)
        gate_up = fprop(entered, s.weights[0], s.plan)
        s.tell("gate_up", gate_up)
        gated = swiglu_quantize(gate_up, s.plan.scales) if s.fp8 else swiglu_forward(gate_up)
        s.tell("swiglu", gated)
        y = fprop(gated, s.weights[1], s.plan)
        if s.keep:
            kept = [value for value in (entered, gated) if isinstance(value, Tensor)]
            ctx.save_for_backward(total, inverse, gate_up, *kept)
        ctx.settings, ctx.two_inputs = s, delta is not None
        ctx.masters = gate_up_master, down_master
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        s: _Settings = ctx.settings
        dtotal, dy = grads
        total, inverse, gate_up, *kept = ctx.saved_tensors
        operands = quantize_output_gradient(dy.contiguous(), s.weights[1], s.plan)
        dgate_up, gated = _swiglu_backward(dgrad(operands, s.weights[1]), gate_up, kept[1:], s)
        dw_gate_up = dw_down = None
        if ctx.needs_input_grad[4]:
            dw_down = wgrad(operands, gated, ctx.masters[1])
        del operands, gated
        dnormed = dgrad(dgate_up, s.weights[0])
        if ctx.needs_input_grad[3]:
            entered = _entered(total, inverse, kept, s)
            dw_gate_up = wgrad(dgate_up, entered, ctx.masters[0])
            del entered
        del dgate_up
        dx, dnorm = _leave(dnormed, total, inverse, dtotal, s)
        return dx, dx if ctx.two_inputs else None, dnorm, dw_gate_up, dw_down, None


def _swiglu_backward(
    dgated: Tensor, gate_up: Tensor, kept: Sequence[Tensor], s: _Settings
) -> tuple[OutputGradient, GEMMInput]:
    """(dY of gate_up, swiglu(gate_up) as WGrad of `down` reads it)."""
    plan = s.plan
    if s.fp8 and plan.grad_output != "bf16":
        rows, tokens, gated = swiglu_backward_quantize(
            dgated, gate_up, plan.grad_output, plan.scales
        )
        return OutputGradient(rows, tokens), gated
    dgate_up = swiglu_backward(dgated, gate_up)
    y = quantize_for_wgrad(swiglu_forward(gate_up), plan) if s.fp8 else kept[0]
    return OutputGradient(dgate_up, dgate_up), y


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, norm: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        y, inverse, total = rms_norm_forward(x, weight, eps, delta)
        ctx.save_for_backward(total, inverse)
        ctx.weight, ctx.two_inputs = weight, delta is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, inverse = ctx.saved_tensors
        dx, dweight = rms_norm_backward(grads[0].contiguous(), total, ctx.weight, inverse)
        return dx, dx if ctx.two_inputs else None, dweight, None, None


def _heads(qkv: Tensor, rope: Rotary, plan: PrecisionPlan) -> tuple[Tensor, KeyValueCodes]:
    """Rotated queries [T, H, D], and keys and values as stored, [T, G, D]."""
    cache = dense_cache(len(qkv), rope.num_kv_heads, rope.head_dim, plan.kv, qkv.device)
    q = qk_norm_rotary_cache(
        qkv, rope.positions, rope.table, rope.norm_copies, rope.eps, rope.num_heads, cache, None,
        plan.scales,
    )  # fmt: skip
    codes = KeyValueCodes(
        cache.k_codes.squeeze(1),
        None if cache.k_scales is None else cache.k_scales.squeeze(1),
        cache.v_codes.squeeze(1),
        None if cache.v_scales is None else cache.v_scales.squeeze(1),
    )
    if rope.trace is not None:
        rope.trace("rotary", q)
        rope.trace("keys and values", stored_values(codes))
    return q, codes


def _into_qkv(
    heads: tuple[Tensor, Tensor, Tensor], qkv: Tensor, rope: Rotary
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Through rotation and QK norm: (dqkv, gradients of the norms' weights)."""
    gradients: tuple[Tensor, Tensor | None, Tensor | None] = qk_norm_rotary_backward(
        *heads, qkv, rope.positions, rope.table, rope.norm_copies, rope.eps
    )
    return gradients


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        rope: Rotary,
        tiles: QueryTiles,
        plan: PrecisionPlan,
    ) -> Tensor:
        q, codes = _heads(qkv, rope, plan)
        o, lse = attend_tiles(q, stage_keys(codes, tiles), tiles)
        ctx.save_for_backward(qkv, q, codes.k, codes.k_scales, codes.v, codes.v_scales, o, lse)
        ctx.rope, ctx.tiles = rope, tiles
        return o.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q, k, k_scales, v, v_scales, o, lse = ctx.saved_tensors
        codes = KeyValueCodes(k, k_scales, v, v_scales)
        do = grads[0].contiguous().view(q.shape)
        heads = attention_backward(do, q, codes, o, lse, ctx.tiles)
        return (*_into_qkv(heads, qkv, ctx.rope), None, None, None)


class _LibraryAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        rope: Rotary,
        plan: PrecisionPlan,
        length: int,
    ) -> Tensor:
        q, codes = _heads(qkv, rope, plan)
        o, *rest = attend_equal_lengths(q, codes.k, codes.v, length)
        ctx.save_for_backward(qkv, q, codes.k, codes.v, o, *rest)
        ctx.rope, ctx.length = rope, length
        return o.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q, k, v, o, *rest = ctx.saved_tensors
        do = grads[0].contiguous().view(q.shape)
        heads = attend_equal_lengths_backward(do, q, k, v, o, tuple(rest), ctx.length)
        return (*_into_qkv(heads, qkv, ctx.rope), None, None, None)
