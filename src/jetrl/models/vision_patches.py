"""The readers of Qwen2.5-VL and Qwen3-VL: an image keeps its shape and is a grid of patches.

In a prompt's text each image is `<image>`, or what the chat template writes; it becomes

    <|vision_start|><|image_pad|>...<|image_pad|><|vision_end|>

with one token for each feature, row by row. An image is resized to sides that are multiples of a
feature's, within the least and the most pixels that preprocessor_config.json gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import PIL.Image
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from transformers import models

from jetrl.errors import UserError
from jetrl.files import checked
from jetrl.models.hf_files import first_line
from jetrl.models.vision_shape import (
    DeepShape,
    GridShape,
    PatchProcessorConfig,
    WindowShape,
    check_pixels,
)
from jetrl.types import Image, Json
from jetrl.types.images import decoded

_FILE = "preprocessor_config.json"
_START, _MARK, _END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
VIDEO = "<|video_pad|>"


class PatchReader:
    """The `vision.ImageReader` of images as grids of patches, of Qwen2.5-VL."""

    tokens = (_START, _END, _MARK, VIDEO)
    mark, place = _MARK, _START + _MARK + _END
    prefix, bound = "visual.", "max_pixels, or size.longest_edge,"
    connector: ClassVar[tuple[str, ...]] = ("merger.",)

    def __init__(self, shape: GridShape, processor: Json) -> None:
        self._shape = shape
        self._processor = _processor(processor, shape)

    @staticmethod
    def modules(shape: WindowShape, width: int) -> nn.Module:
        # transformers imports the module now, which takes seconds that models of text do not need.
        family: Any = models.qwen2_5_vl
        config = family.Qwen2_5_VLVisionConfig(**shape.vision_config.model_dump())
        library = family.modeling_qwen2_5_vl
        angles = _part(library, "Qwen2_5_VLVisionRotaryEmbedding")
        tower: nn.Module = library.Qwen2_5_VisionTransformerPretrainedModel._from_config(config)
        with torch.device("cpu"):  # they are not in files
            tower.rotary_pos_emb = angles(tower.config)
        return tower

    @staticmethod
    def settings(shape: GridShape) -> Json:
        """Return a processor with transformers' limits of 4 to 1,280 features per image."""
        tower, pixels = shape.vision_config, shape.side**2
        return {
            "size": {"shortest_edge": 4 * pixels, "longest_edge": 1280 * pixels},
            "patch_size": tower.patch_size,
            "temporal_patch_size": tower.temporal_patch_size,
            "merge_size": tower.spatial_merge_size,
        }

    def text_of(self, image: Image) -> str:
        return _MARK * self.num_features(image)

    def num_features(self, image: Image) -> int:
        rows, columns = self.grid(image)
        return rows * columns

    @property
    def most_features(self) -> int:
        most: int = self._processor.size.longest_edge // self._shape.side**2
        return most

    def grid(self, image: Image) -> tuple[int, int]:
        """Return the rows and columns of an image's features.

        Raises UserError for an image that is too narrow for the tower or its processor.
        """
        side, size = self._shape.side, self._processor.size
        what = f"an image of {image.width} x {image.height} pixels"
        library: Any = models.qwen2_vl
        try:
            height, width = library.image_processing_pil_qwen2_vl.smart_resize(
                image.height, image.width, side, size.shortest_edge, size.longest_edge
            )
        except ValueError:  # its only refusal
            raise UserError(f"{what}: one side is more than 200 times the other; cut it") from None
        if height * width > size.longest_edge:
            raise UserError(
                f"{what} becomes {width} x {height}, more than the {size.longest_edge} pixels of "
                f"{_FILE} (max_pixels, size.longest_edge); cut it, or raise the limit"
            )
        return height // side, width // side

    def parts(self, image: Image) -> Iterator[tuple[Tensor, ...]]:
        read = self._processor([decoded(image)], return_tensors="pt")
        grid = read["image_grid_thw"]
        merge = self._shape.vision_config.spatial_merge_size
        assert tuple(grid[0, 1:] // merge) == self.grid(image), f"patches {grid} of {image}"
        yield read["pixel_values"], grid

    def features(self, modules: nn.Module, part: tuple[Tensor, ...]) -> Tensor:
        pixels, grid = part
        return self._joined(modules(pixels, grid))

    def _joined(self, made: Any) -> Tensor:
        """Return the features in the output of the tower."""
        features: Tensor = made.pooler_output
        return features


class DeepReader(PatchReader):
    """The `vision.ImageReader` of Qwen3-VL, with features for several decoder layers."""

    prefix = "model.visual."
    connector = ("merger.", "deepstack_merger_list.")

    @staticmethod
    def modules(shape: DeepShape, width: int) -> nn.Module:  # type: ignore[override]
        family: Any = models.qwen3_vl
        config = family.Qwen3VLVisionConfig(**shape.vision_config.model_dump())
        library = family.modeling_qwen3_vl
        angles = _part(library, "Qwen3VLVisionRotaryEmbedding")
        tower: nn.Module = library.Qwen3VLVisionModel._from_config(config)
        with torch.device("cpu"):
            tower.rotary_pos_emb = angles(tower.config)
        return tower

    def _joined(self, made: Any) -> Tensor:
        return torch.cat([made.pooler_output, *made.deepstack_features], dim=-1)


def _part(library: Any, name: str) -> Any:
    """Return a class of transformers; raise UserError if its version has none."""
    if not hasattr(library, name):
        raise UserError(
            f"this version of transformers has no {name}: install a newer one (constraints.txt "
            "names the version that was tested)"
        )
    return getattr(library, name)


def _processor(contents: Json, shape: GridShape) -> Any:
    """Return transformers' image processor; raise UserError if its patches do not fit the tower."""
    processor = _part(models.qwen2_vl, "Qwen2VLImageProcessorPil")
    read, tower = checked(TypeAdapter(PatchProcessorConfig), contents, _FILE), shape.vision_config
    expected = {
        "patch_size": tower.patch_size,
        "temporal_patch_size": tower.temporal_patch_size,
        "merge_size": tower.spatial_merge_size,
    }
    for key, value in expected.items():
        if (found := getattr(read, key)) != value:
            raise UserError(f"{_FILE}: {key} = {found}: should be {value}, as in config.json")
    try:
        made = processor.from_dict(dict(contents))
    except Exception as error:  # values that transformers does not check
        raise UserError(f"{_FILE}: transformers cannot use it: {first_line(error)}") from error
    least, most = made.size.shortest_edge, made.size.longest_edge
    if not least or not most:
        raise UserError(
            f"{_FILE}: no least and most pixels of an image; give size.shortest_edge and "
            "size.longest_edge, or min_pixels and max_pixels"
        )
    if least > most:
        raise UserError(
            f"{_FILE}: an image has at least {least} pixels and at most {most} (size, or "
            "min_pixels and max_pixels)"
        )
    try:
        trial = made([PIL.Image.new("RGB", (shape.side, shape.side), "white")], return_tensors="pt")
    except Exception as error:
        raise UserError(f"{_FILE}: transformers cannot use it: {first_line(error)}") from error
    width = 3 * tower.temporal_patch_size * tower.patch_size**2
    if trial["pixel_values"].shape[1:] != (width,):
        raise UserError(
            f"{_FILE}: makes patches of {trial['pixel_values'].shape[1]} values, not {width}"
        )
    check_pixels(trial["pixel_values"], _FILE)
    return made
