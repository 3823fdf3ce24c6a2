"""The image tower that is trained with the language model, whole or only its connector.

Its trained parameters are master weights by their names in files; its modules read copies, which
`requantize` rounds as it rounds norms. Features are dropped whenever weights change.

The sampler computes features without gradients, and torch may choose other kernels with them. So
the trainer reads the same features, and backward computes an image's again, part by part, only to
pass the gradient on: exactness does not depend on the kernels. Gradients of parts are added in
float32, in the order of images, and go to `Gradients.add_of_images` once per micro-batch.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from jetrl.models.packed import ImageRows, upload
from jetrl.models.vision import ImageTower
from jetrl.models.weights import Weights
from jetrl.types import Image, ImageSpan


class TrainedTower(ImageTower):
    """An image tower with trained parameters, after `join`."""

    def join(self, weights: Weights) -> None:
        """Connect the tower with its master weights, gradients and `requantize`."""
        if self._modules is None:  # on device meta
            return
        own = dict(self._modules.named_parameters())
        self._weights = weights
        self._copies = {n: own[n.removeprefix(self._reader.prefix)] for n in weights.of_tower}
        for parameter in self._copies.values():
            parameter.requires_grad_()
        weights.follow("image tower", self)

    @torch.no_grad()
    def requantize(self) -> None:
        """Round the master weights into the copies, in place; drop all features."""
        for name, parameter in self._copies.items():
            parameter.copy_(self._weights.whole(name))
        self._kept.clear()

    def tensors(self) -> list[Tensor]:
        """Return the copies, which forwards read."""
        return [parameter.detach() for parameter in self._copies.values()]

    def rows(self, spans: Sequence[ImageSpan]) -> ImageRows:
        rows = super().rows(spans)
        if not torch.is_grad_enabled():
            return rows
        features = upload(rows.features, self._device)
        leaf = next(iter(self._copies.values()))
        return replace(rows, features=_Features.apply(features, leaf, self, spans))

    def add_gradients(self, spans: Sequence[ImageSpan], gradient: Tensor) -> None:
        """Add the gradients of trained parameters, from that of the features of spans [N, ...]."""
        of_image: dict[bytes, tuple[Image, Tensor]] = {}
        lengths = [span.length for span in spans]
        for span, part in zip(spans, gradient.split(lengths), strict=True):
            if span.image.digest not in of_image:
                shape = self.num_features(span.image), gradient.shape[1]
                zeros = torch.zeros(shape, device=gradient.device)
                of_image[span.image.digest] = span.image, zeros
            _, total = of_image[span.image.digest]
            total[span.first : span.first + span.length] += part
        copies = list(self._copies.values())
        sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in copies]
        with torch.enable_grad(), _repeatable(self._device):
            for image, total in of_image.values():
                first = 0
                for part in self._reader.parts(image):
                    made = self._forward(part)
                    wanted = total[first : first + len(made)].to(made.dtype)
                    first += len(made)
                    added = torch.autograd.grad(made, copies, wanted)
                    for total_of_one, one in zip(sums, added, strict=True):
                        total_of_one.add_(one)
        self._weights.gradients.add_of_images(sums)


class _Features(torch.autograd.Function):
    """Features, of which backward goes to the tower; `leaf` makes them need a gradient."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, leaf: Tensor, tower: TrainedTower, spans: Sequence[ImageSpan]
    ) -> Tensor:
        ctx.tower, ctx.spans = tower, spans
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.tower.add_gradients(ctx.spans, gradients[0])
        return None, None, None, None


@contextlib.contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """Let a GPU use only kernels whose sums have an order, as far as torch has them."""
    if device.type == "cpu":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Attention of cuDNN is left out, since its backward does not know the switch.
    known = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    try:
        with warnings.catch_warnings(), sdpa_kernel(known):
            warnings.filterwarnings("ignore", message=".*CUBLAS_WORKSPACE_CONFIG")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
