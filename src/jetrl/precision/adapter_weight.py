"""The weights of a low-rank adapter: FP32 masters and what both sides multiply by.

`precision.adapter` has the arithmetic and the layout of the parts. This module imports no kernels,
so that a table of kernels can name the type.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

_TENSOR_CORE_DEPTH = 16
_ARRIVED = 256  # words for each 16 rows of A in which a GPU counts programs, at most


@dataclass(frozen=True)
class AdapterShape:
    """The shape of an adapter next to a weight [N, K]; `parts` are (first row of y, row count)."""

    rank: int
    scale: float
    num_rows: int
    num_columns: int
    parts: tuple[tuple[int, int], ...]

    @property
    def padded_rank(self) -> int:
        """R, the rank up to a multiple of 16."""
        return -(-self.rank // _TENSOR_CORE_DEPTH) * _TENSOR_CORE_DEPTH

    @property
    def a_shape(self) -> tuple[int, int]:
        """The shape [P * r, K] of the master weight A."""
        return len(self.parts) * self.rank, self.num_columns

    @property
    def b_shape(self) -> tuple[int, int]:
        """The shape [rows of all parts, r] of the master weight B."""
        return sum(count for _, count in self.parts), self.rank

    def parts_of_each(self, count: int) -> tuple[tuple[int, int], ...]:
        """Return the parts of each of `count` stacked matrices, if all have the same; else ()."""
        own, starts = self.parts[: len(self.parts) // count], range(0, self.num_rows)
        starts = starts[:: self.num_rows // count]
        same = tuple((start + first, size) for start in starts for first, size in own)
        return own if same == self.parts else ()


class AdapterWeight:
    """The master weights of an adapter together with what both sides multiply by.

    Args:
        a: FP32 master weight A [P * r, K].
        b: FP32 master weight B [rows of all parts, r].
        dtype: bfloat16, or float32 under the fp32 plan, which multiplies by the master weights.

    Attributes:
        down: bfloat16 [P * R, K], A as both sides read it.
        up: bfloat16 [N, R], s B as both sides read it.
        columns: int32 [N / 64 rounded up], the first column of u for each 64 rows of y, or -1.
        arrived: int32 zeros, counters of a GPU's product with A.
    """

    fixed = False

    def __init__(
        self, name: str, a: nn.Parameter, b: nn.Parameter, shape: AdapterShape, dtype: torch.dtype
    ) -> None:
        assert tuple(a.shape) == shape.a_shape, f"{name}: A is {list(a.shape)}"
        assert tuple(b.shape) == shape.b_shape, f"{name}: B is {list(b.shape)}"
        self.name, self.shape = name, shape
        self.a: Tensor = a
        self.b: Tensor = b
        self.in_fp32 = dtype == torch.float32
        rows, rank = len(shape.parts) * shape.padded_rank, shape.padded_rank
        kept = 0 if self.in_fp32 else 1
        self.down = torch.zeros(kept * rows, shape.num_columns, dtype=dtype, device=a.device)
        self.up = torch.zeros(kept * shape.num_rows, rank, dtype=dtype, device=a.device)
        self.columns = _columns(shape).to(a.device)
        counters = _ARRIVED * rows // _TENSOR_CORE_DEPTH + 1
        self.arrived = torch.zeros(counters, dtype=torch.int32, device=a.device)
        self.requantize()

    @torch.no_grad()
    def requantize(self) -> None:
        """Round the master weights again, into the tensors that are there."""
        if self.in_fp32:
            return
        shape, rank = self.shape, self.shape.rank
        parts = len(shape.parts)
        by_part = self.down.view(parts, shape.padded_rank, shape.num_columns)
        by_part[:, :rank].copy_(self.a.view(parts, rank, shape.num_columns))
        for (first, count), b in zip(shape.parts, self.b_parts(), strict=True):
            self.up[first : first + count, :rank].copy_(b * shape.scale)

    def b_parts(self) -> tuple[Tensor, ...]:
        return self.b.split([count for _, count in self.shape.parts])

    def of_rows(self, first: int, end: int) -> AdapterWeight | None:
        """Return the parts that begin in some rows of y, as views; None if there are none.

        Its rows of y are counted from `first`.
        """
        shape, rank = self.shape, self.shape.rank
        own = [i for i, (at, _) in enumerate(shape.parts) if first <= at < end]
        if not own:
            return None
        starts = [0, *itertools.accumulate(count for _, count in shape.parts)]
        parts = tuple((at - first, count) for at, count in shape.parts[own[0] : own[-1] + 1])
        part = copy.copy(self)
        part.shape = replace(shape, num_rows=end - first, parts=parts)
        part.a = self.a[own[0] * rank : (own[-1] + 1) * rank]
        part.b = self.b[starts[own[0]] : starts[own[-1] + 1]]
        padded = shape.padded_rank
        part.down = self.down[own[0] * padded : (own[-1] + 1) * padded]
        part.up = self.up[first:end]
        part.columns = _columns(part.shape).to(self.a.device)
        return part

    def tensors(self) -> list[Tensor]:
        """Return every tensor that forwards read."""
        return [] if self.in_fp32 else [self.down, self.up]

    def fp8_scales(self) -> list[Tensor]:
        """Return the scales of an FP8 rounding: an adapter has none."""
        return []


def _columns(shape: AdapterShape) -> Tensor:
    """Return the first column of u for each 64 rows of y, int32; -1 if no part adds to them."""
    columns = torch.full((-(-shape.num_rows // 64),), -1, dtype=torch.int32)
    for part, (first, count) in enumerate(shape.parts):
        columns[first // 64 : -(-(first + count) // 64)] = part * shape.padded_rank
    return columns
