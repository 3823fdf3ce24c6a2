"""Frozen and scalar models on a Hopper GPU: the same bits, less memory, there and back."""

from __future__ import annotations

from typing import Any

import pytest
import small_models
import torch

from jetrl.models.families import ModelConfig
from jetrl.models.packed import ForwardInputs
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import ScalarModel
from jetrl.models.source import ModelSource
from jetrl.models.tiny import RandomWeights
from jetrl.precision import PrecisionPlan
from jetrl.session.parity import random_prompts

pytestmark = pytest.mark.gpu

PRESETS = ["unified", "jet", "mixed", "bf16"]


def config(score: bool, **changes: Any) -> ModelConfig:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "max_position_embeddings": 2048}
    head = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1} if score else {}
    return ModelConfig.from_hf(small_models.config(**sizes, **head, **changes))


def make(cls: type, preset: str, frozen: bool = False, **changes: Any) -> Any:
    model = config(cls is ScalarModel, **changes)
    source = ModelSource.from_tensors(model, dict(RandomWeights(model, 0)))
    return cls(source, PrecisionPlan.preset(preset), "cuda", frozen=frozen)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_frozen_policy_has_the_same_bits_there_and_back(preset: str, tied: bool) -> None:
    policy = make(Policy, preset, tie_word_embeddings=tied)
    prompts = random_prompts(policy, 6, 80, seed=1)
    frozen = make(Policy, preset, frozen=True, tie_word_embeddings=tied)
    with torch.no_grad():
        expected = policy.logprobs(prompts)
        seen = frozen.logprobs(prompts)
        frozen.offload()
        with frozen.used():
            again = frozen.logprobs(prompts)
    assert all(torch.equal(a, b) for a, b in zip(expected, seen, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))


@pytest.mark.parametrize("preset", PRESETS)
def test_scores_do_not_depend_on_the_batch_and_gradients_are_there(preset: str) -> None:
    model = make(ScalarModel, preset)
    prompts = random_prompts(make(Policy, preset), 8, 80, seed=2)
    together = model.scores(prompts, 10**6)
    if model.plan.exact:
        assert torch.equal(together, model.scores(prompts, 1))
    frozen = make(ScalarModel, preset, frozen=True)
    assert torch.equal(together, frozen.scores(prompts, 10**6))
    tokens = torch.tensor(prompts[0], device="cuda")
    ends = torch.tensor([0, len(tokens)], device="cuda")
    values = model.values(
        ForwardInputs.packed(tokens, ends), ends, torch.arange(len(tokens), device="cuda")
    )
    values.square().sum().backward()
    masters = model.master_weights()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in masters.values())
