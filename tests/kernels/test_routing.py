"""The router: choice with pinned ties, weights in the family's order, and gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.kernels.bits import random as normal
from tests.kernels.interpreted import interpreted
from transformers.models.dots1.modeling_dots1 import Dots1TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from jetrl.kernels.routing import route, router_scores
from jetrl.kernels.routing_rule import RoutingRule


def test_equal_logits_are_chosen_by_index() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.5, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]]).bfloat16()
    chosen, _ = route(logits, RoutingRule(2))
    assert chosen.tolist() == [[1, 2], [0, 1]]
    wide = normal(300, 128).mul(4).round().bfloat16()  # many ties
    chosen, _ = route(wide, RoutingRule(8))
    for row, found in zip(wide.tolist(), chosen.tolist(), strict=True):
        assert found == sorted(range(128), key=lambda e: (-row[e], e))[:8]


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = normal(63, 37).bfloat16()
    chosen, weights = route(logits, RoutingRule(3))
    for row in (0, 17, 62):
        alone = route(logits[row : row + 1], RoutingRule(3))
        assert torch.equal(alone[0], chosen[row : row + 1])
        assert torch.equal(alone[1], weights[row : row + 1])


@pytest.mark.parametrize("normalized", [True, False])
def test_weights_are_those_of_qwen3(normalized: bool) -> None:
    config = SimpleNamespace(
        num_experts_per_tok=4, num_experts=32, norm_topk_prob=normalized, hidden_size=64
    )
    router = Qwen3MoeTopKRouter(config)
    router.weight.data = normal(32, 64, seed=1)
    logits, expected, experts = router(normal(50, 64))
    chosen, weights = route(logits, RoutingRule(4, normalized=normalized))
    assert torch.equal(chosen, experts)
    # Two exponentials of 1 ulp and a sum of 32 terms against the library's.
    assert (weights - expected).abs().max() <= 40 * 2.0**-24 * expected.max()
    assert bool(((weights.sum(1) - 1).abs() < 1e-6).all()) is normalized


def test_weights_are_those_of_sigmoids_with_a_bias_for_choice() -> None:
    rule = RoutingRule(4, "sigmoid", floor=1e-20, scale=2.5)
    config = SimpleNamespace(
        num_experts_per_tok=4, num_local_experts=32, hidden_size=64, norm_topk_prob=True,
        routed_scaling_factor=2.5, n_group=1, topk_group=1,
    )  # fmt: skip
    router = Dots1TopkRouter(config)
    router.weight.data, bias = normal(32, 64, seed=1), normal(32, seed=2)
    router.e_score_correction_bias.copy_(bias)
    logits, expected, experts = router(normal(50, 64))
    chosen, weights = route(logits, rule, bias)
    order = experts.argsort(1)
    assert torch.equal(chosen.sort(1).values, experts.gather(1, order))
    found = weights.gather(1, chosen.argsort(1))
    assert (found - expected.gather(1, order)).abs().max() <= 16 * 2.0**-24 * 2.5
    assert not torch.equal(chosen, route(logits, rule)[0])  # the bias matters


@pytest.mark.parametrize(
    "rule",
    [
        RoutingRule(3),
        RoutingRule(3, normalized=False),
        RoutingRule(3, "sigmoid", floor=1e-20, scale=2.5),
        RoutingRule(1, "sigmoid", normalized=False),
    ],
)
def test_gradients_are_those_of_the_formula(rule: RoutingRule) -> None:
    logits, dweights = normal(40, 9).requires_grad_(), normal(40, rule.num_chosen, seed=3)
    chosen, weights = route(logits, rule)
    weights.backward(dweights)
    wide = logits.detach().double().requires_grad_()
    scores = wide.softmax(1) if rule.scores == "softmax" else wide.sigmoid()
    expected = scores.gather(1, chosen)
    if rule.normalized:
        expected = expected / (expected.sum(1, keepdim=True) + rule.floor)
    (expected * rule.scale).backward(dweights.double())
    assert (logits.grad - wide.grad).abs().max() <= 2.0**-20 * wide.grad.abs().max()


def test_weights_have_the_dtype_of_logits_and_scores_do_not() -> None:
    logits = normal(20, 16).bfloat16()
    _, weights = route(logits, RoutingRule(4))
    assert torch.equal(weights, weights.bfloat16().float())
    assert not torch.equal(router_scores(logits, RoutingRule(4)).bfloat16().float(), weights)


def test_kernels_have_the_bits_of_their_references() -> None:
    compared = interpreted("interpreted_routing.py")
    assert len(compared) == 24
    assert {case: n for case, n in compared.items() if n} == {}
