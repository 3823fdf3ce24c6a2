"""The linear layers of experts: each row is multiplied by the matrix of its own expert.

The matrices of E experts are stacked along rows in one quantized weight [E * N, K]. A row of a
product has the bits that a dense linear layer with only its expert's matrix would give it, in every
format, so it does not depend on other rows, on their order or on the sizes of groups
(`precision.groups`):

    FProp   Y [R, N]   row r is the dense product of X's row and W_e, e the expert of row r
    DGrad   dX [R, K]  row r is the dense product of dY's row and W_e; a format that rounds a
                       transposed weight does so for each expert alone
    WGrad   dW_e       is the dense product of the rows of group e, in the order of the group; codes
                       along tokens have scales of their own in each group. Without rows it is 0.

The first layer of a block reads X [T, K] by token (`by_token`): X is quantized once, and the
gradients of a token's slots are added in the order of slots, in float32, and rounded once:

    dX[t] = (dX[places[t, 0]] + dX[places[t, 1]]) + ...

`combine` weights the outputs of a token's slots. Operation by operation, float32, nothing fused:

    out[t]        = ((w[t, 0] * y[places[t, 0]]) + w[t, 1] * y[places[t, 1]]) + ...   rounded once
    dy[place]     = w[t, s] * dout[t]                                      rounded to the dtype of y
    dw[t, s]      = float32(exact_sum(dout[t] * y[places[t, s]]))

An expert that all tokens share has outputs z, added behind a gate of one logit l per token:

    out[t]        = y[t] + sigmoid(l[t]) * z[t]                            rounded once
    dz[t]         = sigmoid(l[t]) * dout[t]                                rounded to the dtype of z
    dl[t]         = float32(exact_sum(dout[t] * z[t])) * (sigmoid(l[t]) * (1 - sigmoid(l[t])))

The references are loops over experts with the dense operations. Kernels have INT8 products
(`precision.triton.grouped_int8`), FP8 products (`precision.triton.grouped_fp8`) and BF16 products
(`precision.triton.grouped_bf16`), whose rows have the bits of dense layers of `run.backend=triton`
with pinned sums; cuBLAS may add in another order.

Legend: T tokens, k slots per token, R rows (T * k), E experts, K input and N output features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jetrl.precision.backend import Arithmetic, arithmetic_of
from jetrl.precision.exact import exact_sum, sigmoid
from jetrl.precision.formats import BF16, GEMMInput, StoredWeight, format_of
from jetrl.precision.gemm import coded_matmul
from jetrl.precision.gradients import Gradients, matmul_product
from jetrl.precision.groups import Groups, TokenGroups
from jetrl.precision.int8 import check_terms, int8_turned
from jetrl.precision.linear import (
    Linear,
    dgrad,
    fprop,
    quantize_for_dgrad,
    quantize_for_wgrad,
    quantize_input,
    quantize_output_gradient,
)
from jetrl.precision.plan import PrecisionPlan, Side
from jetrl.precision.quantize import QTensor


@dataclass(frozen=True)
class GroupedWeight:
    """A layer's quantized weight [E * N, K] on one side, the rows that it multiplies, and the plan.

    `by_token`: X is [T, K], and a row reads its token's; otherwise X is [R, K].
    """

    weight: StoredWeight
    groups: Groups
    plan: PrecisionPlan
    by_token: bool

    @property
    def num_outputs(self) -> int:
        """N, the output features of an expert."""
        return int(self.weight.shape[0]) // self.groups.num_experts

    @property
    def in_bf16(self) -> bool:
        """Return whether products are of BF16 values."""
        return format_of(self.weight) is BF16


def grouped_linear(
    x: Tensor, linear: Linear, groups: Groups, side: Side, by_token: bool = False
) -> Tensor:
    """Return y [R, N] of x [R, K], or [T, K] if `by_token`; `linear` stacks the experts' matrices.

    Differentiable in x and in the master weight.
    """
    assert linear.bias is None, f"{linear.name}: experts have no biases"
    if linear.quantized.formats[side].reads_masters:
        entered = x[groups.tokens.long()] if by_token else x
        weights = linear.weight.unflatten(0, (groups.num_experts, -1)).unbind(0)
        parts = [entered[rows] @ weights[expert].mT for expert, rows in groups.rows()]
        return torch.cat(parts)
    plan = linear.plan.on(side)
    grouped = GroupedWeight(linear.operand(side), groups, plan, by_token)
    return _GroupedFunction.apply(x, linear.weight, grouped, linear.out_dtype, linear.gradients)


class _GroupedFunction(torch.autograd.Function):
    """The products of a layer; the master weight is an input only for its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master: Tensor,
        grouped: GroupedWeight,
        out_dtype: torch.dtype,
        gradients: Gradients,
    ) -> Tensor:
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(x)
        ctx.master, ctx.grouped, ctx.gradients = master, grouped, gradients
        return grouped_fprop(quantize_input(x, grouped.weight, grouped.plan), grouped, out_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grouped: GroupedWeight = ctx.grouped
        dx = dw = None
        dy = grads[0].bfloat16().contiguous()
        rows, values = quantize_grouped_gradient(dy, grouped, ctx.needs_input_grad[1])
        if ctx.needs_input_grad[0]:
            dx = grouped_dgrad(rows, grouped)
            dx = sum_slots(dx, grouped.groups) if grouped.by_token else dx
        if ctx.needs_input_grad[1]:
            (x,) = ctx.saved_tensors
            dw = grouped_wgrad(values, x, grouped, ctx.master, ctx.gradients)
        return dx, dw, None, None, None


def grouped_fprop(
    x: GEMMInput, grouped: GroupedWeight, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return Y [R, N] of X from `quantize_input`, [T, K] or [R, K]."""
    groups = grouped.groups
    if (arithmetic := arithmetic_of(groups.tokens)) is not None:
        if grouped.in_bf16:
            values, matrices = _values(x, grouped)
            return arithmetic.bf16_grouped_matmul(
                values, matrices, groups, grouped.by_token, out_dtype
            )
        codes, weight = _codes(x, grouped)
        if weight.codes.dtype != torch.int8:
            assert out_dtype == torch.bfloat16, f"FP8 products are BF16, not {out_dtype}"
            return arithmetic.fp8_grouped_matmul(codes, weight, groups, grouped.by_token)
        return arithmetic.int8_grouped_matmul(codes, weight, groups, grouped.by_token, out_dtype)
    shape = (len(groups.tokens), grouped.num_outputs)
    y = torch.empty(shape, dtype=out_dtype, device=groups.tokens.device)
    for expert, rows in groups.rows():
        entered = _rows_of(x, groups.tokens[rows].long() if grouped.by_token else rows)
        y[rows] = fprop(entered, _expert(grouped, expert), grouped.plan, out_dtype)
    return y


def grouped_dgrad(dy: GEMMInput, grouped: GroupedWeight) -> Tensor:
    """Return dX, bfloat16 [R, K], of dY [R, N] from `quantize_for_dgrad`."""
    groups = grouped.groups
    if (arithmetic := arithmetic_of(groups.tokens)) is not None:
        if grouped.in_bf16:
            values, matrices = _values(dy, grouped)
            return arithmetic.bf16_grouped_dgrad(values, matrices, groups)
        codes, weight = _codes(dy, grouped)
        if codes.codes.dtype != torch.int8:
            return arithmetic.fp8_grouped_dgrad(codes, weight, groups)
        turned = int8_turned(weight, groups.num_experts)
        return arithmetic.int8_grouped_matmul(codes, turned, groups, False, torch.bfloat16)
    shape = (len(groups.tokens), int(grouped.weight.shape[1]))
    dx = torch.empty(shape, dtype=torch.bfloat16, device=groups.tokens.device)
    for expert, rows in groups.rows():
        dx[rows] = dgrad(_rows_of(dy, rows), _expert(grouped, expert))
    return dx


def quantize_grouped_gradient(
    dy: Tensor, grouped: GroupedWeight, trained: bool = True
) -> tuple[GEMMInput, Tensor | TokenGroups]:
    """Return dY, bfloat16 [R, N], for DGrad and, if the weight is `trained`, for WGrad.

    A GPU makes FP8 codes for both in one pass. Otherwise WGrad quantizes dY itself, if at all.
    """
    plan, arithmetic = grouped.plan, arithmetic_of(dy)
    in_fp8 = not (plan.gradient.integer or grouped.in_bf16)
    if arithmetic is not None and trained and in_fp8:
        return arithmetic.fp8_grouped_gradient(dy, grouped.groups, plan.scales)
    return quantize_for_dgrad(dy, grouped.weight, plan), dy


def grouped_wgrad(
    dy: Tensor | TokenGroups,
    x: Tensor,
    grouped: GroupedWeight,
    master: Tensor,
    gradients: Gradients,
) -> Tensor | None:
    """Add dW [E * N, K] to a master weight's gradient; return the gradient for autograd.

    dY is from `quantize_grouped_gradient`, X bfloat16 [T, K] or [R, K]. The products of codes are
    rounded to BF16 and added; others are added in float32.
    """
    if (arithmetic := arithmetic_of(x)) is not None:
        return _add_grouped_wgrad(arithmetic, dy, x, grouped, master, gradients)
    assert isinstance(dy, Tensor), "references quantize dY themselves"
    plan, groups, coded = grouped.plan, grouped.groups, format_of(grouped.weight).coded
    in_codes = coded and plan.gradient.coded
    if in_codes:
        total, returned = dy.new_zeros(grouped.weight.shape), None
    else:
        total, returned = gradients.buffer(master)
    of_experts = total.unflatten(0, (groups.num_experts, -1))
    for expert, rows in groups.rows():
        values = x[groups.tokens[rows].long() if grouped.by_token else rows]
        entered = quantize_for_wgrad(values, plan) if coded else values
        _, tokens = quantize_output_gradient(dy[rows], _expert(grouped, expert), plan)
        if in_codes:
            assert isinstance(tokens, QTensor), "a coded gradient is codes"
            assert isinstance(entered, QTensor), "codes of dY multiply codes of X"
            of_experts[expert] = coded_matmul(tokens.mT, entered.mT)
        else:
            matmul_product(dy[rows], entered, of_experts[expert])
    if not in_codes:
        return returned

    def add(summed: Tensor, begun: bool) -> None:
        summed.add_(total) if begun else summed.copy_(total)

    return gradients.add_in_place(master, add)


def _add_grouped_wgrad(
    arithmetic: Arithmetic,
    dy: Tensor | TokenGroups,
    x: Tensor,
    grouped: GroupedWeight,
    master: Tensor,
    gradients: Gradients,
) -> Tensor | None:
    """`grouped_wgrad` by kernels, which add to the sum themselves."""
    groups, by_token, scales = grouped.groups, grouped.by_token, grouped.plan.scales
    if isinstance(dy, TokenGroups):

        def add_fp8(total: Tensor, begun: bool) -> None:
            arithmetic.add_fp8_grouped_wgrad(total, begun, dy, x, groups, by_token, scales)

        return gradients.add_in_place(master, add_fp8)
    if grouped.in_bf16:
        total, returned = gradients.buffer(master)
        arithmetic.add_bf16_grouped_wgrad(total, dy, x, groups, by_token)
        return returned
    check_terms(len(groups.places))  # a token has at most one row per expert

    def add_int8(total: Tensor, begun: bool) -> None:
        arithmetic.add_int8_grouped_wgrad(total, begun, dy, x, groups, by_token)

    return gradients.add_in_place(master, add_int8)


def _codes(x: GEMMInput, grouped: GroupedWeight) -> tuple[QTensor, QTensor]:
    """Return an operand and the weight, of which kernels take codes only."""
    assert isinstance(x, QTensor), "kernels multiply codes"
    assert isinstance(grouped.weight, QTensor), "kernels multiply codes"
    return x, grouped.weight


def _values(x: GEMMInput, grouped: GroupedWeight) -> tuple[Tensor, Tensor]:
    """Return an operand and the weight, both BF16 values."""
    assert isinstance(x, Tensor), "BF16 weights multiply values"
    assert isinstance(grouped.weight, Tensor), "a BF16 weight is values"
    return x, grouped.weight


def _expert(grouped: GroupedWeight, expert: int) -> StoredWeight:
    """Return the weight [N, K] of one expert, a view."""
    weight, count = grouped.weight, grouped.num_outputs
    rows = slice(expert * count, (expert + 1) * count)
    if isinstance(weight, QTensor):
        height = weight.block[0]
        assert count % height == 0, f"{count} rows of an expert are not whole blocks of {height}"
        scales = weight.scales[rows.start // height : rows.stop // height]
        return replace(weight, codes=weight.codes[rows], scales=scales)
    assert isinstance(weight, Tensor), "experts are not in NVFP4"
    return weight[rows]


def _rows_of(x: GEMMInput, rows: Tensor | slice) -> GEMMInput:
    """Return some rows of X or dY, which are values, or codes with scales of each row."""
    if isinstance(x, Tensor):
        return x[rows]
    return replace(x, codes=x.codes[rows], scales=x.scales[rows])


def group_rows(chosen: Tensor, num_experts: int) -> Groups:
    """Return the groups of the experts int64 [T, k] that tokens chose; the host never waits."""
    if (arithmetic := arithmetic_of(chosen)) is not None:
        return arithmetic.group_rows(chosen, num_experts)
    return Groups.of(chosen, num_experts)


def sum_slots(rows: Tensor, groups: Groups) -> Tensor:
    """Return the sums [T, K] of rows [R, K] over each token's slots, added in float32 in order."""
    if (arithmetic := arithmetic_of(rows)) is not None:
        return arithmetic.sum_slots(rows, groups)
    places = groups.places.long()
    total = rows[places[:, 0]].float()
    for slot in range(1, places.shape[1]):
        total += rows[places[:, slot]]
    return total.to(rows.dtype)


def combine(y: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """Return the weighted sums [T, N] of outputs y [R, N] over each token's slots, differentiable.

    `weights` is float32 [T, k]. The sums are rounded once, to the dtype of y.
    """
    return _Combine.apply(y, weights, groups)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(y, weights)
        ctx.groups = groups
        if (arithmetic := arithmetic_of(y)) is not None:
            return arithmetic.combine(y, weights, groups)
        places = groups.places.long()
        total = weights[:, :1] * y[places[:, 0]].float()
        for slot in range(1, places.shape[1]):
            total += weights[:, slot, None] * y[places[:, slot]].float()
        return total.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        y, weights = ctx.saved_tensors
        if (arithmetic := arithmetic_of(y)) is not None:
            dout = grads[0].bfloat16().contiguous()
            return *arithmetic.combine_backward(dout, y, weights, ctx.groups), None
        places, dout = ctx.groups.places.long(), grads[0].float()
        dy, dweights = torch.empty_like(y), torch.empty_like(weights)
        for slot in range(places.shape[1]):
            rows = places[:, slot]
            dy[rows] = (weights[:, slot, None] * dout).to(y.dtype)
            dweights[:, slot] = exact_sum(dout * y[rows].float()).float()
        return dy, dweights, None


def add_shared(y: Tensor, shared: Tensor, gate: Tensor) -> Tensor:
    """Return y + sigmoid(gate) * shared, all [T, N] but the logits `gate` [T, 1]; differentiable.

    The sum is rounded once, to the dtype of y.
    """
    return _AddShared.apply(y, shared, gate)


class _AddShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, shared: Tensor, gate: Tensor) -> Tensor:
        factor = sigmoid(gate.float())
        ctx.save_for_backward(shared, factor)
        ctx.dtype = gate.dtype
        return (y.float() + factor * shared.float()).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shared, factor = ctx.saved_tensors
        dout = grads[0].float()
        sums = exact_sum(dout * shared.float()).float()[:, None]
        dgate = sums * (factor * (1.0 - factor))
        return grads[0], (factor * dout).to(shared.dtype), dgate.to(ctx.dtype)
