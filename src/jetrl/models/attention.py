"""Where keys and values come from: the one thing that differs between sampling and training."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from jetrl.kernels.attention import attend_packed, packed_tiles
from jetrl.models.families import ModelConfig
from jetrl.precision.plan import PrecisionPlan


def kv_bytes_per_token(config: ModelConfig, plan: PrecisionPlan) -> int:
    """Bytes of keys and values of one token in all layers, scales included."""
    sizes = {"fp8": config.head_dim + 4, "bf16": 2 * config.head_dim, "fp32": 4 * config.head_dim}
    return 2 * config.num_layers * config.num_kv_heads * sizes[plan.kv]


class KeyValues(Protocol):
    """A source of keys and values for one forward over a flat list of T tokens."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D] attends causally, within each token's own sequence, to what the sequence
        holds so far and to this forward's k and v [T, G, D]. Returns [T, H, D]."""
        ...


class PackedKeyValues:
    """Training: whole sequences packed end to end, so the batch holds its own keys and values."""

    def __init__(self, cu_seqlens: Tensor, plan: PrecisionPlan) -> None:
        self._cu_seqlens, self._plan = cu_seqlens, plan
        on_gpu = cu_seqlens.is_cuda and plan.kv != "fp32"
        self._tiles = packed_tiles(cu_seqlens) if on_gpu else None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan = self._plan
        return attend_packed(q, k, v, self._cu_seqlens, plan.kv, plan.scales, self._tiles)
