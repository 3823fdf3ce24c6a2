"""Parameters of a model directory that may be in NVFP4 already."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from jetrl.precision.nvfp4 import NVFP4Tensor


class CodedWeights(Mapping[str, Tensor]):
    """The parameters of a model by name, with the codes of those that are in NVFP4.

    As an item such a parameter has the values that its codes stand for, in float32.
    """

    @abstractmethod
    def codes(self, name: str) -> NVFP4Tensor | None:
        """Return a parameter's codes and scales; None where it has 16 or 32 bits, or FP8."""

    @abstractmethod
    def left_wide(self, name: str) -> bool:
        """Return whether a parameter has 16 or 32 bits in a directory with others in NVFP4."""


def codes_of(weights: Mapping[str, Tensor], name: str) -> NVFP4Tensor | None:
    """Return the codes and scales of one of a model's parameters; None where it has none."""
    return weights.codes(name) if isinstance(weights, CodedWeights) else None


def left_wide(weights: Mapping[str, Tensor], name: str) -> bool:
    """Return whether a parameter has 16 or 32 bits in a directory with others in NVFP4."""
    return isinstance(weights, CodedWeights) and weights.left_wide(name)
