"""DPO: the loss and gradient of its definition, at the start and after, in micro-batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.training.shared import make_policy
from torch import Tensor

from jetrl import load_config
from jetrl.models.policy import Policy
from jetrl.training.sft import DpoTrainer, ExamplePair
from jetrl.types import Example

BETA = 0.3
PAIRS: list[ExamplePair] = [
    (Example([1, 2], [3, 4, 5]), Example([1, 2], [6])),
    (Example([7], [8, 9]), Example([7], [9, 8, 10, 11])),
    (Example([2, 3, 4], [5]), Example([2, 3, 4], [12, 13])),
]


def trainer_of(preset: str, tokens: int = 64, reference: int = 0) -> DpoTrainer:
    words = [f"sft.dpo_beta={BETA}", "sft.steps=9", "sft.lr=1e-2", "train.grad_clip=1e6"]
    settings = load_config(None, [*words, f"train.tokens_per_micro_batch={tokens}"])
    return DpoTrainer(make_policy(preset), make_policy(preset, seed=reference), settings)


def logprob(policy: Policy, example: Example) -> Tensor:
    (row,) = policy.logprobs([[*example.prompt, *example.completion]])
    return row[len(example.prompt) - 1 :].double().sum()


def expected_loss(policy: Policy, reference: Policy) -> Tensor:
    """Equation 7 of Rafailov et al. 2023, in float64 from log-probs of one sequence at a time."""
    losses = []
    for better, worse in PAIRS:
        with torch.no_grad():
            ref = logprob(reference, better) - logprob(reference, worse)
        margin = BETA * (logprob(policy, better) - logprob(policy, worse) - ref)
        losses.append(-torch.nn.functional.logsigmoid(margin))
    return torch.stack(losses).mean()


def gradients(trainer: DpoTrainer) -> tuple[dict[str, Tensor], dict[str, float]]:
    seen: dict[str, Tensor] = {}
    trainer.optimizer.apply = lambda norm: seen.update(  # type: ignore[method-assign]
        {
            name: p.grad.clone()
            for name, p in trainer.optimizer.masters.items()
            if p.grad is not None
        }
    )
    return seen, trainer.step(PAIRS)


@pytest.mark.parametrize("tokens", [64, 12], ids=["one", "several"])
@pytest.mark.parametrize("reference", [0, 1], ids=["start", "apart"])
def test_loss_and_gradient_are_those_of_the_paper(tokens: int, reference: int) -> None:
    trainer = trainer_of("fp32", tokens, reference)
    seen, metrics = gradients(trainer)
    policy = make_policy("fp32")
    loss = expected_loss(policy, make_policy("fp32", seed=reference))
    loss.backward()
    # float32 log-probs of up to 4 tokens of up to 20 nats.
    assert metrics["sft/loss"] == pytest.approx(loss.item(), abs=8 * 20 * 2**-24)
    for name, master in policy.master_weights().items():
        assert master.grad is not None
        scale = master.grad.abs().max()
        assert scale > 0, name
        assert (seen[name] - master.grad).abs().max() < 2**-14 * scale, name


def test_a_policy_at_its_reference_has_a_loss_of_log_2_and_no_margin() -> None:
    """Under an exact plan the reference's log-probs have the policy's bits."""
    metrics = trainer_of("int8").step(PAIRS)
    assert metrics["dpo/margin"] == 0.0
    assert metrics["dpo/accuracy"] == 0.0
    assert metrics["sft/loss"] == pytest.approx(math.log(2), abs=2**-23)


def test_it_learns_the_pairs_and_leaves_the_reference() -> None:
    trainer = trainer_of("int8")
    before = [w.clone() for w in trainer.reference.master_weights().values()]
    found: list[dict[str, Any]] = [trainer.step(PAIRS) for _ in range(8)]
    assert found[-1]["dpo/accuracy"] == trainer.accuracy(PAIRS) == 1.0
    assert found[-1]["sft/loss"] < 0.5 * found[0]["sft/loss"]
    after = trainer.reference.master_weights().values()
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
