"""A low-rank adapter next to a linear layer: y = x W^T + (x A^T) (s B)^T, with W frozen.

A linear layer may be several of a checkpoint's, stacked by rows (Q, K and V), each with an A [r, K]
and a B [n, r] of its own. Here all A lie under each other, and so do all B:

    down   [P * R, K]   A of every part, bfloat16, each filled up with zeros to R rows
    up     [N, R]       s B of the part that each row of y belongs to, zeros if there is none

with P parts and R the rank up to a multiple of 16, the tensor core's depth. Both are rounded from
FP32 master weights. Then

    u = bfloat16(x A^T)           once for all parts, [T, P * R]
    d = bfloat16(u_part (s B)^T)  each part for its rows of y
    y = y + d                     in y's dtype

Sampling and training call the same function. Sums over K are made in chunks of 512, each from zero,
added in order, so a row has the same bits in every batch. On the CPU the sums are exact.

Legend: T tokens, K input features, N output features, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jetrl.precision.backend import arithmetic_of
from jetrl.precision.gemm import bf16_matmul, free_matmul
from jetrl.precision.gradients import matmul_product

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
        # The GPU's kernel has 64 rows of y to a tile, which all belong to one part.
        whole_tiles = all(first % 64 == 0 for first, _ in shape.parts)
        assert whole_tiles or arithmetic_of(a) is None, f"{name}: parts begin at {shape.parts}"
        self.name, self.a, self.b, self.shape = name, a, b, shape
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


def add_adapter(y: Tensor, x: Tensor, weight: AdapterWeight) -> Tensor:
    """Return y + (x A^T) (s B)^T [T, N], differentiable in y, x, A and B.

    y is the layer's product; without gradients it is added to in place. x [T, K] are the values
    that the layer multiplied, not yet quantized.
    """
    if weight.in_fp32:
        return _added_in_fp32(y, x, weight)
    return project_up(y, project_down(x, weight), weight)


def project_down(x: Tensor, weight: AdapterWeight) -> Tensor:
    """Return u = x A^T, bfloat16 [T, P * R], of x bfloat16 [T, K]."""
    if (arithmetic := arithmetic_of(x)) is not None:
        return arithmetic.project_down(x, weight.down, weight.arrived)
    return bf16_matmul(x, weight.down)


def project_up(y: Tensor, u: Tensor, weight: AdapterWeight) -> Tensor:
    """Return y + u_part (s B)^T [T, N], of bfloat16 y, in place, and u of `project_down`."""
    arithmetic, rank = arithmetic_of(y), weight.shape.padded_rank
    if arithmetic is not None:
        return arithmetic.project_up(y, u, weight.up, weight.columns)
    for part, (first, count) in enumerate(weight.shape.parts):
        rows, columns = slice(first, first + count), slice(part * rank, (part + 1) * rank)
        y[:, rows] += bf16_matmul(u[:, columns], weight.up[rows])
    return y


def rank_gradient(dy: Tensor, weight: AdapterWeight) -> Tensor:
    """Return the gradient of u, bfloat16 [T, P * R], of dy bfloat16 [T, N]."""
    parts = weight.shape.parts
    du = [free_matmul(dy[:, at : at + count], weight.up[at : at + count]) for at, count in parts]
    return torch.cat(du, dim=1) if len(du) > 1 else du[0]


def adapter_gradients(
    dy: Tensor, x: Tensor, u: Tensor, weight: AdapterWeight, du: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of A and B, float32, and of u, bfloat16: x has the gradient u's @ down.

    Products have FP32 sums in any order. x, bfloat16 [T, K], is what forward multiplied, u,
    bfloat16 [T, P * R], what it made; du is that of `rank_gradient`, if it is known already.
    """
    shape = weight.shape
    rank, padded = shape.rank, shape.padded_rank
    du = rank_gradient(dy, weight) if du is None else du
    db = []
    for part, (first, count) in enumerate(shape.parts):
        column = part * padded
        db.append(matmul_product(dy[:, first : first + count], u[:, column : column + rank]))
    da = matmul_product(du, x).view(len(shape.parts), padded, -1)[:, :rank]
    whole = torch.cat(db) if len(db) > 1 else db[0]
    return da.reshape(weight.a.shape), whole.mul_(shape.scale), du


def _added_in_fp32(y: Tensor, x: Tensor, weight: AdapterWeight) -> Tensor:
    """Return what `add_adapter` returns under the fp32 plan, by autograd's own operations."""
    pieces: list[Tensor] = []
    end = 0
    a_parts: Sequence[Tensor] = weight.a.split(weight.shape.rank)
    for (first, count), a, b in zip(weight.shape.parts, a_parts, weight.b_parts(), strict=True):
        added = (x @ a.mT) @ (b * weight.shape.scale).mT
        pieces += [y[:, end:first], y[:, first : first + count] + added]
        end = first + count
    return torch.cat([*pieces, y[:, end:]], dim=1)
