"""The image tower of a model, as config.json describes it; without torch.

A kind of tower has a record here and a reader, paired in `models.vision.READERS`. A family names
its record (`Family.vision`). The fields are keys of config.json.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from jetrl.errors import UserError
from jetrl.files import Stored
from jetrl.models.config_schema import Heads, Layers, Positive, Vocabulary, Width
from jetrl.types import Json

Side = Annotated[int, Field(ge=1, le=2**14)]  # pixels
Number = Annotated[int, Field(ge=0, le=2**14)]
Numbers = Annotated[tuple[Number, ...], Field(strict=False, max_length=2**12)]  # a list in files
Sections = Annotated[Numbers, Field(min_length=3, max_length=3)]
Pixels = Annotated[int, Field(ge=1, le=2**28)]


class VisionShape(Stored, extra="ignore"):
    """The keys of config.json that all towers have.

    Attributes:
        modules: The tower's modules in checkpoints.
        flat: Whether the keys of the language model may stand next to `vision_config`.
    """

    modules: ClassVar[tuple[str, ...]]
    flat: ClassVar[bool] = False

    image_token_id: Vocabulary

    @classmethod
    def tiny(cls, width: int, head_dim: int) -> Json:
        """Return the keys of a tiny model, except for token ids and sizes of the language model.

        `width` is that of the language model, `head_dim` the size of its heads.
        """
        raise NotImplementedError

    @property
    def axes(self) -> tuple[int, ...]:
        """The axis of each rotary pair: 0 time, 1 row, 2 column; empty without M-RoPE."""
        return ()

    @property
    def deep_layers(self) -> int:
        """The number of decoder layers whose outputs get features too."""
        return 0

    @property
    def video_tokens(self) -> frozenset[int]:
        """The tokens of videos, which are not read."""
        return frozenset()

    def forward_bytes(self, num_features: int, width: int, itemsize: int) -> int:
        """Return the bytes of activations while the tower computes the features of an image.

        They are those of transformers' modules where most are held: at the rotary positions or the
        end of attention, or in the MLP. `width` is that of the language model, `itemsize` the bytes
        of a value. `tests/memory/test_towers.py` compares them with measurements.
        """
        raise NotImplementedError

    def saved_bytes(self, num_features: int, itemsize: int, whole: bool) -> int:
        """Return the bytes of activations that the largest part of an image saves for backward.

        Not `whole`: only the connector is trained. The others are as in `forward_bytes`.
        """
        raise NotImplementedError

    def misfit(self, width: int, head_dim: int, num_layers: int) -> str | None:
        """Return words for sizes that do not fit the language model; None if all do."""
        return None


class VisionConfig(Stored, extra="ignore"):
    """The contents of `vision_config` of a SigLIP tower, with transformers' defaults."""

    hidden_size: Width = 1152
    intermediate_size: Width = 3072
    num_hidden_layers: Layers = 12
    num_attention_heads: Heads = 16
    num_channels: Literal[3] = 3
    image_size: Side = 224
    patch_size: Side = 32
    hidden_act: Literal["gelu_pytorch_tanh", "gelu"] = "gelu_pytorch_tanh"
    layer_norm_eps: Positive = 1e-6


