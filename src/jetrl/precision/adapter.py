"""A low-rank adapter next to a linear layer: y = x W^T + (x A^T) (s B)^T, with W frozen.

A linear layer may stack several layers of the checkpoint by rows (Q, K and V), each with its own A
[r, K] and B [n, r]. All A are stacked, and so are all B:

    down   [P * R, K]   A of every part, bfloat16, each padded with zeros to R rows
    up     [N, R]       s B of the part of each row of y; zeros if the row has no adapter

with P parts and the rank r padded to R, a multiple of 16 (the tensor core's K). Both are rounded
from FP32 master weights. Then

    u = bfloat16(x A^T)           once for all parts, [T, P * R]
    d = bfloat16(u_part (s B)^T)  each part for its rows of y
    y = y + d                     in y's dtype

Sampling and training call the same functions. On a GPU, sums over K are split into chunks of 512
that are added in order, so the bits of a row do not depend on the batch. On the CPU sums are exact.

Legend: T tokens, K input features, N output features, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jetrl.precision.adapter_weight import AdapterWeight
from jetrl.precision.backend import arithmetic_of
from jetrl.precision.gemm import bf16_matmul, free_matmul
from jetrl.precision.gradients import matmul_product


def add_adapter(y: Tensor, x: Tensor, weight: AdapterWeight) -> Tensor:
    """Return y + (x A^T) (s B)^T [T, N], differentiable in y, x, A and B.

    y is the layer's output, updated in place if no gradients are needed. x [T, K] is the layer's
    input before quantization.
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
    """Add u_part (s B)^T to bfloat16 y [T, N] in place, and return y; u is from `project_down`."""
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
    """Return the gradients of A and B, float32, and of u, bfloat16; that of x is du @ down.

    Sums are FP32 in any order.

    Args:
        x: The input of forward, bfloat16 [T, K].
        u: The result of `project_down` in forward, bfloat16 [T, P * R].
        du: The result of `rank_gradient`, if already computed.
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
    """Return the result of `add_adapter` under the fp32 plan, by differentiable operations."""
    pieces: list[Tensor] = []
    end = 0
    a_parts: Sequence[Tensor] = weight.a.split(weight.shape.rank)
    for (first, count), a, b in zip(weight.shape.parts, a_parts, weight.b_parts(), strict=True):
        added = (x @ a.mT) @ (b * weight.shape.scale).mT
        pieces += [y[:, end:first], y[:, first : first + count] + added]
        end = first + count
    return torch.cat([*pieces, y[:, end:]], dim=1)
