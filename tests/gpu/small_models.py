"""The models of the GPU tests: small, of sizes that every kernel takes, with large weights.

The weights are so large that the layers do something.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from benchmarks.loads import make_samples

from jetrl import Policy
from jetrl.precision import PrecisionPlan
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
# Every width of SmolLM2-135M ends with a partial group, and here that of its MLP too.
FAMILIES["smollm2"] = FAMILIES["llama"] | {
    "hidden_size": 576,
    "intermediate_size": 1472,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
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


def make_policy(
    contents: dict[str, Any],
    plan: PrecisionPlan | str = "unified",
    device: str = "cuda",
    **options: Any,
) -> Policy:
    """A policy of a config.json under a plan, or a preset's, with some options of the plan."""
    plan = PrecisionPlan.preset(plan) if isinstance(plan, str) else plan
    return Policy.from_config(contents, plan.replace(**options), seed=0, device=device)


def scored(prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> list[Sample]:
    """Completions of the prompts, as many of each, every second one right."""
    return make_samples(prompts, completions, [float(i % 2) for i in range(len(completions))])


def outcome(completions: Sequence[Completion]) -> list[Any]:
    return [(c.token_ids, c.logprobs, c.finish_reason) for c in completions]


def requested(when: str = "current") -> int:
    """Return the bytes of the tensors that are alive, or ("peak") of the most that were."""
    found: int = torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]
    return found
