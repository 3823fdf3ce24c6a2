"""Low-rank adapters of experts: the linear layers of `precision.experts` with an A and a B each.

The rows of an expert have the bits of a dense layer with that expert's matrix and adapter
(`precision.adapter`), forward and backward. An expert may have no adapter. Weights are frozen.

On a GPU all experts must have the same parts. Each sum is one loop, in order, so the bits of a row
do not depend on the batch; a dense layer adds chunks of K in another order:

    u = bfloat16(x A_e^T)                      one grouped product
    y = y + bfloat16(u_part (s B_e)^T)         one per part

Legend: T tokens, R rows (T * k), K input and N output features of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.precision.adapter import adapter_gradients, add_adapter, project_down, project_up
from jetrl.precision.adapter_weight import AdapterWeight
from jetrl.precision.backend import arithmetic_of
from jetrl.precision.experts import (
    GroupedWeight,
    grouped_dgrad,
    grouped_fprop,
    grouped_linear,
    sum_slots,
)
from jetrl.precision.gemm import free_matmul
from jetrl.precision.groups import Groups
from jetrl.precision.linear import Linear, quantize_for_dgrad, quantize_input
from jetrl.precision.plan import Side


def adapted_grouped_linear(
    x: Tensor, linear: Linear, groups: Groups, side: Side, by_token: bool = False
) -> Tensor:
    """Return `grouped_linear` of the same arguments plus the layer's adapter, if it has one.

    Differentiable in x, and in A and B in place of the weight.
    """
    adapter = linear.adapter
    if adapter is None:
        return grouped_linear(x, linear, groups, side, by_token)
    grouped = GroupedWeight(linear.operand(side), groups, linear.plan.on(side), by_token)
    if arithmetic_of(x) is not None and not adapter.shape.parts_of_each(groups.num_experts):
        raise UserError(
            f"{linear.name}: adapter.targets names layers of some experts, and a GPU needs all or "
            "none: use gate_proj, up_proj or down_proj, or run.device=cpu"
        )
    if adapter.in_fp32:
        y = grouped_linear(x, linear, groups, side, by_token)
        values = x[groups.tokens.long()] if by_token else x
        return torch.cat([_added(y[r], values[r], adapter, e) for e, r in groups.rows()])
    return _AdaptedGroupedFunction.apply(x, adapter.a, adapter.b, grouped, adapter)


def _added(y: Tensor, x: Tensor, adapter: AdapterWeight, expert: int) -> Tensor:
    """Return y [r, N] of one expert's rows plus its adapter's part, if it has one."""
    part = adapter.of_rows(expert * y.shape[1], (expert + 1) * y.shape[1])
    return y if part is None else add_adapter(y, x, part)


class _AdaptedGroupedFunction(torch.autograd.Function):
    """Frozen experts and their adapters; `a` and `b` are inputs only for their gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, grouped: GroupedWeight, adapter: AdapterWeight
    ) -> Tensor:
        y = grouped_fprop(quantize_input(x, grouped.weight, grouped.plan), grouped)
        ctx.grouped, ctx.adapter = grouped, adapter
        if (arithmetic := arithmetic_of(x)) is not None:
            groups, by_token = grouped.groups, grouped.by_token
            u = arithmetic.bf16_grouped_matmul(x, adapter.down, groups, by_token, torch.bfloat16)
            for of_y, of_u, up in _parts(grouped, adapter):
                arithmetic.add_bf16_grouped_product(y[:, of_y], u[:, of_u], up, groups, False)
            ctx.save_for_backward(x, u)
            return y
        products = []
        for rows, values, part in _adapted_rows(x, grouped, adapter):
            products.append(project_down(values, part))
            y[rows] = project_up(y[rows], products[-1], part)
        ctx.save_for_backward(x, *products)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *products = ctx.saved_tensors
        grouped, adapter, dy = ctx.grouped, ctx.adapter, grads[0].bfloat16().contiguous()
        dx = grouped_dgrad(quantize_for_dgrad(dy, grouped.weight, grouped.plan), grouped)
        if arithmetic_of(x) is not None:
            da, db = _add_gradients(dx, dy, x, products[0], grouped, adapter)
            dx = sum_slots(dx, grouped.groups) if grouped.by_token else dx
            return dx, da, db, None, None
        da, db = torch.zeros_like(adapter.a), torch.zeros_like(adapter.b)
        parts = _adapted_rows(x, grouped, adapter)
        for u, (rows, values, part) in zip(products, parts, strict=True):
            da_part, db_part, du = adapter_gradients(dy[rows], values, u, part)
            dx[rows] += free_matmul(du, part.down)
            # A part's place among the parts of all experts.
            at = part.a.storage_offset() // adapter.a.shape[1]
            da[at : at + len(da_part)] = da_part
            at = part.b.storage_offset() // adapter.b.shape[1]
            db[at : at + len(db_part)] = db_part
        dx = sum_slots(dx, grouped.groups) if grouped.by_token else dx
        return dx, da, db, None, None


