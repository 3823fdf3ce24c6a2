"""Rows of experts in plain Triton: `precision.groups`, and sums over a token's slots.

Rows are sorted by counting: the program of an expert reads all choices, counts those of lower
experts, and numbers its own in order. So the order is a function of the choices alone, without
atomics, in one launch, where a radix sort of torch has about eight.

`combine`, its backward and `sum_slots` have a program per token or row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.precision.groups import Groups
from jetrl.precision.triton.grid import sum_on_grid, wide
from jetrl.precision.triton.layout import cdiv
from jetrl.precision.triton.portable_int8 import OPTIONS

_CHOICES = 4096  # read at a time; changes no result
_COLUMNS = 1024  # of a sum over slots, per program


@triton.jit(do_not_specialize=["num_rows"])
def _sort_kernel(
    chosen_ptr,
    tokens_ptr,
    ends_ptr,
    places_ptr,
    num_rows,
    SLOTS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """Write the rows of one expert, in the order of tokens and slots."""
    expert = tl.program_id(0)
    lower = tl.zeros((CHOICES,), tl.int32)
    own = tl.zeros((CHOICES,), tl.int32)
    for first in range(0, num_rows, CHOICES):
        slots = first + tl.arange(0, CHOICES)
        chosen = tl.load(chosen_ptr + slots, mask=slots < num_rows, other=tl.num_programs(0))
        lower += (chosen < expert).to(tl.int32)
        own += (chosen == expert).to(tl.int32)
    start = tl.sum(lower, 0)
    tl.store(ends_ptr + expert, start + tl.sum(own, 0))
    for first in range(0, num_rows, CHOICES):
        slots = first + tl.arange(0, CHOICES)
        chosen = tl.load(chosen_ptr + slots, mask=slots < num_rows, other=tl.num_programs(0))
        mine = chosen == expert
        count = mine.to(tl.int32)
        places = start + tl.cumsum(count, 0) - 1
        tl.store(places_ptr + slots, places, mask=mine)
        tl.store(tokens_ptr + places, slots // SLOTS, mask=mine)
        start += tl.sum(count, 0)


@triton.jit
def _slots_kernel(
    rows_ptr,
    weights_ptr,
    places_ptr,
    out_ptr,
    N,
    SLOTS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the rows of a token's slots in order, each times its weight if WEIGHTED."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < N
    total = tl.zeros((COLUMNS,), tl.float32)
    for slot in tl.static_range(SLOTS):
        place = tl.load(places_ptr + token * SLOTS + slot).to(tl.int64)
        row = wide(rows_ptr + place * N + columns, inside)
        if WEIGHTED:
            row = row * tl.load(weights_ptr + token * SLOTS + slot)
        # The sum begins with the first row: 0 + -0 would be 0.
        total = row if slot == 0 else total + row
    tl.store(out_ptr + token * N + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _combine_backward_kernel(
    dout_ptr,
    y_ptr,
    weights_ptr,
    places_ptr,
    dy_ptr,
    dweights_ptr,
    N,
    SLOTS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Write a slot's row of dY, and the gradient of its weight, a sum on a grid."""
    slot = tl.program_id(0)
    columns = tl.arange(0, PADDED)
    inside = columns < N
    place = tl.load(places_ptr + slot).to(tl.int64)
    dout = wide(dout_ptr + (slot // SLOTS).to(tl.int64) * N + columns, inside)
    dy = tl.load(weights_ptr + slot) * dout
    tl.store(dy_ptr + place * N + columns, dy.to(dy_ptr.dtype.element_ty), mask=inside)
    product = dout * wide(y_ptr + place * N + columns, inside)
    tl.store(dweights_ptr + slot, sum_on_grid(product))


def group_rows(chosen: Tensor, num_experts: int) -> Groups:
    """`precision.groups.Groups.of`: the groups of the experts int [T, k] that tokens chose."""
    assert chosen.is_contiguous(), f"strides {chosen.stride()}"
    device = chosen.device
    tokens = torch.empty(chosen.numel(), dtype=torch.int32, device=device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    places = torch.empty(chosen.shape, dtype=torch.int32, device=device)
    _sort_kernel[(num_experts,)](
        chosen,
        tokens,
        ends,
        places,
        chosen.numel(),
        chosen.shape[1],
        min(_CHOICES, triton.next_power_of_2(max(chosen.numel(), 128))),
        num_warps=8,
    )
    return Groups(tokens, ends, places)


def sum_slots(rows: Tensor, groups: Groups) -> Tensor:
    """`precision.experts.sum_slots`: [T, N] of bfloat16 rows [R, N]."""
    return _sums(rows, None, groups.places)


def combine(y: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """The forward of `precision.experts.combine`: [T, N] of bfloat16 y [R, N]."""
    return _sums(y, weights, groups.places)


def _sums(rows: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    """Return the sums [T, N] over each token's slots."""
    (tokens, slots), width = places.shape, rows.shape[1]
    assert rows.is_contiguous(), f"strides {rows.stride()}"
    out = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)
    if tokens:
        # A kernel cannot take None, so any tensor is a placeholder.
        _slots_kernel[(tokens, cdiv(width, _COLUMNS))](
            rows,
            rows if weights is None else _checked(weights, places),
            places,
            out,
            width,
            slots,
            weights is not None,
            _COLUMNS,
            num_warps=4,
            **OPTIONS,
        )
    return out


def combine_backward(
    dout: Tensor, y: Tensor, weights: Tensor, groups: Groups
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `combine`: dY, bfloat16 [R, N], and of the weights, float32 [T, k].

    dout is bfloat16 [T, N], contiguous.
    """
    rows, width = y.shape
    for tensor in (dout, y):
        assert (tensor.dtype, tensor.stride(1)) == (torch.bfloat16, 1), f"{tensor.dtype}"
        assert tensor.is_contiguous(), f"strides {tensor.stride()}"
    dy, dweights = torch.empty_like(y), torch.empty_like(weights)
    padded = triton.next_power_of_2(width)
    if rows:
        _combine_backward_kernel[(rows,)](
            dout,
            y,
            _checked(weights, groups.places),
            groups.places,
            dy,
            dweights,
            width,
            groups.places.shape[1],
            padded,
            num_warps=max(1, min(8, padded // 512)),
            **OPTIONS,
        )
    return dy, dweights


def _checked(weights: Tensor, places: Tensor) -> Tensor:
    """Return the weights of slots after checking their layout."""
    assert (weights.dtype, weights.shape) == (torch.float32, places.shape), f"{weights.dtype}"
    assert weights.is_contiguous(), f"strides {weights.stride()}"
    return weights
