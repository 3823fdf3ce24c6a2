"""Logits under the fp32 plan against transformers' own, for random tiny models of each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from jetrl import Policy
from jetrl.models.attention import PackedKeyValues
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
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "experts_implementation": "grouped_mm",
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
    # Of its two sums over experts, transformers' default: grouped_mm, in the order of slots.
    "qwen3-experts": ("qwen3_moe", {"head_dim": 32, "norm_topk_prob": True, **EXPERTS}),
    "qwen3-sparse": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [2], **EXPERTS}),
    "olmoe": ("olmoe", {**EXPERTS, **NO_PAD}),
    "qwen2-experts": ("qwen2_moe", {"shared_expert_intermediate_size": 80, **EXPERTS}),
}


def make(name: str, path: Path) -> Any:
    """A random model with every kind of parameter away from its initial value, saved to path."""
    torch.manual_seed(0)
    family, sizes = MODELS[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
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


@pytest.mark.parametrize("name", ["qwen3", "qwen3-experts", "olmoe", "qwen2-experts"])
def test_gradients_agree_with_transformers(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path / "model")
    policy = Policy.from_pretrained(tmp_path / "model", PrecisionPlan.preset("fp32"))
    sequence = torch.randint(0, 200, (30,), generator=torch.Generator().manual_seed(3))
    policy.logprobs([sequence.tolist()])[0].sum().backward()
    model(sequence[None], labels=sequence[None]).loss.mul(-29).backward()
    ours = {name: master.grad for name, master in policy.master_weights().items()}
    theirs = dict(model.named_parameters())
    pairs = {
        "embed.weight": "model.embed_tokens.weight",
        "lm_head.weight": "lm_head.weight",
        "layers.1.o.weight": "model.layers.1.self_attn.o_proj.weight",
        "layers.0.q_norm.weight": "model.layers.0.self_attn.q_norm.weight",
        "layers.0.input_norm.weight": "model.layers.0.input_layernorm.weight",
        "norm.weight": "model.norm.weight",
    }
    block = {"down": "down_proj.weight"}
    if name != "qwen3":
        fused = ("gate_up", "experts.gate_up_proj"), ("down", "experts.down_proj")
        block = {"router": "gate.weight", **dict(fused)}
    if name == "qwen2-experts":
        del pairs["layers.0.q_norm.weight"]
        block |= {"shared_gate": "shared_expert_gate.weight"}
        block |= {"shared_down": "shared_expert.down_proj.weight"}
    pairs |= {f"layers.2.{n}.weight": f"model.layers.2.mlp.{other}" for n, other in block.items()}
    for name, other in pairs.items():
        expected = theirs[other].grad.reshape(ours[name].shape)
        assert (ours[name] - expected).norm() <= 1e-4 * expected.norm(), name