def _adapted_rows(
    x: Tensor, grouped: GroupedWeight, adapter: AdapterWeight
) -> Iterator[tuple[slice, Tensor, AdapterWeight]]:
    """Yield the rows of each expert with an adapter, their values of X, and that adapter."""
    groups, count = grouped.groups, grouped.num_outputs
    for expert, rows in groups.rows():
        part = adapter.of_rows(expert * count, (expert + 1) * count)
        if part is not None:
            yield rows, x[groups.tokens[rows].long() if grouped.by_token else rows], part


def _parts(grouped: GroupedWeight, adapter: AdapterWeight) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the columns of y and of u of each part of an expert, and all its s B, [E, n, R]."""
    experts, width = grouped.groups.num_experts, adapter.shape.padded_rank
    up = adapter.up.unflatten(0, (experts, -1))
    for part, (first, count) in enumerate(adapter.shape.parts_of_each(experts)):
        of_y = slice(first, first + count)
        yield of_y, slice(part * width, (part + 1) * width), up[:, of_y]


def _add_gradients(
    dx: Tensor, dy: Tensor, x: Tensor, u: Tensor, grouped: GroupedWeight, adapter: AdapterWeight
) -> tuple[Tensor, Tensor]:
    """Add the gradient of x by kernels to dx, bfloat16 [R, K]; return those of A and B, float32."""
    arithmetic, groups, shape = arithmetic_of(x), grouped.groups, adapter.shape
    assert arithmetic is not None, "experts and their references multiply one by one"
    experts, width = groups.num_experts, shape.rank
    du = torch.zeros_like(u)
    for of_y, of_u, up in _parts(grouped, adapter):
        arithmetic.add_bf16_grouped_product(du[:, of_u], dy[:, of_y], up, groups, True)
    down = adapter.down.unflatten(0, (experts, -1))
    arithmetic.add_bf16_grouped_product(dx, du, down, groups, True)
    da = torch.zeros_like(adapter.down, dtype=torch.float32)
    arithmetic.add_bf16_grouped_wgrad(da, du, x, groups, grouped.by_token)
    da = da.view(len(shape.parts), shape.padded_rank, -1)[:, :width].reshape(shape.a_shape)
    # The products of all pairs of parts: a tile has room for them.
    pairs = torch.zeros(len(adapter.up), u.shape[1], dtype=torch.float32, device=x.device)
    arithmetic.add_bf16_grouped_wgrad(pairs, dy, u, groups, False)
    pairs = pairs.unflatten(0, (experts, -1))
    own = [pairs[:, of_y, of_u][..., :width] for of_y, of_u, _ in _parts(grouped, adapter)]
    return da, torch.cat(own, 1).reshape(shape.b_shape).mul_(shape.scale)
