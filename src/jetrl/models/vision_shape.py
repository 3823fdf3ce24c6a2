"""The image tower of a model, as config.json describes it; without torch.

A tower is that of Idefics3 and SmolVLM: SigLIP over tiles of one size, then a pixel shuffle, which
puts `scale_factor` x `scale_factor` neighbors side by side, and a projection to the language
model's width. One tile gives `tokens` features.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter, model_validator

from jetrl.files import Stored
from jetrl.models.config_schema import Heads, Layers, Positive, Vocabulary, Width

Side = Annotated[int, Field(ge=1, le=2**14)]  # pixels


class VisionConfig(Stored, extra="ignore"):
    """The contents of `vision_config`, with transformers' defaults."""

    hidden_size: Width = 1152
    intermediate_size: Width = 3072
    num_hidden_layers: Layers = 12
    num_attention_heads: Heads = 16
    num_channels: Literal[3] = 3
    image_size: Side = 224
    patch_size: Side = 32
    hidden_act: Literal["gelu_pytorch_tanh", "gelu"] = "gelu_pytorch_tanh"
    layer_norm_eps: Positive = 1e-6


class VisionShape(Stored, extra="ignore"):
    """The keys of config.json for images.

    Raises:
        ValueError: Sizes that are not multiples of each other.
    """

    vision_config: VisionConfig
    scale_factor: Annotated[int, Field(ge=1, le=64)] = 2
    image_token_id: Vocabulary = 128257

    @model_validator(mode="after")
    def _divides(self) -> Self:
        tower = self.vision_config
        pairs = {
            "image_size, patch_size": (tower.image_size, tower.patch_size),
            "patches of a side, scale_factor": (self._patches, self.scale_factor),
            "hidden_size, num_attention_heads": (tower.hidden_size, tower.num_attention_heads),
        }
        for names, (whole, part) in pairs.items():
            if whole % part or not whole:
                raise ValueError(f"vision_config has {names} = {whole}, {part}: not a multiple")
        return self

    @property
    def _patches(self) -> int:
        return self.vision_config.image_size // self.vision_config.patch_size

    @property
    def tokens(self) -> int:
        """The number of features of a tile."""
        return (self._patches // self.scale_factor) ** 2


class Edge(Stored):
    """A size of images by its longest edge, in pixels."""

    longest_edge: Side


class ProcessorConfig(Stored):
    """The keys of preprocessor_config.json that give the number of an image's tiles."""

    do_image_splitting: bool = True
    size: Edge
    max_image_size: Edge


VISION, PROCESSOR = TypeAdapter(VisionShape), TypeAdapter(ProcessorConfig)
