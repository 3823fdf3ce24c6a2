"""The reader of Idefics3 and SmolVLM: an image is cut into tiles, each a forward of its own.

In a prompt's text each image is `<image>`, which becomes its tokens:

    <fake_token_around_image><global-img><image>...<image><fake_token_around_image>

An image of several tiles has them row by row, each after <row_1_col_2>, and then the whole image.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import PIL.Image
from pydantic import TypeAdapter
from torch import Tensor, nn
from transformers import models

from jetrl.errors import UserError
from jetrl.files import checked
from jetrl.models.hf_files import first_line
from jetrl.models.vision_shape import TiledShape, TileProcessorConfig, check_pixels
from jetrl.types import IMAGE_MARK, Image, Json
from jetrl.types.images import decoded

_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


class _Modules(nn.Module):
    """The tower and its connector, with their names in files."""

    def __init__(self, shape: TiledShape, width: int) -> None:
        super().__init__()
        # transformers imports the module now, which takes seconds that models of text do not need.
        idefics3: Any = models.idefics3
        vision = idefics3.Idefics3VisionConfig(**shape.vision_config.model_dump())
        library = idefics3.modeling_idefics3
        self.vision_model = library.Idefics3VisionTransformer._from_config(vision)
        self.connector = library.Idefics3Connector(
            SimpleNamespace(
                scale_factor=shape.scale_factor,
                vision_config=vision,
                text_config=SimpleNamespace(hidden_size=width),
            )
        )

    def forward(self, tile: Tensor) -> Tensor:
        """Return the features, [tokens, width], of pixels [3, side, side]."""
        features: Tensor = self.connector(self.vision_model(tile[None]).last_hidden_state)
        return features[0]


class TileReader:
    """The `vision.ImageReader` of images as tiles."""

    tokens = (
        *(IMAGE_MARK, _AROUND, _WHOLE),
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    )
    mark = place = IMAGE_MARK
    prefix, bound = "model.", "do_image_splitting, or size.longest_edge,"
    connector = ("connector.",)
    modules = staticmethod(_Modules)

    def __init__(self, shape: TiledShape, processor: Json) -> None:
        self._shape = shape
        self._processor = _processor(processor, shape.vision_config.image_size)

    @staticmethod
    def settings(shape: TiledShape) -> Json:
        """Return a processor that makes each image one tile."""
        edge = {"longest_edge": shape.vision_config.image_size}
        return {"do_image_splitting": False, "size": edge, "max_image_size": edge}

    def text_of(self, image: Image) -> str:
        rows, columns = self._tiles(image)
        features = IMAGE_MARK * self._shape.tokens
        text = ""
        for row in range(1, rows + 1):
            tiles = (f"{_AROUND}<row_{row}_col_{n}>{features}" for n in range(1, columns + 1))
            text += "".join(tiles) + "\n"
        return f"{text}{chr(10) * bool(rows)}{_AROUND}{_WHOLE}{features}{_AROUND}"

    def num_features(self, image: Image) -> int:
        rows, columns = self._tiles(image)
        return self._shape.tokens * (rows * columns + 1)

    @property
    def most_features(self) -> int:
        edge = self._processor.size["longest_edge"]
        _, rows, columns = self._processor.get_number_of_image_patches(edge, edge)
        return self._shape.tokens * (rows * columns + 1)

    def grid(self, image: Image) -> None:
        return None

    def parts(self, image: Image) -> Iterator[tuple[Tensor, ...]]:
        read = self._processor([[decoded(image)]], return_tensors="pt")
        return ((tile,) for tile in read["pixel_values"][0])

    def features(self, modules: nn.Module, part: tuple[Tensor, ...]) -> Tensor:
        made: Tensor = modules(part[0])
        return made

    def _tiles(self, image: Image) -> tuple[int, int]:
        """Return the rows and columns of an image's tiles; 0 and 0 if it is only one tile."""
        _, rows, columns = self._processor.get_number_of_image_patches(image.height, image.width)
        return rows, columns


def _processor(contents: Json, side: int) -> Any:
    """Return transformers' image processor; raise UserError if its tiles are not of `side`."""
    # transformers 5.17 hides the module behind torchvision from all but an import of its own.
    try:
        library: Any = importlib.import_module(
            "transformers.models.idefics3.image_processing_pil_idefics3"
        )
    except ImportError:
        raise UserError(
            "this version of transformers has no image processor based on Pillow for Idefics3: "
            "install a newer one (constraints.txt names the version that was tested)"
        ) from None
    file = "preprocessor_config.json"
    read = checked(TypeAdapter(TileProcessorConfig), contents, file)
    tile, longest = read.max_image_size.longest_edge, read.size.longest_edge
    if tile != side:
        raise UserError(
            f"{file}: max_image_size.longest_edge = {tile}: should be {side}, "
            "vision_config.image_size in config.json"
        )
    if read.do_image_splitting and longest % tile:
        raise UserError(
            f"{file}: size.longest_edge = {longest}: should be a multiple of "
            f"max_image_size.longest_edge = {tile}"
        )
    try:
        made = library.Idefics3ImageProcessorPil.from_dict(dict(contents))
        trial = made([[PIL.Image.new("RGB", (side, side), "white")]], return_tensors="pt")
    except Exception as error:  # values that transformers does not check
        raise UserError(f"{file}: transformers cannot use it: {first_line(error)}") from error
    shape = tuple(trial["pixel_values"].shape[2:])
    if shape != (3, side, side):
        raise UserError(f"{file}: makes tiles of shape {shape}, not {(3, side, side)}")
    check_pixels(trial["pixel_values"], file)
    return made
