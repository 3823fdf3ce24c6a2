"""The configuration of the smallest decoder that the training tests train: one layer."""

from __future__ import annotations

from typing import Any


def config(**changes: Any) -> dict[str, Any]:
    """The contents of a config.json."""
    return {
        "model_type": "qwen3",
        "vocab_size": 16,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        **changes,
    }


def scalar_config() -> dict[str, Any]:
    """Return the configuration of a model with one layer and a number for a head."""
    return config(
        architectures=["Qwen3ForSequenceClassification"], num_labels=1, tie_word_embeddings=False
    )
