"""`kernels.routing.route` in plain Triton, with the bits of the reference: one program per token.

An expert's value and index form one int64 key: the value's bits, ordered like the value, above the
reversed index. So keys are unique, the largest is the next choice, and ties go to the lower index.
Sums over slots are added in order; the sum of a softmax is one of integers, which have no order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.portable.exact import exp_nonpositive, sigmoid
from jetrl.kernels.routing_rule import RoutingRule
from jetrl.precision.triton.grid import SIGN, float_bits, of_bits, sum_on_grid
from jetrl.precision.triton.portable_int8 import OPTIONS

_LARGEST = tl.constexpr(0x7FFFFFFF)
_NEVER = tl.constexpr(-(2**63))  # below every key


@triton.jit
def _keys(values, experts, inside, EXPERTS: tl.constexpr):
    """Return int64 keys that order experts by (value, -index), NaN first as in torch's sort."""
    values = tl.where(values == 0.0, 0.0, values)  # -0 equals 0
    bits = float_bits(values)
    order = tl.where(bits < 0, bits ^ _LARGEST, bits)
    order = tl.where(values != values, _LARGEST, order)
    order = tl.where(inside, order, SIGN)
    return (order.to(tl.int64) << 32) | (EXPERTS - 1 - experts).to(tl.int64)


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    chosen_ptr,
    weights_ptr,
    scores_ptr,
    E,
    SLOTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    FLOOR: tl.constexpr,
    SCALE: tl.constexpr,
    BIASED: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Score all experts of a token, and write the SLOTS that are chosen and the weights."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    inside = experts < E
    places = token * E + experts
    logits = tl.load(logits_ptr + places, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = sigmoid(logits)
    else:
        powers = exp_nonpositive(logits - tl.max(logits, 0))
        powers = tl.where(inside, powers, 0.0)
        scores = tl.math.div_rn(powers, tl.zeros_like(powers) + sum_on_grid(powers))
    tl.store(scores_ptr + places, scores, mask=inside)
    values = logits
    if BIASED:
        values = scores + tl.load(bias_ptr + experts, mask=inside, other=0.0)
    keys = _keys(values, experts, inside, EXPERTS)
    slots = tl.arange(0, PLACES)
    chosen = tl.zeros((PLACES,), tl.int64)
    weights = tl.zeros((PLACES,), tl.float32)
    total = 0.0
    for slot in tl.static_range(SLOTS):
        best = tl.max(keys, 0)
        expert = EXPERTS - 1 - (best & (EXPERTS - 1))
        own = experts == expert
        keys = tl.where(own, _NEVER, keys)
        # A sum of bits picks the score, also if it is NaN.
        score = of_bits(tl.sum(tl.where(own, float_bits(scores), 0), 0))
        total = score if slot == 0 else total + score
        chosen = tl.where(slots == slot, expert, chosen)
        weights = tl.where(slots == slot, score, weights)
    if NORMALIZED:
        weights = tl.math.div_rn(weights, tl.zeros_like(weights) + (total + FLOOR))
    if SCALE != 1.0:
        weights = weights * SCALE
    weights = weights.to(logits_ptr.dtype.element_ty).to(tl.float32)
    at = token * SLOTS + slots
    tl.store(chosen_ptr + at, chosen, mask=slots < SLOTS)
    tl.store(weights_ptr + at, weights, mask=slots < SLOTS)


@triton.jit
def _route_backward_kernel(
    dweights_ptr,
    scores_ptr,
    chosen_ptr,
    dlogits_ptr,
    E,
    SLOTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    FLOOR: tl.constexpr,
    SCALE: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Write the gradients of a token's logits; scores of experts not chosen have none."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    inside = experts < E
    own_scores = scores_ptr + token * E
    scores = tl.load(own_scores + experts, mask=inside, other=0.0)
    chosen_ptr += token * SLOTS
    dweights_ptr += token * SLOTS
    # Each pass over slots reads the token's few values again.
    total = 0.0
    for slot in tl.static_range(SLOTS):
        score = tl.load(own_scores + tl.load(chosen_ptr + slot))
        total = score if slot == 0 else total + score
    total = total + FLOOR
    common = 0.0
    for slot in tl.static_range(SLOTS):
        score = tl.load(own_scores + tl.load(chosen_ptr + slot))
        grad = tl.load(dweights_ptr + slot) * SCALE
        term = grad * tl.math.div_rn(score, total)
        common = term if slot == 0 else common + term
    dscores = tl.zeros((EXPERTS,), tl.float32)
    weighted = 0.0
    for slot in tl.static_range(SLOTS):
        expert = tl.load(chosen_ptr + slot)
        grad = tl.load(dweights_ptr + slot) * SCALE
        if NORMALIZED:
            grad = tl.math.div_rn(grad - common, total)
        term = tl.load(own_scores + expert) * grad
        weighted = term if slot == 0 else weighted + term
        dscores = tl.where(experts == expert, grad, dscores)
    if SIGMOID:
        dlogits = dscores * (scores * (1.0 - scores))
    else:
        dlogits = scores * (dscores - weighted)
    dlogits = dlogits.to(dlogits_ptr.dtype.element_ty)
    tl.store(dlogits_ptr + token * E + experts, dlogits, mask=inside)


def route(logits: Tensor, rule: RoutingRule, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return `kernels.routing.route` of logits [T, E], and the scores of all experts [T, E]."""
    (tokens, experts), slots = logits.shape, rule.num_chosen
    assert logits.is_contiguous(), f"strides {logits.stride()}"
    assert slots <= experts, f"{slots} of {experts} experts"
    chosen = torch.empty(tokens, slots, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, slots, dtype=torch.float32, device=logits.device)
    scores = torch.empty(tokens, experts, dtype=torch.float32, device=logits.device)
    if tokens:
        # A kernel cannot take None, so any tensor is a placeholder.
        _route_kernel[(tokens,)](
            logits,
            scores if bias is None else bias,
            chosen,
            weights,
            scores,
            experts,
            slots,
            rule.scores == "sigmoid",
            rule.normalized,
            rule.floor,
            rule.scale,
            bias is not None,
            triton.next_power_of_2(experts),
            triton.next_power_of_2(slots),
            num_warps=1,
            **OPTIONS,
        )
    return chosen, weights, scores


def route_backward(
    dweights: Tensor, scores: Tensor, chosen: Tensor, rule: RoutingRule, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the logits [T, E] in `dtype`, of float32 dweights [T, k]."""
    (tokens, experts), slots = scores.shape, rule.num_chosen
    dlogits = torch.empty(tokens, experts, dtype=dtype, device=scores.device)
    if tokens:
        _route_backward_kernel[(tokens,)](
            dweights.contiguous(),
            scores,
            chosen,
            dlogits,
            experts,
            slots,
            rule.scores == "sigmoid",
            rule.normalized,
            rule.floor,
            rule.scale,
            triton.next_power_of_2(experts),
            num_warps=1,
            **OPTIONS,
        )
    return dlogits