class TiledShape(VisionShape):
    """The tower of Idefics3 and SmolVLM: SigLIP over tiles of one size, then a pixel shuffle.

    The shuffle puts `scale_factor` x `scale_factor` neighbors side by side, before a projection to
    the language model's width. One tile gives `tokens` features.

    Raises:
        ValueError: Sizes that are not multiples of each other.
    """

    modules = ("model.vision_model", "model.connector")

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
        _check_multiples(pairs)
        return self

    @classmethod
    def tiny(cls, width: int, head_dim: int) -> Json:
        tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        tower |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 8}
        return {"vision_config": tower, "scale_factor": 2}

    def forward_bytes(self, num_features: int, width: int, itemsize: int) -> int:
        tower = self.vision_config
        pixels = tower.num_channels * tower.patch_size**2
        layer = max(8 * tower.hidden_size, 4 * tower.hidden_size + 2 * tower.intermediate_size)
        # Tile by tile; features of all tiles stay.
        return itemsize * (self._patches**2 * (pixels + layer) + num_features * width)

    def saved_bytes(self, num_features: int, itemsize: int, whole: bool) -> int:
        tower = self.vision_config
        values = tower.hidden_size  # what the projection multiplies
        if whole:
            layer = 8 * tower.hidden_size + 2 * tower.intermediate_size
            pixels = tower.num_channels * tower.patch_size**2
            values += tower.hidden_size + pixels + tower.num_hidden_layers * layer
        return itemsize * self._patches**2 * values

    @property
    def _patches(self) -> int:
        return self.vision_config.image_size // self.vision_config.patch_size

    @property
    def tokens(self) -> int:
        """The number of features of a tile."""
        return (self._patches // self.scale_factor) ** 2


class GridVisionConfig(Stored, extra="ignore"):
    """The keys of `vision_config` that towers over patches share, with transformers' defaults."""

    in_channels: Literal[3] = 3
    num_heads: Heads = 16
    spatial_merge_size: Annotated[int, Field(ge=1, le=64)] = 2
    temporal_patch_size: Annotated[int, Field(ge=1, le=64)] = 2
    out_hidden_size: Width = 3584
    depth: Layers
    hidden_size: Width
    intermediate_size: Width
    patch_size: Side


class GridShape(VisionShape):
    """A tower over the patches of an image of any size, with a merger.

    The merger joins `spatial_merge_size` x `spatial_merge_size` patches to one feature. The rotary
    pairs of the language model turn by time, row and column, `mrope_section` pairs each.

    Raises:
        ValueError: Sizes that are not multiples of each other.
    """

    vision_config: GridVisionConfig
    image_token_id: Vocabulary = 151655
    video_token_id: Vocabulary = 151656
    mrope_section: Sections

    @model_validator(mode="after")
    def _divides(self) -> Self:
        tower = self.vision_config
        _check_multiples({"hidden_size, 4 x num_heads": (tower.hidden_size, 4 * tower.num_heads)})
        return self

    @property
    def side(self) -> int:
        """The pixels of a feature's side."""
        return self.vision_config.patch_size * self.vision_config.spatial_merge_size

    @property
    def video_tokens(self) -> frozenset[int]:
        return frozenset({self.video_token_id})

    def forward_bytes(self, num_features: int, width: int, itemsize: int) -> int:
        tower, hidden = self.vision_config, self.vision_config.hidden_size
        pixels = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
        # In float32: queries and keys with what their rotation makes, and its angles.
        rotated = 5 * itemsize * hidden + 4 * 6 * hidden
        layer = max(rotated, itemsize * max(10 * hidden, self._mlp_values))
        angles = 2 * 4 * hidden // tower.num_heads
        patch = itemsize * pixels + layer + angles + self._position_bytes
        features = itemsize * width * (1 + self.deep_layers)
        return num_features * (tower.spatial_merge_size**2 * patch + features)

    def saved_bytes(self, num_features: int, itemsize: int, whole: bool) -> int:
        tower = self.vision_config
        patch = 4 * itemsize * tower.hidden_size * (1 + self.deep_layers)  # of each merger
        if whole:
            patch += itemsize * tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
            patch += tower.depth * self._saved_by_layer(itemsize)
        return num_features * tower.spatial_merge_size**2 * patch

    def _saved_by_layer(self, itemsize: int) -> int:
        """Return the bytes of a patch that a layer saves for backward."""
        raise NotImplementedError

    @property
    def _mlp_values(self) -> int:
        """The values of a patch in the MLP of a layer."""
        raise NotImplementedError

    @property
    def _position_bytes(self) -> int:
        """The bytes of a patch's learned position."""
        return 0

    def misfit(self, width: int, head_dim: int, num_layers: int) -> str | None:
        if sum(self.mrope_section) != head_dim // 2:
            return (
                f"mrope_section = {[*self.mrope_section]} has {sum(self.mrope_section)} pairs of "
                f"channels; should be {head_dim // 2}, half of a head"
            )
        made = self.vision_config.out_hidden_size
        if made != width:
            return f"vision_config.out_hidden_size = {made}: should be hidden_size = {width}"
        return None


class WindowVisionConfig(GridVisionConfig, extra="ignore"):
    """The contents of `vision_config` of Qwen2.5-VL, with transformers' defaults."""

    depth: Layers = 32
    hidden_size: Width = 3584
    intermediate_size: Width = 3420
    patch_size: Side = 14
    window_size: Side = 112
    fullatt_block_indexes: Numbers = (7, 15, 23, 31)
    hidden_act: Literal["silu"] = "silu"


class WindowShape(GridShape):
    """The tower of Qwen2.5-VL, most of whose layers attend within windows of patches.

    The first pairs of channels turn by time, the next by row, the last by column.
    """

    modules = ("visual",)
    flat = True

    vision_config: WindowVisionConfig
    mrope_section: Sections = (16, 24, 24)

    @model_validator(mode="after")
    def _has_whole_windows(self) -> Self:
        sizes = (self.vision_config.window_size, self.side)
        _check_multiples({"window_size, patch_size x spatial_merge_size": sizes})
        return self

    @classmethod
    def tiny(cls, width: int, head_dim: int) -> Json:
        rows = columns = 3 * head_dim // 16
        sections = [head_dim // 2 - rows - columns, rows, columns]
        return {
            "vision_config": {**_tiny_grid(width), "window_size": 16, "fullatt_block_indexes": [1]},
            "text_config": {"rope_scaling": {"type": "mrope", "mrope_section": sections}},
        }

    def _saved_by_layer(self, itemsize: int) -> int:
        hidden, inner = self.vision_config.hidden_size, self.vision_config.intermediate_size
        return itemsize * (11 * hidden + 4 * inner) + 2 * 4 * hidden  # norms save float32

    @property
    def _mlp_values(self) -> int:
        return 3 * (self.vision_config.hidden_size + self.vision_config.intermediate_size)

    @property
    def axes(self) -> tuple[int, ...]:
        counts = enumerate(self.mrope_section)
        return tuple(axis for axis, count in counts for _ in range(count))


class DeepVisionConfig(GridVisionConfig, extra="ignore"):
    """The contents of `vision_config` of Qwen3-VL, with transformers' defaults."""

    depth: Layers = 27
    hidden_size: Width = 1152
    intermediate_size: Width = 4304
    patch_size: Side = 16
    num_position_embeddings: Annotated[int, Field(ge=1, le=2**20)] = 2304
    deepstack_visual_indexes: Numbers = (8, 16, 24)
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"


class DeepShape(GridShape):
    """The tower of Qwen3-VL, whose inner layers give features to the first decoder layers too.

    Pairs of channels turn by time, row and column in turns, up to three times a section, and the
    rest by time.

    Raises:
        ValueError: A layer that the tower does not have, or positions that are not a square.
    """

    modules = ("model.visual",)

    vision_config: DeepVisionConfig
    mrope_section: Sections = (24, 20, 20)
    mrope_interleaved: Literal[True] = True

    @model_validator(mode="after")
    def _fits(self) -> Self:
        tower = self.vision_config
        deepest = max(tower.deepstack_visual_indexes, default=0)
        if deepest >= tower.depth:
            raise ValueError(f"deepstack_visual_indexes has {deepest}, of {tower.depth} layers")
        if math.isqrt(tower.num_position_embeddings) ** 2 != tower.num_position_embeddings:
            raise ValueError(
                f"num_position_embeddings = {tower.num_position_embeddings}: no square"
            )
        return self

    @classmethod
    def tiny(cls, width: int, head_dim: int) -> Json:
        rows = columns = head_dim // 6
        sections = [head_dim // 2 - rows - columns, rows, columns]
        rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": sections}
        return {
            "vision_config": {
                **_tiny_grid(width),
                "num_position_embeddings": 36,
                "deepstack_visual_indexes": [0],
            },
            "text_config": {"rope_scaling": rope},
        }

    def _saved_by_layer(self, itemsize: int) -> int:
        return itemsize * (
            11 * self.vision_config.hidden_size + 2 * self.vision_config.intermediate_size
        )

    @property
    def _mlp_values(self) -> int:
        return 3 * self.vision_config.hidden_size + 2 * self.vision_config.intermediate_size

    @property
    def _position_bytes(self) -> int:
        return 4 * self.vision_config.hidden_size  # float32

    @property
    def axes(self) -> tuple[int, ...]:
        _, rows, columns = self.mrope_section
        ends = (0, 3 * rows, 3 * columns)
        pairs = range(sum(self.mrope_section))
        return tuple(pair % 3 if pair < ends[pair % 3] else 0 for pair in pairs)

    @property
    def deep_layers(self) -> int:
        return len(self.vision_config.deepstack_visual_indexes)

    def misfit(self, width: int, head_dim: int, num_layers: int) -> str | None:
        deep = self.deep_layers
        if deep >= num_layers:
            return (
                f"vision_config.deepstack_visual_indexes has {deep} layers, whose features go to "
                f"as many decoder layers; num_hidden_layers = {num_layers} should be above {deep}"
            )
        return super().misfit(width, head_dim, num_layers)


def _tiny_grid(width: int) -> Json:
    sizes = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    return {**sizes, "patch_size": 4, "out_hidden_size": width}


def check_pixels(pixels: Tensor, file: str) -> None:
    """Raise UserError if a white image has values that no tower was trained on."""
    largest = float(pixels.abs().max())
    if not largest <= 256:  # NaN is not
        raise UserError(
            f"{file}: makes pixels of up to {largest:g}; should be at most 256: see "
            "rescale_factor, image_mean and image_std"
        )


def _check_multiples(pairs: dict[str, tuple[int, int]]) -> None:
    for names, (whole, part) in pairs.items():
        if whole % part or not whole:
            raise ValueError(f"vision_config has {names} = {whole}, {part}: not a multiple")


class Edge(Stored):
    """A size of images by its longest edge, in pixels."""

    longest_edge: Side


class TileProcessorConfig(Stored):
    """The keys of preprocessor_config.json that give the number of an image's tiles."""

    do_image_splitting: bool = True
    size: Edge
    max_image_size: Edge


class Area(Stored):
    """The least and the most pixels of a resized image, under the names of transformers."""

    shortest_edge: Pixels | None = None
    longest_edge: Pixels | None = None


class PatchProcessorConfig(Stored):
    """The keys of preprocessor_config.json that give the grid of an image's patches."""

    do_resize: Literal[True] = True
    size: Area | None = None
    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    patch_size: Side = 14
    temporal_patch_size: int = 2
    merge_size: int = 2


def mrope_of(text: Json) -> Json:
    """Return the keys of the rotary rule in config.json that a tower's record reads."""
    rope: Any = text.get("rope_scaling") or text.get("rope_parameters")
    known = rope if isinstance(rope, dict) else {}
    return {key: known[key] for key in ("mrope_section", "mrope_interleaved") if key in known}
