"""The exactness contract: what the sampler reports is what the trainer computes, bit for bit."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from jetrl import Policy, RolloutEngine, SamplingParams
from jetrl.models.dense import DenseBlock
from jetrl.models.tiny import random_weights
from jetrl.precision import PrecisionPlan
from jetrl.precision.nvfp4_weight import NVFP4Weight
from jetrl.rollout.paged_attention import PagedKeyValues
from jetrl.session import parity as parity_checks
from jetrl.session.parity import (
    check_policy,
    locate,
    measure,
    random_prompts,
    said_when_slow,
    self_check,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 32},
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


def policy(plan: PrecisionPlan | str, family: str = "qwen3", seed: int = 0) -> Policy:
    heads = 4 if family == "llama" else 2
    config = {
        "vocab_size": 160,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "tie_word_embeddings": family != "llama",
        "initializer_range": 0.2,
        **FAMILIES[family],
    }
    plan = PrecisionPlan.preset(plan) if isinstance(plan, str) else plan
    return Policy.from_config(config, plan, seed=seed)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", ["jet", "unified"])
def test_sampled_logprobs_are_the_trainers(preset: str, family: str) -> None:
    p = policy(preset, family)
    prompts = random_prompts(p, 6, 24, seed=1)
    params = SamplingParams(n=3, max_tokens=24, temperature=0.9, seed=5, ignore_eos=True)
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
    {"kv": "int8", "scales": "pow2"},
    {"kv": "int8+fp8"},
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
    plan = PrecisionPlan.preset("unified").replace(**options)
    if plan.lm_head == "fp8":
        config_policy = policy("unified").config.raw
        p = Policy.from_config({**config_policy, "vocab_size": 256}, plan, seed=0)
    else:
        p = policy(plan)
    result = measure(p, num_prompts=4, max_tokens=12)
    assert result.tokens == 4 * 2 * 12
    assert result.different == 0


@pytest.mark.parametrize("preset", ["jet", "unified"])
def test_a_base_in_nvfp4_is_exact(preset: str) -> None:
    """Weights in NVFP4 serve both sides, also after what is trained beside them has moved."""
    plan = PrecisionPlan.preset(preset).replace(base="nvfp4", last_layers_bf16=1)
    config = policy(preset).config
    p = Policy(config, plan, random_weights(config, 0), trains=lambda name: "norm" in name)
    kinds = [type(layer.qkv.operand("train")) for layer in p.decoder.layers]
    assert kinds == [NVFP4Weight, torch.Tensor]
    assert measure(p, num_prompts=3, max_tokens=8).different == 0
    with torch.no_grad():
        for master in p.master_weights().values():
            master.mul_(1.25)
    p.requantize()
    assert measure(p, num_prompts=3, max_tokens=8).different == 0


def test_exact_after_the_weights_have_moved() -> None:
    p = policy("unified")
    with torch.no_grad():
        for master in p.master_weights().values():
            master.add_(torch.randn_like(master) * 0.01)
    p.requantize()
    assert measure(p, num_prompts=3, max_tokens=8).different == 0


def test_mixed_shows_a_gap_and_names_where_it_begins() -> None:
    result = measure(policy("mixed"), num_prompts=4, max_tokens=12)
    assert result.different > result.tokens / 2
    assert result.mean_abs > 1e-4
    assert result.token_mult_prob_error > 1
    found = locate(policy("mixed"), *result.first_different)
    assert found.operation == "layers.0.qkv"
    assert found.position == 0


@pytest.mark.parametrize("operation", ["rms_norm", "swiglu", "rotary"])
def test_locate_names_an_operation_that_is_not_exact(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation that treats a forward of few tokens differently, as a library might."""
    where = {"rms_norm": "layer", "swiglu": "dense", "rotary": "layer"}[operation]
    module = importlib.import_module(f"jetrl.models.{where}")
    true_operation = getattr(module, operation)

    def batch_dependent(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        y = true_operation(x, *rest)
        return y if len(x) > 1 else y * (1 + 2.0**-7)

    monkeypatch.setattr(module, operation, batch_dependent)
    p = policy("unified")
    result = measure(p, num_prompts=1, samples=1, max_tokens=6)
    assert result.different > 0
    found = locate(p, *result.first_different)
    expected = {"rms_norm": "input_norm", "swiglu": "swiglu", "rotary": "rotary"}[operation]
    assert found.operation == f"layers.0.{expected}"
    assert found.position == len(result.first_different[0]), "the first token that was decoded"


def test_locate_runs_a_prompt_as_the_sampler_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler's last layer attends for the prompt's last token alone, and here wrongly."""
    true_attend = PagedKeyValues.attend_heads

    def faulty(self: PagedKeyValues, *rest: Any) -> torch.Tensor:
        out, last = true_attend(self, *rest), rest[-1]
        return out if self.rows is None or not last else out * (1 + 2.0**-7)

    monkeypatch.setattr(PagedKeyValues, "attend_heads", faulty)
    p = policy("unified")
    result = measure(p, num_prompts=1, samples=1, max_tokens=6)
    assert result.different == 1, "the first token alone is drawn from what a prompt gave"
    found = locate(p, *result.first_different)
    assert found.operation == "layers.1.attention"
    assert found.position == len(result.first_different[0]) - 1


def test_self_check_passes_and_sees_a_broken_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = self_check()
    assert [c.operation for c in checks if not c.ok] == []
    broken = {"SwiGLU": lambda x: x * (1 + len(x) * 2.0**-8)}
    monkeypatch.setattr(DenseBlock, "self_checks", broken)
    assert [c.operation for c in self_check() if not c.ok] == ["SwiGLU"]


def test_a_policys_own_shapes_are_checked_by_its_first_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = policy("unified")
    before = {name: master.clone() for name, master in p.master_weights().items()}
    checks = check_policy(p)
    assert [c for c in checks if not c.ok] == []
    assert {"layers.0.qkv", "layers.0.down", "lm_head"} <= {c.operation for c in checks}
    assert all(torch.equal(master, before[name]) for name, master in p.master_weights().items())
    import jetrl.models.dense as module

    true_operation = module.swiglu
    monkeypatch.setattr(
        module, "swiglu", lambda x: true_operation(x) * (1 + 2.0**-7 * (len(x) == 3))
    )
    broken = [c for c in check_policy(p) if not c.ok]
    assert [c.operation for c in broken] == ["sampling, 3 sequences at a time"]


def test_logprobs_are_float32_values_as_python_floats() -> None:
    p = policy("unified")
    (out,) = RolloutEngine(p).generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert all(float(np.float32(value)) == value for value in out.logprobs)


def test_a_proof_that_takes_long_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, wait_until: Callable
) -> None:
    before = set(threading.enumerate())
    monkeypatch.setattr(parity_checks, "_SILENT_S", 36_000.0)
    with said_when_slow():
        (timer,) = set(threading.enumerate()) - before
    wait_until(lambda: not timer.is_alive())
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(parity_checks, "_SILENT_S", 0.02)
    with said_when_slow():
        wait_until(lambda: "compiled first" in capsys.readouterr().err)
