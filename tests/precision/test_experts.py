"""Grouped products have the bits of the dense layer of each expert, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from tests.kernels.bits import random as normal
from torch import Tensor, nn

from jetrl.precision import PrecisionPlan
from jetrl.precision.adapter_experts import adapted_grouped_linear
from jetrl.precision.adapter_weight import AdapterShape, AdapterWeight
from jetrl.precision.experts import add_shared, combine, grouped_linear, sum_slots
from jetrl.precision.gradients import Gradients
from jetrl.precision.groups import Groups
from jetrl.precision.linear import Linear
from jetrl.precision.quantized_weight import QuantizedWeight

EXPERTS, N, K = 5, 128, 192
PLANS = ["bf16", "mixed", "jet", "unified", "int8", "integer"]


def layer(plan: PrecisionPlan, master: Tensor) -> Linear:
    formats = plan.linear_formats(0, 1)
    roundings = {side: plan.rounding(side, format) for side, format in formats.items()}
    # The name is the dithering's seed, which tells stacked rows from those of one expert.
    plain = {side: rounding._replace(dithered=False) for side, rounding in roundings.items()}
    weight = QuantizedWeight("test", nn.Parameter(master.clone()), formats, plain)
    out_dtype = torch.float32 if plan.reads_masters else torch.bfloat16
    return Linear(weight, None, plan, out_dtype, Gradients())


def chosen(kind: str, tokens: int = 40) -> Tensor:
    if kind == "one has all":
        return torch.full((tokens, 1), 3)
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    scores[:, 1] = -1.0  # an expert without rows
    scores[:-1, 4] = -0.5  # and one with a single row, the last token's
    return scores.argsort(1, descending=True)[:, :3]


def test_rows_are_sorted_by_expert_token_and_slot() -> None:
    experts = chosen("some", 63)
    groups = Groups.of(experts, EXPERTS)
    rows = sorted((int(e), t, s) for t, own in enumerate(experts) for s, e in enumerate(own))
    assert groups.tokens.tolist() == [token for _, token, _ in rows]
    assert groups.ends.tolist() == [sum(e <= last for e, _, _ in rows) for last in range(EXPERTS)]
    assert all(groups.places[t, s] == row for row, (_, t, s) in enumerate(rows))
    assert dict(groups.rows()).keys() == {0, 2, 3, 4}


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("kind", ["some", "one has all"])
@pytest.mark.parametrize("preset", PLANS)
def test_every_row_has_the_dense_bits(preset: str, kind: str, by_token: bool) -> None:
    check_dense_bits(PrecisionPlan.preset(preset), kind, by_token, "cpu")


def check_dense_bits(plan: PrecisionPlan, kind: str, by_token: bool, device: str) -> None:
    """Compare a grouped layer with the dense layers of its experts, forward and backward."""
    experts = chosen(kind).to(device)
    groups = Groups.of(experts, EXPERTS)
    masters = (normal(EXPERTS * N, K) / math.sqrt(K)).to(device)
    x = normal(len(experts) if by_token else experts.numel(), K, seed=2).bfloat16().to(device)
    dy = normal(experts.numel(), N, seed=3).bfloat16().to(device)
    grouped = layer(plan, masters)
    entered = x.clone().requires_grad_()
    with torch.no_grad():
        sampled = grouped_linear(entered, grouped, groups, "rollout", by_token)
    y = grouped_linear(entered, grouped, groups, "train", by_token)
    y.backward(dy)
    found_dx = torch.zeros(experts.numel(), K, dtype=torch.bfloat16, device=device)
    for expert, rows in groups.rows():
        dense = layer(plan, masters[expert * N : (expert + 1) * N])
        own = x[groups.tokens[rows].long()] if by_token else x[rows]
        own = own.clone().requires_grad_()
        assert torch.equal(sampled[rows], dense(own.detach(), "rollout"))
        whole = dense(own, "train")
        assert torch.equal(y[rows], whole)
        whole.backward(dy[rows])
        found_dx[rows] = own.grad
        assert torch.equal(grouped.weight.grad[expert * N : (expert + 1) * N], dense.weight.grad)
    assert torch.equal(entered.grad, sum_slots(found_dx, groups) if by_token else found_dx)
    if kind == "some":
        assert not grouped.weight.grad[N : 2 * N].any()
        assert grouped.weight.grad[4 * N :].any()


def test_weights_in_fp32_have_the_gradients_of_autograd() -> None:
    groups = Groups.of(chosen("some"), EXPERTS)
    linear = layer(PrecisionPlan.preset("fp32"), normal(EXPERTS * N, K))
    x = normal(40, K, seed=2).requires_grad_()
    y = grouped_linear(x, linear, groups, "train", by_token=True)
    y.square().sum().backward()
    copied, weight = x.detach().clone().requires_grad_(), linear.weight.detach().requires_grad_()
    matrices = weight.unflatten(0, (EXPERTS, N))
    expert_of = torch.bucketize(torch.arange(len(y)), groups.ends, right=True)
    expected = torch.einsum("rk,rnk->rn", copied[groups.tokens.long()], matrices[expert_of])
    grads = torch.autograd.grad(expected.square().sum(), [copied, weight])
    # Sums of at most K * N terms in float32, in another order.
    for found, true in zip([y, x.grad, linear.weight.grad], [expected, *grads], strict=True):
        assert (found - true).norm() <= 1e-5 * true.norm()


def test_slots_are_added_in_order() -> None:
    groups = Groups.of(chosen("some"), EXPERTS)
    y = normal(120, 7, seed=4).bfloat16().requires_grad_()
    weights = torch.rand(40, 3, generator=torch.Generator().manual_seed(5)).requires_grad_()
    out = combine(y, weights, groups)
    dout = normal(40, 7, seed=6).bfloat16()
    out.backward(dout)
    for token, places in enumerate(groups.places.tolist()):
        parts = [weights[token, s] * y[place].float() for s, place in enumerate(places)]
        assert torch.equal(out[token], ((parts[0] + parts[1]) + parts[2]).bfloat16())
        rows = [y[place].float() for place in places]
        assert torch.equal(sum_slots(y, groups)[token], ((rows[0] + rows[1]) + rows[2]).bfloat16())
        for slot, place in enumerate(places):
            expected = (weights[token, slot] * dout[token].float()).bfloat16()
            assert torch.equal(y.grad[place], expected)
            true = float(dout[token].double() @ y.detach()[place].double())
            # Each term is on a grid of 2**-30 of the largest; the sum is rounded to 24 bits.
            bound = 2.0**-24 * abs(true) + 7 * 2.0**-30 * float(
                (dout[token] * y.detach()[place]).abs().max()
            )
            assert abs(float(weights.grad[token, slot]) - true) <= bound


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("preset", ["fp32", "bf16", "unified", "int8"])
def test_adapters_of_experts_have_the_dense_bits(preset: str, by_token: bool) -> None:
    """Both halves of experts 0 to 3, one of expert 2, none of expert 4."""
    plan = PrecisionPlan.preset(preset)
    half = N // 2
    firsts = [at for at in range(0, 4 * N, half) if at != 2 * N]
    masters = normal(EXPERTS * N, K) / math.sqrt(K)
    a, b = normal(len(firsts) * 8, K, seed=5) / K, normal(len(firsts) * half, 8, seed=6)
    dtype = torch.float32 if plan.reads_masters else torch.bfloat16

    def adapted(own: Tensor, own_a: Tensor, own_b: Tensor, at: list[int]) -> Linear:
        shape = AdapterShape(8, 0.5, len(own), K, tuple((first, half) for first in at))
        made = layer(plan, own)
        made.weight.requires_grad_(False)
        factors = (nn.Parameter(own_a.clone()), nn.Parameter(own_b.clone()))
        made.adapter = AdapterWeight("test", *factors, shape, dtype)
        return made

    experts = chosen("some")
    experts[:5, 0] = 4  # rows of an expert without an adapter
    groups = Groups.of(experts, EXPERTS)
    x = normal(len(experts) if by_token else experts.numel(), K, seed=2).to(dtype)
    dy = normal(experts.numel(), N, seed=3).to(dtype)
    grouped, entered = adapted(masters, a, b, firsts), x.clone().requires_grad_()
    y = adapted_grouped_linear(entered, grouped, groups, "train", by_token)
    y.backward(dy)
    dx = torch.zeros(experts.numel(), K, dtype=dtype)
    for expert, rows in groups.rows():
        own = [i for i, at in enumerate(firsts) if expert * N <= at < (expert + 1) * N]
        matrix = masters[expert * N : (expert + 1) * N]
        dense = layer(plan, matrix)
        dense.weight.requires_grad_(False)
        if own:
            of_a, of_b = (slice(own[0] * w, (own[-1] + 1) * w) for w in (8, half))
            at = [firsts[i] - expert * N for i in own]
            dense = adapted(matrix, a[of_a], b[of_b], at)
        values = (x[groups.tokens[rows].long()] if by_token else x[rows]).requires_grad_()
        whole = dense(values, "train")
        whole.backward(dy[rows])
        dx[rows] = values.grad
        same = torch.equal if preset != "fp32" else torch.allclose  # the library's sums
        assert same(y[rows], whole)
        if own:
            assert same(grouped.adapter.a.grad[of_a], dense.adapter.a.grad)
            assert same(grouped.adapter.b.grad[of_b], dense.adapter.b.grad)
    expected = sum_slots(dx, groups) if by_token else dx
    assert torch.equal(entered.grad, expected) or preset == "fp32"
    assert (entered.grad - expected).norm() <= 1e-5 * expected.norm()


def test_a_shared_expert_is_added_behind_its_gate() -> None:
    y, shared = (normal(33, 70, seed=i).bfloat16().requires_grad_() for i in (7, 8))
    gate, dout = normal(33, 1, seed=9).bfloat16().requires_grad_(), normal(33, 70).bfloat16()
    out = add_shared(y, shared, gate)
    out.backward(dout)
    wide = [x.detach().double().requires_grad_() for x in (y, shared, gate)]
    true = wide[0] + wide[2].sigmoid() * wide[1]
    true.backward(dout.double())
    # One rounding to BF16 each, and a few in float32.
    for found, expected in [
        (out, true),
        *((x.grad, w.grad) for x, w in zip((shared, gate), wide[1:], strict=True)),
    ]:
        assert bool(
            ((found - expected).abs() <= (2.0**-8 + 2.0**-20) * expected.abs() + 1e-5).all()
        )
    assert torch.equal(y.grad, dout)
