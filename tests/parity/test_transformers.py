"""Logits under the fp32 plan against transformers' own, for random tiny models of each family."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from jetrl import Policy, RolloutEngine, SamplingParams
from jetrl.models.attention import PackedKeyValues
from jetrl.models.families import fused_tensors, stored_tensors
from jetrl.models.packed import ForwardInputs
from jetrl.precision import PrecisionPlan

SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
NO_PAD: dict[str, Any] = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
GLM: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "head_dim": 32,
    "attention_bias": True,
    "routed_scaling_factor": 1.8,
    **NO_PAD,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
    "qwen2-bias": ("qwen2", {"tie_word_embeddings": True}),
    "llama": ("llama", {}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen3-yarn": ("qwen3", {"head_dim": 32, "rope_parameters": YARN_ROPE}),
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2, **NO_PAD}),
    "phi4": ("phi3", {"rope_theta": 250000.0, **NO_PAD}),
    "qwen3-experts": ("qwen3_moe", {"head_dim": 32, "norm_topk_prob": True, **EXPERTS}),
    "qwen3-sparse": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [2], **EXPERTS}),
    "olmoe": ("olmoe", {**EXPERTS, **NO_PAD}),
    "qwen2-experts": ("qwen2_moe", {"shared_expert_intermediate_size": 80, **EXPERTS}),
    "glm4": ("glm4_moe", {**GLM, "use_qk_norm": True, "first_k_dense_replace": 2}),
    "glm4-air": ("glm4_moe", {**GLM, "n_shared_experts": 2, "norm_topk_prob": False}),
}

MIXTURES = ["qwen3-experts", "olmoe", "qwen2-experts", "glm4", "glm4-air"]


def biases(model: Any) -> dict[str, torch.Tensor]:
    """The buffers of routers, which are in files."""
    return {n: x for n, x in model.named_buffers() if n.endswith("correction_bias")}


def make(name: str, path: Path, experts: str = "grouped_mm") -> Any:
    """A random model with every kind of parameter away from its initial value, saved to path."""
    torch.manual_seed(0)
    family, sizes = MODELS[name]
    if "num_experts_per_tok" in sizes:
        sizes = {**sizes, "experts_implementation": experts}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **sizes)).eval()
    with torch.no_grad():
        for parameter in (*model.parameters(), *biases(model).values()):
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_transformers(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path / "model")
    policy = Policy.from_pretrained(tmp_path / "model", PrecisionPlan.preset("fp32"))
    lengths = [3, 150, 61]
    g = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 200, (n,), generator=g) for n in lengths]
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    inputs = ForwardInputs.packed(torch.cat(sequences), ends)
    with torch.no_grad():
        kv = PackedKeyValues(ends, policy.plan)
        hidden = policy.decoder(inputs, kv, "train")
        ours = policy.decoder.logits(hidden, "train").split(lengths)
        theirs = [model(s[None]).logits[0] for s in sequences]
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def rounding(policy: Policy, tokens: int) -> float:
    """The expected relative distance of two correct float32 gradients, in Frobenius norms.

    Rounding errors of a sum of K products are random, so they add to u * sqrt(K) relative to its
    norm, u = 2**-24. A gradient passes every product of the model forward and backward, and the
    squares of independent errors add. A second implementation has as many of its own.
    """
    config, terms = policy.config, 0
    attention = config.attention
    for layer in config.layers:
        shapes = {**layer.mixer.parameter_shapes(config.hidden_size)}
        shapes |= layer.block.parameter_shapes(config.hidden_size)
        products = [shape for shape in shapes.values() if len(shape) == 2]
        # A token meets few of the rows of experts stacked in one matrix, so columns are counted.
        terms += sum(3 * columns for _, columns in products) + 3 * (attention.head_dim + tokens)
    terms += 3 * (config.hidden_size + config.vocab_size)
    return 2.0**-24 * math.sqrt(2 * terms)


@pytest.mark.parametrize("name", ["qwen3-experts", "glm4"])
def test_greedy_tokens_agree_with_transformers(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path / "model")
    policy = Policy.from_pretrained(tmp_path / "model", PrecisionPlan.preset("fp32"))
    engine = RolloutEngine(policy, max_batch_size=2, num_pages=8)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompts = [[5, 9, 7], [100, 3]]
    for prompt, completion in zip(prompts, engine.generate(prompts, params), strict=True):
        options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}
        theirs = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
        assert list(completion.token_ids) == theirs.tolist()


@pytest.mark.parametrize(
    "name, experts",
    [("qwen3", ""), *((name, sums) for name in MIXTURES for sums in ("grouped_mm", "eager"))],
)
def test_gradients_agree_with_transformers(name: str, experts: str, tmp_path: Path) -> None:
    """Log-probs and all gradients, with both of transformers' sums over a token's experts."""
    model = make(name, tmp_path / "model", experts)
    policy = Policy.from_pretrained(tmp_path / "model", PrecisionPlan.preset("fp32"))
    sequence = torch.randint(0, 200, (30,), generator=torch.Generator().manual_seed(3))
    logprobs = policy.logprobs([sequence.tolist()])[0]
    logprobs.sum().backward()
    theirs = model(sequence[None]).logits[0].log_softmax(-1)[:-1].gather(1, sequence[1:, None])
    theirs.sum().backward()
    bound = rounding(policy, len(sequence))
    assert bound < 1e-5
    assert (logprobs - theirs[:, 0]).abs().max() <= 1e-5
    stored = {**stored_tensors(policy.config)}
    stored |= {name: (whole,) for name, whole in fused_tensors(policy.config).items()}
    parameters = dict(model.named_parameters())
    for name, master in policy.master_weights().items():
        if name.endswith("correction_bias"):
            assert master.grad is None
            continue
        parts = [parameters[part.name].grad for part in stored[name]]
        expected = torch.cat([part.flatten(0, part.dim() - 2) for part in parts])
        assert expected.norm() > 0, name
        assert (master.grad - expected).norm() <= bound * expected.norm(), name
