"""Rotated queries and keys from a layer's qkv.

Legend: T tokens, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.kernels.rotary import rotary
from jetrl.models.norm import RMSNorm
from jetrl.models.trace import Trace, tell


@dataclass(frozen=True)
class Rotary:
    """The positions, rotation and norms by which one layer makes queries and keys from qkv.

    On a GPU all tensors are the caller's and are read in place: a captured forward follows what is
    written into them.

    Attributes:
        positions: int64 [T], each token's position in its sequence.
        table: float32 [positions, 2, D / 2], cosines and sines.
        norms: The norms of query heads and of key heads, before the rotation; None without.
        trace: A function that sees the rotated queries and keys, or None.
        as_values: Whether what reads attention's output reads BF16 values, as an adapter does, and
            not the codes of the next linear layer.
    """

    positions: Tensor
    table: Tensor
    norms: tuple[RMSNorm, RMSNorm] | None
    num_heads: int
    num_kv_heads: int
    trace: Trace | None = None
    as_values: bool = False

    @property
    def head_dim(self) -> int:
        """The head size D."""
        return 2 * self.table.shape[-1]

    @property
    def norm_weights(self) -> tuple[Tensor, Tensor] | None:
        """The rounded weights [D] of the query heads' norm and of the key heads'."""
        return None if self.norms is None else (self.norms[0].rounded, self.norms[1].rounded)

    @property
    def eps(self) -> float:
        """The epsilon of both norms."""
        return 0.0 if self.norms is None else self.norms[0].eps

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [T, H, D] and keys [T, G, D], and values: the reference.

        Args:
            qkv: [T, (H + 2G) * D], the query heads first, then the key heads, then the values.
        """
        counts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(counts, dim=1)
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        q, k = rotary(q, self.positions, self.table), rotary(k, self.positions, self.table)
        if self.trace is not None:  # the concatenation is for whoever watches
            tell(self.trace, "rotary", torch.cat([q, k], dim=1))
        return q, k, v
