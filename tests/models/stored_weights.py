"""All weights of a model directory at once, which only tests want."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from jetrl.models.families import ModelConfig
from jetrl.models.hf import open_weights


def load_weights(path: str | Path, config: ModelConfig) -> dict[str, Tensor]:
    with open_weights(path, config) as weights:
        return dict(weights)
