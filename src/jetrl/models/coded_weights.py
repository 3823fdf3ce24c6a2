"""The parameters of a model as a mapping that makes or reads each one on access.

Files, random numbers, a base with a merged adapter: whatever a model is made from has this form, so
that no more than one parameter is in memory next to what the model keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from jetrl.precision.nvfp4 import NVFP4Tensor


class CodedWeights(Mapping[str, Tensor]):
    """The base class of the parameters of a model by name, each made or read on access.

    A parameter in NVFP4 has the float32 values of its codes. `codes` returns its codes and scales,
    or None for a parameter in 16 or 32 bits; `codes` is None for a model without NVFP4.
    """

    names: Collection[str]
    codes: Callable[[str], NVFP4Tensor | None] | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names


@dataclass(eq=False)
class MadeWeights(CodedWeights):
    """Parameters that the function `value` returns by name."""

    names: Collection[str]
    value: Callable[[str], Tensor]
    codes: Callable[[str], NVFP4Tensor | None] | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self.value(name)
