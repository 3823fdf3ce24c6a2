"""The products of experts on a GPU as one autograd function, with SwiGLU fused with quantization.

    y = down(swiglu(gate_up(x)))     x [T, D] by token, all others by the sorted rows of experts

SwiGLU writes only the codes that `down` multiplies: INT8 rows, or E4M3 in groups of 1 x 128. So
nothing but x and the output of `gate_up` is saved. Backward computes SwiGLU's output again, in the
pass over its gradient and in place of that. Bits are those of the separate operations in
`models.experts`, which run for other weights.

Legend: T tokens, R rows (T * k), D hidden size, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.backend import Kernels, device_kernels
from jetrl.models.layer import Trace, fuses, tell
from jetrl.precision.experts import (
    GroupedWeight,
    grouped_dgrad,
    grouped_fprop,
    grouped_wgrad,
    quantize_grouped_gradient,
    sum_slots,
)
from jetrl.precision.formats import format_of
from jetrl.precision.gradients import Gradients
from jetrl.precision.groups import Groups
from jetrl.precision.linear import Linear, quantize_input
from jetrl.precision.plan import Side
from jetrl.precision.quantize import QTensor, dequantize


def fuses_experts(x: Tensor, linears: tuple[Linear, Linear], side: Side) -> bool:
    """Return whether `gated_rows_fused` supports x and the layers, whose weights are codes."""
    plain = all(linear.adapter is None for linear in linears)
    return plain and fuses(x) and linears[0].quantized.formats[side].coded


def gated_rows_fused(
    x: Tensor, linears: tuple[Linear, Linear], groups: Groups, side: Side, trace: Trace | None
) -> Tensor:
    """Return down(swiglu(gate_up(x))), bfloat16 [R, D], of bfloat16 x [T, D].

    `linears` are `gate_up` and `down`.
    """
    gate_up, down = linears
    plan, weight = gate_up.plan.on(side), gate_up.operand(side)
    fixed = _Fixed(
        gate_up=GroupedWeight(weight, groups, plan, by_token=True),
        down=GroupedWeight(down.operand(side), groups, plan, by_token=False),
        scales=plan.scales if format_of(weight).has_rule else None,
        gradients=gate_up.gradients,
        trace=trace,
        kernels=device_kernels(x),
    )
    return _GatedRows.apply(x, gate_up.weight, down.weight, fixed)


def tell_slots(trace: Trace | None, name: str, rows: Tensor | QTensor, groups: Groups) -> None:
    """Pass rows to the trace by token, [T, k, ...]: their order depends on the other tokens."""
    if trace is not None:
        values = dequantize(rows) if isinstance(rows, QTensor) else rows
        tell(trace, name, values[groups.places.long()])


@dataclass(frozen=True)
class _Fixed:
    """The arguments that have no gradients; `scales` are those of codes, None for INT8 rows."""

    gate_up: GroupedWeight
    down: GroupedWeight
    scales: str | None
    gradients: Gradients
    trace: Trace | None
    kernels: Kernels


class _GatedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_up_master: Tensor, down_master: Tensor, s: _Fixed
    ) -> Tensor:
        groups, plan = s.gate_up.groups, s.gate_up.plan
        gates = grouped_fprop(quantize_input(x, s.gate_up.weight, plan), s.gate_up)
        tell_slots(s.trace, "gate_up", gates, groups)
        gated = s.kernels.swiglu_quantize(gates, s.scales)
        tell_slots(s.trace, "swiglu", gated, groups)
        ctx.save_for_backward(x, gates)
        ctx.fixed, ctx.masters = replace(s, trace=None), (gate_up_master, down_master)
        return grouped_fprop(gated, s.down)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        s: _Fixed = ctx.fixed
        x, gates = ctx.saved_tensors
        (gate_up_master, down_master), gradients = ctx.masters, s.gradients
        reads, *trained = ctx.needs_input_grad
        dx = dw_gate_up = dw_down = None
        dy = grads[0].bfloat16().contiguous()
        rows, values = quantize_grouped_gradient(dy, s.down, trained[1])
        gated = grouped_dgrad(rows, s.down)
        dgates = s.kernels.swiglu_backward(gated, gates, gated)  # overwrites it with the output
        if trained[1]:
            dw_down = grouped_wgrad(values, gated, s.down, down_master, gradients)
        del rows, values, gated
        rows, values = quantize_grouped_gradient(dgates, s.gate_up, trained[0])
        del dgates
        if reads:
            dx = sum_slots(grouped_dgrad(rows, s.gate_up), s.gate_up.groups)
        if trained[0]:
            dw_gate_up = grouped_wgrad(values, x, s.gate_up, gate_up_master, gradients)
        return dx, dw_gate_up, dw_down, None
