"""The section `[sampler_deviation]` changes the sampler's side, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.test_exactness import CONFIG

from jetrl import Policy, RolloutEngine, SamplingParams
from jetrl.errors import UserError
from jetrl.kernels.sampling import normal_noise, random_bits
from jetrl.models.packed import ForwardInputs
from jetrl.precision import PrecisionPlan, QTensor, dequantize, quantize
from jetrl.precision.plan import SamplerDeviation
from jetrl.rollout.sequence import sequence_keys
from jetrl.runs.schemas import PLAN
from jetrl.session.parity import measure
from jetrl.settings.precision_section import PrecisionSettings, SamplerDeviationSettings
from jetrl.types import PromptInputs

DOSES: list[dict[str, Any]] = [
    {"linears": "bf16"},
    {"linears": "fp8_weights"},
    {"linears": "fp8_activations"},
    {"weights_through_bf16": True},
    {"bf16_layers": (1,)},
    {"scales": "pow2"},
    {"kv": "bf16"},
    {"attention_split": 64},
    {"lm_head": "fp8"},
    {"logit_noise": 0.01},
]


def plan_of(preset: str = "unified", **deviation: Any) -> PrecisionPlan:
    plan = PrecisionPlan.preset(preset)
    return plan.replace(sampler_deviation=SamplerDeviation(**deviation))


def policy_of(plan: PrecisionPlan) -> Policy:
    return Policy.from_config(CONFIG, plan, seed=0)


@pytest.mark.parametrize("dose", DOSES, ids=lambda dose: next(iter(dose)))
def test_each_dose_moves_the_sampler_alone(dose: dict[str, Any]) -> None:
    plan = plan_of(**dose)
    assert not plan.exact
    described = dict(plan.describe())
    assert described["sampler and trainer log-probs"] == "not promised (measured)"
    assert next(iter(dose)) in described["sampler only"]
    stored = PLAN.validate_python(json.loads(json.dumps(plan.to_dict())))  # as of plan.json
    assert PrecisionPlan.from_dict(stored) == plan
    p, plain = policy_of(plan), policy_of(PrecisionPlan.preset("unified"))
    tokens = [list(range(3, 40))]
    assert torch.equal(p.logprobs(tokens)[0], plain.logprobs(tokens)[0])
    result = measure(p, num_prompts=2, max_tokens=12)
    assert result.different > 0
    assert 0 < result.k3_kl < 1
    assert np.isfinite(result.token_mult_prob_error)


@pytest.mark.parametrize("preset", ["unified", "alike"])
def test_an_empty_section_leaves_a_plan_and_its_stored_form(preset: str) -> None:
    settings = PrecisionSettings(preset=preset)
    plan = PrecisionPlan.from_settings(settings, SamplerDeviationSettings())
    assert plan == PrecisionPlan.preset(preset)
    assert ("sampler_deviation" in plan.to_dict()) == (preset == "alike")
    assert PrecisionPlan.from_dict(plan.to_dict()) == plan


def test_the_samplers_weights_are_what_the_settings_say() -> None:
    def operands(plan: PrecisionPlan) -> tuple[torch.Tensor, Any, Any]:
        quantized = policy_of(plan).decoder.layers[0].mixer.qkv.quantized
        return quantized.master.detach(), quantized.operand("rollout"), quantized.operand("train")

    master, sampler, trainer = operands(plan_of(weights_through_bf16=True))
    assert isinstance(sampler, QTensor)
    assert isinstance(trainer, QTensor)
    rounded = quantize(master.bfloat16(), (128, 128))
    assert torch.equal(sampler.codes.float(), rounded.codes.float())
    assert torch.equal(sampler.scales, rounded.scales)
    codes = quantize(master, (128, 128))
    assert torch.equal(trainer.codes.float(), codes.codes.float())

    _, sampler, _ = operands(plan_of(linears="fp8_weights"))
    assert torch.equal(sampler, dequantize(codes).bfloat16())

    nearest = plan_of("mixed", linears="fp8_activations").replace(bf16_rounding="nearest")
    _, sampler, _ = operands(nearest)
    assert torch.equal(sampler.values, master.bfloat16())

    _, sampler, trainer = operands(PrecisionPlan.preset("unified"))
    assert sampler is trainer


def test_a_draws_log_prob_is_of_the_noisy_distribution() -> None:
    noise, seed, temperature = 0.5, 3, 0.8
    p = policy_of(plan_of("jet", logit_noise=noise))
    prompts = [[1, 2, 3, 4], [9, 8]]
    params = SamplingParams(n=2, max_tokens=6, temperature=temperature, seed=seed, ignore_eos=True)
    completions = RolloutEngine(p).generate(prompts, params)
    inputs = [PromptInputs(tuple(prompt)) for prompt in prompts]
    keys = [key for of_prompt in sequence_keys(inputs, 2) for key in of_prompt]
    for index, completion in enumerate(completions):
        prompt = prompts[index // 2]
        ids = torch.tensor(prompt + list(completion.token_ids))
        with torch.no_grad():
            ends = torch.tensor([0, len(ids)])
            hidden = p.packed_hidden(ForwardInputs.packed(ids, ends), ends, torch.arange(len(ids)))
            logits = p.decoder.logits(hidden, "train")[len(prompt) - 1 : -1]
        positions = np.arange(len(prompt), len(ids))
        ones = np.ones_like(positions)
        bits = torch.from_numpy(random_bits(seed * ones, keys[index] * ones, positions))
        noisy = (logits + noise * normal_noise(bits, 256)) / temperature
        expected = noisy.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
        # Both are float32 sums of 256 terms: 256 * 2**-24 is a bound of the relative error.
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UserError, match="bf16_layers has layer 2, and the model has layers 0 to 1"):
        policy_of(plan_of(bf16_layers=(2,)))
    with pytest.raises(UserError, match="fp32 preset takes no options"):
        plan_of("fp32", logit_noise=0.1)
    with pytest.raises(ValueError, match=r"attention_split\n.*multiple of 64"):
        SamplerDeviationSettings(attention_split=100)
    with pytest.raises(UserError, match=r"plan\.json: sampler_deviation"):
        PrecisionPlan.from_dict({"name": "jet", "sampler_deviation": {"noise": 1}}, "plan.json")
