"""Routers in training: the load-balancing loss, metrics of loads, and routes that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.kernels.bits import random as normal
from tests.training.shared import draw, make_policy, settings

from jetrl.errors import UserError
from jetrl.kernels.routing import balance_loss, route, router_entropy, row_shares
from jetrl.kernels.routing_rule import RoutingRule
from jetrl.models.experts import Routes, observed_routes
from jetrl.training.checkpoint import Checkpoints
from jetrl.training.routes import share_of_other_routes
from jetrl.training.sft import SftTrainer
from jetrl.training.trainer import Trainer
from jetrl.types import Example

EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
}


@pytest.mark.parametrize("rule", [RoutingRule(2), RoutingRule(2, "sigmoid")])
def test_the_loss_and_its_gradient_are_those_of_the_formula(rule: RoutingRule) -> None:
    logits = normal(63, 9).requires_grad_()
    chosen, _ = route(logits, rule)
    loss = balance_loss(logits, chosen, rule)
    (loss * 3.0).backward()
    wide = logits.detach().double().requires_grad_()
    scores = wide.softmax(1)
    if rule.scores == "sigmoid":
        scores = wide.sigmoid() / wide.sigmoid().sum(1, keepdim=True)
    rows = torch.nn.functional.one_hot(chosen, 9).double().mean((0, 1))
    expected = 9 * (rows * scores.mean(0)).sum()
    (expected * 3.0).backward()
    # Sums of 63 and 9 float32 terms, added exactly: a few roundings of 2**-24 each.
    assert abs(loss.item() - expected.item()) <= 2.0**-21 * expected.item()
    assert (logits.grad - wide.grad).abs().max() <= 2.0**-20 * wide.grad.abs().max()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_balanced_router_has_the_least_loss(scores: Literal["softmax", "sigmoid"]) -> None:
    chosen = torch.arange(12).view(6, 2) % 6
    rule = RoutingRule(2, scores)
    logits = torch.full((6, 6), 1.5, requires_grad=True)
    loss = balance_loss(logits, chosen, rule)
    loss.backward()
    assert loss.item() == pytest.approx(1.0, abs=1e-6)
    assert logits.grad.abs().max() <= 2.0**-22  # lower scores for all experts gain nothing
    assert torch.equal(row_shares(chosen, 6), torch.full((6,), 1 / 6))
    one = torch.tensor([[20.0, -20, -20, -20, -20, -20]]).repeat(6, 1)
    assert balance_loss(one, torch.zeros(6, 1, dtype=torch.int64), rule).item() > 5.9


def test_the_entropy_is_that_of_the_scores() -> None:
    logits = normal(40, 17)
    true = torch.distributions.Categorical(logits=logits.double()).entropy()
    assert (router_entropy(logits, RoutingRule(2)) - true).abs().max() <= 17 * 2.0**-22
    sure = torch.tensor([[200.0, 0.0, -200.0]])
    assert 0 <= router_entropy(sure, RoutingRule(1)).item() < 1e-30


def test_routes_are_compared_as_sets() -> None:
    def made(chosen: list[list[int]]) -> Routes:
        return Routes(torch.zeros(2, 4), torch.tensor(chosen), RoutingRule(2))

    ours, theirs = made([[0, 1], [2, 3]]), made([[1, 0], [2, 0]])
    assert share_of_other_routes([ours], [theirs]).item() == 0.25
    assert share_of_other_routes([ours, ours], [ours, theirs]).item() == 0.125


@pytest.mark.parametrize("preset", ["int8", "integer", "mixed"])
def test_a_step_measures_loads_and_routes(preset: str, sample: Any) -> None:
    policy = make_policy(preset, **EXPERTS)
    samples = draw(policy, sample, seed=1)
    chosen = settings({"compare_routes": "auto" if preset == "mixed" else True})
    metrics = Trainer(policy, chosen).step(samples).metrics
    # All sequences in their own micro-batches of 9 tokens: loads between 1 and E / k.
    assert 1 < metrics["experts/load"] < metrics["experts/load_max"] <= 3
    assert 0 < metrics["experts/router_entropy"] < 1.8
    assert "experts/balance_loss" not in metrics
    assert (metrics["experts/routes_different"] > 0) is (preset == "mixed")


def test_exact_plans_need_no_second_forward(sample: Any) -> None:
    policy = make_policy("int8", **EXPERTS)
    metrics = Trainer(policy, settings()).step(draw(policy, sample, seed=1)).metrics
    assert "experts/routes_different" not in metrics
    assert metrics["mismatch/num_different"] == 0


def test_a_bias_for_choice_is_not_trained_and_survives_a_resume(
    sample: Any, tmp_path: Path
) -> None:
    glm = {"model_type": "glm4_moe", "n_routed_experts": 6, "first_k_dense_replace": 0}
    policy = make_policy("int8", **{**EXPERTS, **glm})
    name = "layers.0.router.e_score_correction_bias"
    before = policy.master_weights()[name].detach().clone()
    trainer = Trainer(policy, settings({"weight_decay": 0.1, "optimizer_states": "fp32"}))
    metrics = trainer.step(draw(policy, sample, seed=1)).metrics
    assert (metrics["mismatch/num_different"], metrics["policy/grad_norm"] > 0) == (0, True)
    assert torch.equal(policy.master_weights()[name], before)
    path = Checkpoints(tmp_path).save(1, policy, trainer.optimizer, {})
    other = make_policy("int8", seed=5, **{**EXPERTS, **glm})
    assert not torch.equal(other.master_weights()[name], before)
    Checkpoints(tmp_path).load(path, other, Trainer(other, trainer.settings).optimizer)
    assert torch.equal(other.master_weights()[name], before)
    tokens = [[3, 1, 4, 1, 5]]
    assert torch.equal(other.logprobs(tokens)[0], policy.logprobs(tokens)[0])


def loads(policy: Any, samples: Any) -> float:
    sequences = [[*s.prompt_token_ids, *s.completion.token_ids] for s in samples]
    with torch.no_grad(), observed_routes(policy.decoder) as routes:
        policy.logprobs(sequences)
    return sum(float(row_shares(layer.chosen, 6).square().sum()) for layer in routes)


def test_the_loss_balances_the_loads(sample: Any) -> None:
    policy = make_policy("int8", initializer_range=0.3, **EXPERTS)
    samples = draw(policy, sample, seed=1)
    before = loads(policy, samples)
    chosen = settings({"router_aux_loss": 100.0, "tokens_per_micro_batch": 1000, "lr": 0.02})
    trainer = Trainer(policy, chosen)
    first = trainer.step(samples).metrics["experts/balance_loss"]
    for _ in range(4):
        samples = draw(policy, sample, seed=1)
        last = trainer.step(samples).metrics["experts/balance_loss"]
    assert last < first
    assert loads(policy, samples) < before


@pytest.mark.parametrize("weight", [0.0, 0.5], ids=["dense", "experts"])
def test_checkpointing_of_activations_changes_no_gradient(weight: float, sample: Any) -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = make_policy("integer", **(EXPERTS if weight else {}))
        samples = draw(policy, sample, seed=1)
        train = {"router_aux_loss": weight, "activation_checkpointing": checkpointing}
        metrics = Trainer(policy, settings(train)).step(samples).metrics
        gradients.append((metrics["policy/grad_norm"], metrics.get("experts/load")))
    assert gradients[0] == gradients[1]


def test_a_dense_model_has_nothing_to_balance() -> None:
    with pytest.raises(UserError, match=r"train\.router_aux_loss = 0\.01: Qwen3ForCausalLM has no"):
        Trainer(make_policy(), settings({"router_aux_loss": 0.01}))


def test_supervised_training_balances_too() -> None:
    policy = make_policy("int8", initializer_range=0.3, **EXPERTS)
    examples = [Example((1, 2, 3 + i), (5, 6, 7 + i, 8)) for i in range(4)]
    plain = SftTrainer(make_policy("int8", initializer_range=0.3, **EXPERTS), settings())
    balanced = SftTrainer(policy, settings({"router_aux_loss": 100.0}))
    first, second = plain.step(examples), balanced.step(examples)
    assert first["experts/load"] == second["experts/load"]
    assert second["experts/balance_loss"] > 1
    assert "experts/balance_loss" not in first
    assert second["sft/grad_norm"] > 2 * first["sft/grad_norm"]
    assert first["experts/load_max"] >= first["experts/load"]
