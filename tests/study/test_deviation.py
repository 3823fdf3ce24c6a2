"""A study's deviation changes the sampler's side, and nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.study.deviation import SECTION, SamplerDeviation, deviation_of, main
from benchmarks.study.logit_noise import NOISE_COUNTER, normal_noise, philox_words
from tests.parity.test_exactness import CONFIG

from jetrl import Policy, RolloutEngine, SamplingParams
from jetrl.errors import UserError
from jetrl.kernels.sampling import random_bits
from jetrl.models.packed import ForwardInputs
from jetrl.precision import PrecisionPlan, dequantize, quantize
from jetrl.precision.plan import plan_table
from jetrl.rollout.sequence import sequence_keys
from jetrl.runs.directory import RunDirectory
from jetrl.runs.schemas import PLAN
from jetrl.session.parity import measure
from jetrl.types import PromptInputs

DOSES: list[dict[str, Any]] = [
    {"linears": "bf16"},
    {"linears": "fp8_weights"},
    {"linears": "fp8_activations"},
    {"bf16_layers": (1,)},
    {"scales": "pow2"},
    {"kv": "bf16"},
    {"attention_split": 64},
    {"lm_head": "fp8"},
    {"logit_noise": 0.01},
]


def plan_of(preset: str = "unified", **deviation: Any) -> PrecisionPlan:
    return SamplerDeviation(**deviation).plan_of(PrecisionPlan.preset(preset))


def policy_of(plan: PrecisionPlan) -> Policy:
    return Policy.from_config(CONFIG, plan, seed=0)


@pytest.mark.parametrize("dose", DOSES, ids=lambda dose: next(iter(dose)))
def test_each_dose_moves_the_sampler_alone(dose: dict[str, Any]) -> None:
    plan = plan_of(**dose)
    assert not plan.exact
    described = dict(plan_table(plan))
    assert described["sampler and trainer log-probs"] == "not promised (measured)"
    assert next(iter(dose)) in described["sampler only"]
    stored = PLAN.validate_python(json.loads(json.dumps(plan.to_dict())))  # as of plan.json
    assert stored[SECTION] == {name: [*v] if v == (1,) else v for name, v in dose.items()}
    with pytest.raises(UserError, match=r"plan\.json: sampler_deviation: the plan of a study"):
        PrecisionPlan.from_dict(stored, "plan.json")
    p, plain = policy_of(plan), policy_of(PrecisionPlan.preset("unified"))
    tokens = [list(range(3, 40))]
    assert torch.equal(p.logprobs(tokens)[0], plain.logprobs(tokens)[0])
    result = measure(p, num_prompts=2, max_tokens=12)
    assert result.different > 0
    assert 0 < result.k3_kl < 1
    assert np.isfinite(result.token_mult_prob_error)


def test_the_samplers_weights_are_what_the_settings_say() -> None:
    def operands(plan: PrecisionPlan) -> tuple[torch.Tensor, Any, Any]:
        quantized = policy_of(plan).decoder.layers[0].mixer.qkv.quantized
        return quantized.master.detach(), quantized.operand("rollout"), quantized.operand("train")

    master, sampler, trainer = operands(plan_of(linears="fp8_weights"))
    codes = quantize(master, (128, 128))
    assert torch.equal(sampler, dequantize(codes).bfloat16())
    assert torch.equal(trainer.codes.float(), codes.codes.float())

    nearest = plan_of("mixed", linears="fp8_activations").replace(bf16_rounding="nearest")
    _, sampler, trainer = operands(nearest)
    assert torch.equal(sampler, master.bfloat16())
    assert sampler.data_ptr() == trainer.data_ptr()


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
    with pytest.raises(UserError, match="fp32 preset takes no sampler_deviation"):
        plan_of("fp32", logit_noise=0.1)
    with pytest.raises(UserError, match=r"x: sampler_deviation: attention_split = 100.*of 64"):
        deviation_of({"attention_split": 100}, "x")


def test_a_command_trains_with_the_deviation_and_resumes_only_with_it(tmp_path: Path) -> None:
    words = ["demo", "sft.steps=0", "loop.steps=1", f"run.dir={tmp_path}", "run.name=noisy"]
    words += ["precision.preset=jet", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"]
    words += ["rollout.max_tokens=4", "train.updates_per_step=1", "train.warmup_steps=0"]
    words += ["model.config.num_hidden_layers=1", "eval.every=0", "report.enabled=false"]
    deviating = [SECTION, '{"logit_noise": 0.1}', "train"]
    assert main([*deviating, *words]) == 0
    run = RunDirectory.open(tmp_path / "noisy")
    assert run.plan()[SECTION] == {"logit_noise": 0.1}
    assert run.metrics("rl")[-1]["mismatch/k3_kl"] > 0
    more = [*words, "loop.steps=2", "--resume"]
    assert main(["train", *more]) == 2, "another plan"
    assert main([*deviating, *more]) == 0


KEYS = torch.tensor([0, 5, 2**52 + 17, -1])


def test_words_are_those_of_the_samplers_philox() -> None:
    first, second = (word.numpy() for word in philox_words(KEYS, torch.arange(300)))
    for row, key in enumerate(KEYS.tolist()):
        # The counter (c, 0, 0, n) is that of sequence c and position n * 2**32.
        position = np.full(300, NOISE_COUNTER << 32, dtype=np.int64)
        bits = random_bits(np.full(300, key, dtype=np.int64), np.arange(300), position)
        assert np.array_equal((first[row] << 21) | (second[row] >> 11), bits)


def test_noise_is_standard_normal_and_independent_of_the_row() -> None:
    noise = normal_noise(KEYS, 40_000).double()
    # Six standard deviations of the mean, of the variance and of a correlation of n samples.
    bound = 6 / math.sqrt(noise.shape[1])
    assert noise.mean(1).abs().max() < bound
    assert (noise.square().mean(1) - 1).abs().max() < bound * math.sqrt(2)
    assert (torch.corrcoef(noise) - torch.eye(len(KEYS))).abs().max() < bound
    assert noise.isfinite().all()
