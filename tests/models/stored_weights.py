"""A small model's sizes and config, and the tensors and JSON of a model directory, for tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetrl.models.families import ModelConfig
from jetrl.models.hf import model_config, open_weights

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


def our_config(family: str = "qwen3", tied: bool = False, **sizes: Any) -> ModelConfig:
    raw = {"model_type": family, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied}
    return ModelConfig.from_hf(SIZES | raw | sizes)


def read_model(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    config = model_config(path)
    return config, dict(open_weights(path, config))


def change_tensors(
    path: Path, change: Callable[[dict[str, Tensor]], object], file: str = "model.safetensors"
) -> None:
    """Write the tensors of a directory again after a function has changed the dictionary."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path / file).items()}
    change(tensors)
    save_file(tensors, str(path / file), metadata={"format": "pt"})


def change_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def assert_same_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name
