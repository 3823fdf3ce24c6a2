"""The models of the GPU tests: small, of sizes that every kernel takes, with large weights.

The weights are so large that the layers do something.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import make_samples

from jetrl.types import Completion, Sample

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": True,
    },
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 64},
}


def config(family: str = "qwen3", **changes: Any) -> dict[str, Any]:
    """The contents of a config.json."""
    return {
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        **FAMILIES[family],
        **changes,
    }


def scored(prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> list[Sample]:
    """Completions of the prompts, as many of each, every second one right."""
    return make_samples(prompts, completions, [float(i % 2) for i in range(len(completions))])
