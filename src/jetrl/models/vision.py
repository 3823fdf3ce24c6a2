"""The image tower: computed once per image, read by sampler and trainer.

A reader per kind of tower has what differs: the modules, which are those of transformers, the image
processor (the one based on Pillow; torchvision's resizes to other pixels), and the text whose
tokens stand for an image. Each image is computed by itself, so the bits of its features do not
depend on other images. Features are in the dtype of activations and stay in CPU memory, up to
`MOST_KEPT` bytes; those dropped are computed again when needed. `models.vision_trained` has the
tower that is trained.
"""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from jetrl.errors import UserError, named
from jetrl.models.block import Shapes
from jetrl.models.packed import ImageRows
from jetrl.models.vision_patches import DeepReader, PatchReader
from jetrl.models.vision_shape import DeepShape, TiledShape, VisionShape, WindowShape
from jetrl.models.vision_tiles import TileReader
from jetrl.settings.sections import TowerPart
from jetrl.types import IMAGE_MARK, Image, ImageGrid, ImageSpan, Json

MOST_KEPT = 2**31  # bytes of features


class ImageReader(Protocol):
    """A reader of images for a kind of tower, by the contents of preprocessor_config.json.

    Attributes:
        tokens: The special tokens of images in a tokenizer.
        mark: The token that has a feature in its place.
        place: The text of an image's place, with one `mark`, in the family's chat template.
        prefix: The module of the tower in checkpoints, with a dot.
        connector: The modules of the tower, with a dot each, that make features of the width of the
            language model.
        bound: The keys of preprocessor_config.json that bound an image's features.
    """

    tokens: ClassVar[tuple[str, ...]]
    mark: ClassVar[str]
    place: ClassVar[str]
    prefix: ClassVar[str]
    connector: ClassVar[tuple[str, ...]]
    bound: ClassVar[str]

    @staticmethod
    def modules(shape: Any, width: int) -> nn.Module:
        """Return the tower, on the default device, for a language model of this width."""
        ...

    @staticmethod
    def settings(shape: Any) -> Json:
        """Return the contents of preprocessor_config.json for models without files."""
        ...

    def text_of(self, image: Image) -> str:
        """Return the text whose tokens stand for an image, in place of a `mark`.

        Raises UserError for an image of a shape that the tower does not take.
        """
        ...

    def num_features(self, image: Image) -> int: ...

    @property
    def most_features(self) -> int:
        """The features of the largest image that the processor allows."""
        ...

    def grid(self, image: Image) -> tuple[int, int] | None:
        """Return the rows and columns of features with M-RoPE; None without it."""
        ...

    def parts(self, image: Image) -> Iterator[tuple[Tensor, ...]]:
        """Return what the tower reads of an image, on the CPU: a forward for each part."""
        ...

    def features(self, modules: nn.Module, part: tuple[Tensor, ...]) -> Tensor:
        """Return the features of a part, as in `ImageRows`; an image has those of all its parts."""
        ...


# The reader of each kind of tower.
READERS: dict[type[VisionShape], Any] = {
    TiledShape: TileReader,
    WindowShape: PatchReader,
    DeepShape: DeepReader,
}


def tower_shapes(shape: VisionShape, width: int) -> Shapes:
    """Return the shapes of the tower's tensors by their names in files."""
    reader = READERS[type(shape)]
    with torch.device("meta"):
        tensors = reader.modules(shape, width).state_dict()
    return {reader.prefix + name: tuple(tensor.shape) for name, tensor in tensors.items()}


