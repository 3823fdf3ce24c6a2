"""The memory plan counts what a policy really holds."""

from __future__ import annotations

import pytest

from jetrl.config import load_config
from jetrl.memory import memory_plan
from jetrl.models.families import ModelConfig
from jetrl.policy import Policy
from jetrl.precision import PrecisionPlan
from jetrl.precision.linear import FP8Weight, Linear

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("preset", ["bf16", "mixed", "jet", "unified"])
@pytest.mark.parametrize("tied", [True, False])
def test_masters_and_working_copies_are_those_of_a_policy(preset: str, tied: bool) -> None:
    config = {**CONFIG, "tie_word_embeddings": tied}
    policy = Policy.from_config(config, PrecisionPlan.preset(preset))
    settings = load_config("demo", [f"precision.preset={preset}"])
    rows = dict(memory_plan(settings, ModelConfig.from_hf(config)))
    on_gpu = dict(memory_plan(settings, ModelConfig.from_hf(config), on_gpu=True))
    masters = sum(4 * p.numel() for p in policy.named_masters().values())
    assert rows["master weights, FP32"] == masters
    fp8 = other = 0
    for module in policy.decoder.modules():
        if isinstance(module, Linear):
            for operand in {id(o): o for o in map(module.operand, ("rollout", "train"))}.values():
                if isinstance(operand, FP8Weight):
                    fp8 += operand.direct.codes.nbytes + operand.direct.scales.nbytes
                else:
                    other += operand.nbytes
    what = "working copies for sampling and training"
    assert rows[what] == fp8 + other
    assert on_gpu[what] == 2 * fp8 + other
