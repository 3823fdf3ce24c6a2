"""The image tower: frozen, computed once per image, read by sampler and trainer.

The modules and the image processor are those of transformers. The processor (the one based on
Pillow; torchvision's resizes to other pixels) cuts an image into tiles. Each tile is one forward,
so the bits of its features do not depend on other images. Features are in the dtype of activations
and stay in CPU memory, up to `MOST_KEPT` bytes; those dropped are computed again when needed.

In a prompt's text each image is `<image>`, which becomes its tokens:

    <fake_token_around_image><global-img><image>...<image><fake_token_around_image>

An image of several tiles has them row by row, each after <row_1_col_2>, and then the whole image.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import PIL.Image
import torch
from torch import Tensor, nn
from transformers import models

from jetrl.errors import UserError
from jetrl.files import checked
from jetrl.models.block import Shapes
from jetrl.models.hf_files import first_line
from jetrl.models.packed import ImageRows
from jetrl.models.vision_shape import PROCESSOR, VisionShape
from jetrl.types import IMAGE_MARK, Image, ImageSpan, Json
from jetrl.types.images import decoded

MOST_KEPT = 2**31  # bytes of features
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"
IMAGE_TOKENS = (
    *(IMAGE_MARK, _AROUND, _WHOLE),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
"""The special tokens of images in a tokenizer."""
_MODULES = "model."  # in front of the names of the tower's modules in files


class _Modules(nn.Module):
    """The tower and its connector, with their names in files."""

    def __init__(self, shape: VisionShape, width: int) -> None:
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


def tower_shapes(shape: VisionShape, width: int) -> Shapes:
    """Return the shapes of the tower's tensors by their names in files."""
    with torch.device("meta"):
        tensors = _Modules(shape, width).state_dict()
    return {_MODULES + name: tuple(tensor.shape) for name, tensor in tensors.items()}


