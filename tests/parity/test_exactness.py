"""The exactness contract: what the sampler reports is what the trainer computes, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.training.shared import config

from jetrl import Policy, RolloutEngine, SamplingParams
from jetrl.models import dense
from jetrl.precision import PrecisionPlan
from jetrl.session.parity import check_policy, locate, measure, random_prompts, self_check

SIZES = {"vocab_size": 256, "intermediate_size": 256, "max_position_embeddings": 256}
CONFIG = config(**SIZES, num_hidden_layers=2, initializer_range=0.2)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    # half of its layers without rotary positions, the others stretched by YaRN
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "no_rope_layer_interval": 2,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


def policy(plan: PrecisionPlan | str, family: str = "qwen3") -> Policy:
    plan = PrecisionPlan.preset(plan) if isinstance(plan, str) else plan
    return Policy.from_config({**CONFIG, **FAMILIES[family]}, plan, seed=0)


@pytest.mark.parametrize(
    "preset, family",
    [
        ("jet", "qwen3"),
        ("int8", "qwen3"),
        ("integer", "qwen3"),
        ("integer", "llama"),
        *(("unified", family) for family in FAMILIES),
    ],
)
def test_sampled_logprobs_are_the_trainers(preset: PrecisionPlan | str, family: str) -> None:
    p = policy(preset, family)
    prompts = random_prompts(p, 4, 24, seed=1)
    params = SamplingParams(n=3, max_tokens=12, temperature=0.9, seed=5, ignore_eos=True)
    out = RolloutEngine(p, max_batch_size=5).generate(prompts, params)
    sequences = [prompts[i // 3] + list(c.token_ids) for i, c in enumerate(out)]
    logprobs = p.logprobs(sequences, temperature=0.9)
    for i, completion in enumerate(out):
        expected = logprobs[i][len(prompts[i // 3]) - 1 :].detach()
        assert torch.equal(torch.tensor(completion.logprobs), expected)


OPTIONS = [
    {"scales": "pow2"},
    {"kv": "bf16"},
    {"kv": "fp8"},
    {"kv": "int8"},
    {"kv": "fp8+int8"},
    {"lm_head": "fp8"},
    {"first_layers_bf16": 1},
    {"last_layers_bf16": 1, "grad_output": "e5m2"},
    {"wgrad_input": "1x128"},
]


@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items())
)
def test_every_plan_option_stays_exact(options: dict[str, Any]) -> None:
    p = policy(PrecisionPlan.preset("unified").replace(**options))
    result = measure(p, num_prompts=4, max_tokens=12)
    assert result.tokens == 4 * 2 * 12
    assert result.different == 0


def test_mixed_shows_a_gap_and_names_where_it_begins() -> None:
    result = measure(policy("mixed"), num_prompts=4, max_tokens=12)
    assert result.different > result.tokens / 2
    assert result.mean_abs > 1e-4
    assert result.token_mult_prob_error > 1
    found = locate(policy("mixed"), *result.first_different)
    assert found.operation == "layers.0.qkv"
    assert found.position == 0


def test_self_check_passes_and_sees_a_broken_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = self_check()
    assert [c.operation for c in checks if not c.ok] == []
    broken = {"SwiGLU": lambda x: x * (1 + len(x) * 2.0**-8)}
    monkeypatch.setattr(dense.DenseBlock, "self_checks", broken)
    assert [c.operation for c in self_check() if not c.ok] == ["SwiGLU"]


def test_a_policys_own_shapes_are_checked_by_its_first_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = Policy.from_config(
        {**CONFIG, "max_position_embeddings": 96}, PrecisionPlan.preset("unified")
    )
    before = {name: master.clone() for name, master in p.master_weights().items()}
    checks = check_policy(p)
    assert [c for c in checks if not c.ok] == []
    assert {"layers.0.qkv", "layers.0.down", "lm_head"} <= {c.operation for c in checks}
    assert all(torch.equal(master, before[name]) for name, master in p.master_weights().items())
    swiglu = dense.swiglu
    monkeypatch.setattr(dense, "swiglu", lambda x: swiglu(x) * (1 + 2.0**-7 * (len(x) == 3)))
    broken = [c for c in check_policy(p) if not c.ok]
    assert [c.operation for c in broken] == ["sampling, 3 sequences at a time"]
