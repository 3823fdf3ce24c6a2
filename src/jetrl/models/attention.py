"""From a layer's qkv to its attention: the one place where sampling and training differ.

A layer hands over its raw qkv and a `Rotary`, which says how queries and keys are made of it. Where
keys and values lie, and which kernel reads them, is the business of the `KeyValues`: pages of a
cache (rollout/key_values) or, here, the packed batch itself.

Legend: T tokens, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from jetrl.kernels.attention.layout import QueryTiles
from jetrl.kernels.attention.reference import (
    attend_packed,
    quantize_kv,
    stored_values,
)
from jetrl.kernels.rotary import rotary
from jetrl.models.families import ModelConfig
from jetrl.models.norm import RMSNorm
from jetrl.precision.hopper import hopper
from jetrl.precision.plan import PrecisionPlan
from jetrl.precision.quantize import QTensor, dequantize

Trace = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Rotary:
    """How one layer makes rotated queries and keys of qkv.

    positions: int64 [T], each token's place in its sequence. table: float32 [positions, 2, D/2],
    cosines and sines. norms: of the query and key heads, before the rotation; None without. trace:
    is told the rotated queries and keys, or None. On a GPU all are tensors of the caller, read in
    place: a captured forward follows what is written into them.
    """

    positions: Tensor
    table: Tensor
    norms: tuple[RMSNorm, RMSNorm] | None
    num_heads: int
    num_kv_heads: int
    trace: Trace | None = None

    @property
    def head_dim(self) -> int:
        """D."""
        return 2 * self.table.shape[-1]

    @property
    def norm_copies(self) -> tuple[Tensor, Tensor] | None:
        """The norms' weights [D] in the activations' dtype."""
        return None if self.norms is None else (self.norms[0].copy, self.norms[1].copy)

    @property
    def eps(self) -> float:
        """Of both norms."""
        return 0.0 if self.norms is None else self.norms[0].eps

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The reference: qkv [T, (H + 2G) * D] -> rotated q [T, H, D] and k [T, G, D], and v."""
        counts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(counts, dim=1)
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        q, k = rotary(q, self.positions, self.table), rotary(k, self.positions, self.table)
        if self.trace is not None:
            self.trace("rotary", torch.cat([q, k], dim=1))
        return q, k, v


def kv_bytes_per_token(config: ModelConfig, plan: PrecisionPlan) -> int:
    """Bytes of keys and values of one token in all layers, scales included."""
    sizes = {"fp8": config.head_dim + 4, "bf16": 2 * config.head_dim, "fp32": 4 * config.head_dim}
    return 2 * config.num_layers * config.num_kv_heads * sizes[plan.kv]


def staged_bytes_per_token(config: ModelConfig, plan: PrecisionPlan) -> int:
    """Bytes of a token's key and value in one layer as attention over prompts reads them on a GPU:
    in 16 bits, and the factors of FP8 keys."""
    factors = 4 * 4 if plan.kv == "fp8" else 0
    return config.num_kv_heads * (2 * 2 * config.head_dim + factors)


class KeyValues(Protocol):
    """A source of keys and values for one forward over a flat list of T tokens.

    rows: int64 [R], the tokens whose output is asked for: the last layer takes the others no
    further than their keys and values. None: all T.
    """

    @property
    def rows(self) -> Tensor | None: ...

    def attend(self, layer: int, qkv: Tensor, rope: Rotary, last: bool) -> Tensor | QTensor:
        """qkv [T, (H + 2G) * D], not yet rotated. Each query attends causally, within its own
        sequence, to what the sequence holds so far and to this forward's keys and values. Returns
        [T, H * D], or its 1 x 128 groups as the next linear would make them; of the last layer
        `rows` alone."""
        ...


class PackedKeyValues:
    """Training: whole sequences packed end to end, so the batch holds its own keys and values.

    cu_seqlens: int64 [S+1], on the CPU (then nothing waits) or the device. device: of the batch;
    default: that of cu_seqlens.
    """

    def __init__(
        self, cu_seqlens: Tensor, plan: PrecisionPlan, device: torch.device | None = None
    ) -> None:
        device = cu_seqlens.device if device is None else device
        on_gpu = device.type == "cuda" and plan.kv != "fp32"
        self._plan = plan
        self._cu_seqlens = cu_seqlens if on_gpu else cu_seqlens.to(device)
        self._tiles = QueryTiles.packed(cu_seqlens.tolist(), device) if on_gpu else None
        lengths = set(cu_seqlens.diff().tolist())
        self._length = lengths.pop() if len(lengths) == 1 else None
        self.rows = None

    def attend(self, layer: int, qkv: Tensor, rope: Rotary, last: bool) -> Tensor:
        """As `KeyValues.attend`, differentiable."""
        plan = self._plan
        if self._tiles is not None:
            fused = hopper("models.layer_hopper").attend_packed
            on_gpu: Tensor = fused(qkv, rope, self._tiles, plan, self._length)
            return on_gpu
        q, k, v = rope.heads(qkv)
        if rope.trace is not None:
            stored = (quantize_kv(x.detach(), plan.kv, plan.scales) for x in (k, v))
            rope.trace("keys and values", torch.cat([stored_values(*x) for x in stored], dim=1))
        return attend_packed(q, k, v, self._cu_seqlens, plan.kv, plan.scales).flatten(-2, -1)


def values_of(x: Tensor | QTensor) -> Tensor:
    """What x stands for, to look at: codes times scales."""
    return dequantize(x) if isinstance(x, QTensor) else x