class ImageTower:
    """The tokens and the features of images for one model.

    Args:
        width: The width of the language model.
        tensors: The tower's tensors by their names in files; None: only tokens are counted.

    Attributes:
        computed: The number of times that an image's features were computed.

    Raises:
        UserError: The contents of preprocessor_config.json do not fit the tower.
    """

    def __init__(
        self,
        shape: VisionShape,
        width: int,
        processor: Json,
        tensors: Mapping[str, Tensor] | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.shape, self.computed = shape, 0
        self._device, self._dtype = device, dtype
        self._processor = _processor(processor, shape.vision_config.image_size)
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._modules: _Modules | None = None
        if tensors is not None:
            with torch.device("meta"):
                self._modules = _Modules(shape, width).requires_grad_(False).eval()
            placed = {
                name.removeprefix(_MODULES): tensor.to(device, dtype)
                for name, tensor in tensors.items()
            }
            self._modules.load_state_dict(placed, assign=True)

    def expanded(self, text: str, images: Sequence[Image], where: str) -> str:
        """Return a text with the tokens of images in their places.

        Raises UserError, with `where` in front, if there are more places than images, or less.
        """
        first, *rest = text.split(IMAGE_MARK)
        if len(rest) != len(images):
            raise UserError(
                f"{where}: {len(rest)} places of images ({IMAGE_MARK}) for {len(images)} images; "
                "give each image one place"
            )
        texts = (self._text_of(image) + after for image, after in zip(images, rest, strict=True))
        return first + "".join(texts)

    def _text_of(self, image: Image) -> str:
        """Return the text whose tokens stand for an image."""
        rows, columns = self._grid(image)
        features = IMAGE_MARK * self.shape.tokens
        text = ""
        for row in range(1, rows + 1):
            tiles = (f"{_AROUND}<row_{row}_col_{n}>{features}" for n in range(1, columns + 1))
            text += "".join(tiles) + "\n"
        return f"{text}{chr(10) * bool(rows)}{_AROUND}{_WHOLE}{features}{_AROUND}"

    def spans(
        self, token_ids: Sequence[int], images: Sequence[Image], where: str
    ) -> tuple[ImageSpan, ...]:
        """Return the tokens that have features of images in their places.

        Raises UserError, with `where` in front, if there are not as many tokens as features.
        """
        runs = []
        groups = itertools.groupby(range(len(token_ids)), lambda i: token_ids[i])
        for token, group in groups:
            if token == self.shape.image_token_id:
                places = [*group]
                runs.append((places[0], len(places)))
        counts = [self.shape.tokens * self._num_tiles(image) for image in images]
        found, needed = sum(length for _, length in runs), sum(counts)
        if found != needed:
            raise UserError(
                f"{where}: {found} tokens of images for {needed} features; the tokenizer needs "
                f"{IMAGE_MARK} as a special token, with image_token_id of config.json as its id"
            )
        spans = []
        number, features = 0, 0  # the image, and its features that have places
        for start, length in runs:
            while length:
                taken = min(length, counts[number] - features)
                spans.append(ImageSpan(images[number], start, taken, features))
                start, length, features = start + taken, length - taken, features + taken
                if features == counts[number]:
                    number, features = number + 1, 0
        return tuple(spans)

    def rows(self, spans: Sequence[ImageSpan]) -> ImageRows:
        """Return the image rows of a forward, on the CPU; spans count its tokens."""
        places = [torch.arange(span.start, span.start + span.length) for span in spans]
        features = [
            self.features(span.image)[span.first : span.first + span.length] for span in spans
        ]
        return ImageRows(torch.cat(places), torch.cat(features))

    @torch.no_grad()
    def features(self, image: Image) -> Tensor:
        """Return an image's features, [N, width], on the CPU."""
        kept = self._kept.get(image.digest)
        if kept is not None:
            self._kept.move_to_end(image.digest)
            return kept
        assert self._modules is not None, "a model on device meta computes nothing"
        read = self._processor([[decoded(image)]], return_tensors="pt")
        tiles = read["pixel_values"][0]
        assert len(tiles) == self._num_tiles(image), f"{len(tiles)} tiles of {image}"
        made = [self._modules(tile.to(self._device, self._dtype)) for tile in tiles]
        self.computed += 1
        features = self._kept[image.digest] = torch.cat(made).cpu()
        while sum(each.nbytes for each in self._kept.values()) > MOST_KEPT and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return features

    def _grid(self, image: Image) -> tuple[int, int]:
        """Return the rows and columns of an image's tiles; 0 and 0 if it is only one tile."""
        _, rows, columns = self._processor.get_number_of_image_patches(image.height, image.width)
        return rows, columns

    def _num_tiles(self, image: Image) -> int:
        rows, columns = self._grid(image)
        return rows * columns + 1


def one_tile(shape: VisionShape) -> Json:
    """Return a processor that makes each image one tile, for models without files."""
    edge = {"longest_edge": shape.vision_config.image_size}
    return {"do_image_splitting": False, "size": edge, "max_image_size": edge}


def _processor(contents: Json, side: int) -> Any:
    """Return transformers' image processor; raise UserError if its tiles are not of `side`."""
    library: Any = models.idefics3
    if not hasattr(library, "Idefics3ImageProcessorPil"):
        raise UserError(
            "this version of transformers has no image processor based on Pillow for Idefics3: "
            "install a newer one (constraints.txt names the version that was tested)"
        )
    file = "preprocessor_config.json"
    read = checked(PROCESSOR, contents, file)
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
        trial = made([[PIL.Image.new("RGB", (side, side))]], return_tensors="pt")
    except Exception as error:  # values that transformers does not check
        raise UserError(f"{file}: transformers cannot use it: {first_line(error)}") from error
    shape = tuple(trial["pixel_values"].shape[2:])
    if shape != (3, side, side):
        raise UserError(f"{file}: makes tiles of shape {shape}, not {(3, side, side)}")
    return made
