"""The shapes of well-known models, which benchmarks and tests share, as contents of config.json."""

from __future__ import annotations

from typing import Any

from jetrl.models.families import ModelConfig, parameter_shapes
from jetrl.models.vision_shape import WindowShape

_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "rms_norm_eps": 1e-6,
    "norm_topk_prob": True,
}
_OLMOE = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "rms_norm_eps": 1e-5,
    "norm_topk_prob": False,
    "clip_qkv": None,
}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}
_QWEN_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "rms_norm_eps": 1e-6,
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}


def _shape(
    base: dict[str, Any],
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
) -> dict[str, Any]:
    return {
        **base,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocab,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    }


# Names with `tiny` are not well-known models: for trying a benchmark out on a CPU.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {**_shape(_QWEN3, 1024, 3072, 28, 16, 8, 151936), "tie_word_embeddings": True},
    "qwen3-1.7b": {**_shape(_QWEN3, 2048, 6144, 28, 16, 8, 151936), "tie_word_embeddings": True},
    "qwen3-8b": _shape(_QWEN3, 4096, 12288, 36, 32, 8, 151936),
    "qwen3-14b": _shape(_QWEN3, 5120, 17408, 40, 40, 8, 151936),
    "qwen3-32b": _shape(_QWEN3, 5120, 25600, 64, 64, 8, 151936),
    "qwen2.5-7b": _shape(_QWEN2, 3584, 18944, 28, 28, 4, 152064),
    "llama3.1-8b": _shape(_LLAMA, 4096, 14336, 32, 32, 8, 128256),
    "llama3.1-70b": _shape(_LLAMA, 8192, 28672, 80, 64, 8, 128256),
    "smollm2-135m": {
        **_shape(_LLAMA, 576, 1536, 30, 9, 3, 49152),
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        **_shape(_QWEN2, 896, 4864, 24, 14, 2, 151936),
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "tiny": _shape(_QWEN3, 256, 512, 2, 2, 1, 256),
}
# Mixtures of experts; of Qwen3's `intermediate_size` is not used.
SHAPES["qwen3-30b-a3b"] = _shape(_QWEN3_MOE, 2048, 6144, 48, 32, 4, 151936) | {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
SHAPES["olmoe-1b-7b"] = _shape(_OLMOE, 2048, 1024, 16, 16, 16, 50304) | {
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
}
SHAPES["tiny-experts"] = (
    SHAPES["tiny"]
    | _QWEN3_MOE
    | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
)
# Models with images.
SHAPES["qwen2.5-vl-3b"] = _shape(_QWEN_VL, 2048, 11008, 36, 16, 2, 151936) | {
    "tie_word_embeddings": True,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 2048},
}
SHAPES["tiny-vl"] = (
    SHAPES["tiny"]
    | _QWEN_VL
    | {
        **WindowShape.tiny(width=256, head_dim=128)["text_config"],
        "vision_config": WindowShape.tiny(width=256, head_dim=128)["vision_config"],
        "image_token_id": 250,
        "video_token_id": 251,
    }
)


def linear_shapes(model: str) -> dict[str, tuple[int, int]]:
    """Return (N, K) of each linear layer of a dense model of `SHAPES`, as our layers stack them."""
    config = ModelConfig.from_hf(SHAPES[model])
    shapes = parameter_shapes(config.first_layers(1))
    found = {}
    for name in (*config.layers[0].mixer.linears, *config.layers[0].block.linears):
        rows, columns = shapes[f"layers.0.{name}.weight"]
        found[name] = (rows, columns)
    return found
