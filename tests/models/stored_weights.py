"""Sizes of a small model, and all weights of a model directory at once, which only tests want."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from jetrl.models.families import ModelConfig
from jetrl.models.hf import open_weights, read_config

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def load_weights(path: str | Path, config: ModelConfig) -> dict[str, Tensor]:
    with open_weights(path, config) as weights:
        return dict(weights)


def read_model(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    config = ModelConfig.from_hf(read_config(path))
    return config, load_weights(path, config)