def trained_shapes(shape: VisionShape, width: int, trained: TowerPart) -> Shapes:
    """Return the shapes of the tower's trained parameters by their names in files."""
    reader = READERS[type(shape)]
    prefixes = {"frozen": (), "connector": reader.connector, "all": ("",)}[trained]
    starts = tuple(reader.prefix + prefix for prefix in prefixes)
    shapes = tower_shapes(shape, width) if starts else {}
    return {name: size for name, size in shapes.items() if name.startswith(starts)}


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
        self._reader: ImageReader = READERS[type(shape)](shape, processor)
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._modules: nn.Module | None = None
        if tensors is not None:
            with torch.device("meta"):
                self._modules = self._reader.modules(shape, width).requires_grad_(False).eval()
            placed = {
                name.removeprefix(self._reader.prefix): tensor.to(device, dtype)
                for name, tensor in tensors.items()
            }
            self._modules.load_state_dict(placed, assign=True)
            self._modules.to(device)  # buffers that files do not have

    def expanded(self, text: str, images: Sequence[Image], where: str) -> str:
        """Return a text with the tokens of images in their places.

        Raises UserError, with `where` in front, if there are more places than images, or less.
        """
        reader = self._reader
        first, *rest = text.replace(IMAGE_MARK, reader.place).split(reader.mark)
        if len(rest) != len(images):
            raise UserError(
                f"{where}: {len(rest)} places of images ({IMAGE_MARK}) for {len(images)} images; "
                "give each image one place"
            )
        with named(where):
            texts = [reader.text_of(image) for image in images]
        return first + "".join(map(operator.add, texts, rest))

    def num_features(self, image: Image) -> int:
        """Return how many tokens have features of an image in their places."""
        return self._reader.num_features(image)

    @property
    def most_features(self) -> int:
        """The tokens of the largest image that preprocessor_config.json allows."""
        return self._reader.most_features

    @property
    def bound(self) -> str:
        """The keys of preprocessor_config.json that bound an image's tokens."""
        return self._reader.bound

    def spans(
        self, token_ids: Sequence[int], images: Sequence[Image], where: str
    ) -> tuple[ImageSpan, ...]:
        """Return the tokens that have features of images in their places.

        Raises UserError, with `where` in front, if there are not as many tokens as features.
        """
        if not self.shape.video_tokens.isdisjoint(token_ids):
            raise UserError(f"{where}: it has a place of a video; only images are read")
        runs = []
        groups = itertools.groupby(range(len(token_ids)), lambda i: token_ids[i])
        for token, group in groups:
            if token == self.shape.image_token_id:
                places = [*group]
                runs.append((places[0], len(places)))
        counts = [self.num_features(image) for image in images]
        found, needed = sum(length for _, length in runs), sum(counts)
        if found != needed:
            raise UserError(
                f"{where}: {found} tokens of images for {needed} features; the tokenizer needs "
                f"{self._reader.mark} as a special token, with image_token_id of config.json as "
                "its id"
            )
        spans: list[ImageSpan] = []
        number, features = 0, 0  # the image, and its features that have places
        for start, length in runs:
            while length:
                taken = min(length, counts[number] - features)
                grid, sides = None, self._reader.grid(images[number])
                if sides is not None:
                    position = start - sum(span.spared for span in spans)
                    grid = ImageGrid(position, rows=sides[0], columns=sides[1])
                spans.append(ImageSpan(images[number], start, taken, features, grid))
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
        turns = torch.cat([self._turns(span) for span in spans]) if self.shape.axes else None
        return ImageRows(torch.cat(places), torch.cat(features), turns)

    def _turns(self, span: ImageSpan) -> Tensor:
        """Return the rotary position of each pair of a span's tokens, int64 [N, R / 2]."""
        grid = span.grid
        assert grid is not None, "an image without its rows and columns"
        number = torch.arange(span.first, span.first + span.length)
        by_axis = torch.stack([0 * number, number // grid.columns, number % grid.columns])
        return (grid.position + by_axis)[torch.tensor(self.shape.axes)].mT

    @torch.no_grad()
    def features(self, image: Image) -> Tensor:
        """Return an image's features, as in `ImageRows`, on the CPU."""
        kept = self._kept.get(image.digest)
        if kept is not None:
            self._kept.move_to_end(image.digest)
            return kept
        made = torch.cat([self._forward(part) for part in self._reader.parts(image)])
        assert len(made) == self.num_features(image), f"{len(made)} features of {image}"
        self.computed += 1
        features = self._kept[image.digest] = made.cpu()
        while sum(each.nbytes for each in self._kept.values()) > MOST_KEPT and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return features

    def _forward(self, part: tuple[Tensor, ...]) -> Tensor:
        """Return the features of a part of an image, on the device."""
        assert self._modules is not None, "a model on device meta computes nothing"
        placed = (x.to(self._device, self._dtype if x.is_floating_point() else None) for x in part)
        return self._reader.features(self._modules, tuple(placed))
