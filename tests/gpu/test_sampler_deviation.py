"""A study's deviation of the sampler and pinned BF16 sums on a Hopper GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.study.deviation import SamplerDeviation
from benchmarks.study.logit_noise import normal_noise, with_noise
from small_models import config, make_policy

from jetrl import Policy
from jetrl.precision import PrecisionPlan
from jetrl.session.parity import check_policy, failures, measure

pytestmark = pytest.mark.gpu


def policy(plan: PrecisionPlan) -> Policy:
    return make_policy(config(), plan)


@pytest.mark.parametrize(
    "dose",
    [
        ("linears", "fp8_weights"), ("linears", "fp8_activations"), ("linears", "bf16"),
        ("bf16_layers", (1,)), ("scales", "pow2"), ("kv", "bf16"),
        ("attention_split", 64), ("lm_head", "fp8"), ("logit_noise", 0.01),
    ],
    ids=str,
)  # fmt: skip
def test_each_dose_moves_the_sampler_alone(dose: tuple[str, Any]) -> None:
    preset = PrecisionPlan.preset("unified")
    check_the_sampler_alone_moves(SamplerDeviation(**dict([dose])).plan_of(preset))


def test_weights_through_bf16_move_the_sampler_alone() -> None:
    preset = PrecisionPlan.preset("unified")
    check_the_sampler_alone_moves(preset.replace(weights_through_bf16=True))


def check_the_sampler_alone_moves(plan: PrecisionPlan) -> None:
    p, plain = policy(plan), policy(PrecisionPlan.preset("unified"))
    tokens = [list(range(3, 200))]
    assert torch.equal(p.logprobs(tokens)[0], plain.logprobs(tokens)[0])
    result = measure(p, num_prompts=6, max_tokens=80)
    assert 0 < result.different <= result.tokens
    assert 0 < result.k3_kl < 1


def test_bf16_with_pinned_sums_is_exact() -> None:
    p = policy(PrecisionPlan.preset("bf16").replace(pinned_sums=True))
    assert p.plan.exact
    assert failures(check_policy(p)) == []
    assert measure(p, num_prompts=12, samples=3, max_tokens=80).different == 0


@pytest.mark.parametrize("rows, vocabulary", [(1, 98), (63, 1000), (8, 151936)])
def test_noise_is_the_references(rows: int, vocabulary: int) -> None:
    g = torch.Generator().manual_seed(rows)
    bits = torch.randint(0, 2**53, (rows,), generator=g)
    bits[0] = -1
    logits = torch.randn(rows, vocabulary, generator=g)
    expected = logits + 0.5 * normal_noise(bits, vocabulary)
    noisy = with_noise(logits.cuda(), bits.cuda(), 0.5).cpu()
    # The random words are equal; logarithm, root and cosine of at most 8 are within some units.
    assert (noisy - expected).abs().max() < 32 * 2.0**-21
