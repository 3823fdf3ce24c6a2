"""Where keys and values come from: the one thing that differs between sampling and training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from jetrl.kernels.attention import attend_packed
from jetrl.precision.plan import PrecisionPlan


class KeyValues(Protocol):
    """A source of keys and values for one forward over a flat list of T tokens."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D] attends causally, within each token's own sequence, to what the sequence
        holds so far and to this forward's k and v [T, G, D]. Returns [T, H, D]."""
        ...


@dataclass(frozen=True)
class PackedKeyValues:
    """Training: whole sequences packed end to end, so the batch holds its own keys and values."""

    cu_seqlens: Tensor
    plan: PrecisionPlan

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_packed(q, k, v, self.cu_seqlens, self.plan.kv, self.plan.scales)
