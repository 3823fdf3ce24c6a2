"""From a layer's qkv to its attention: the one place where sampling and training differ.

A layer hands over its raw qkv and a `Rotary`, which says how queries and keys are made of it. Where
keys and values lie, and which kernel reads them, is the business of the `KeyValues`: pages of a
cache (`rollout.kv_cache`) or, here, the packed batch itself.

Legend: T tokens, H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from jetrl.kernels.attention.layout import CODES, QueryTiles, stored_dtype
from jetrl.kernels.attention.reference import (
    attend_packed,
    quantize_keys_and_values,
    stored_values,
)
from jetrl.models.families import ModelConfig
from jetrl.models.layer import Rotary, tell
from jetrl.models.packed import Stems
from jetrl.precision.plan import PrecisionPlan
from jetrl.precision.quantize import QTensor
from jetrl.settings.presets import key_and_value_formats


def kv_bytes_per_token(config: ModelConfig, plan: PrecisionPlan) -> int:
    """Return the bytes of keys and values of one token in all layers, scales included."""
    formats = key_and_value_formats(plan.kv)
    sizes = [stored_dtype(x).itemsize * config.head_dim + 4 * (x in CODES) for x in formats]
    return config.num_layers * config.num_kv_heads * sum(sizes)


def staged_bytes_per_token(config: ModelConfig, plan: PrecisionPlan) -> int:
    """Return the bytes of a token's key and value in one layer as a GPU's attention stages them.

    Attention over prompts reads them in 16 bits, and the factors of keys with scales.
    """
    factors = 4 * 4 if key_and_value_formats(plan.kv)[0] in CODES else 0
    return config.num_kv_heads * (2 * 2 * config.head_dim + factors)


class KeyValues(Protocol):
    """A source of keys and values for one forward over a flat list of T tokens."""

    @property
    def rows(self) -> Tensor | None:
        """The tokens whose output is needed, int64 [R]; None: all T.

        The last layer takes the other tokens no further than their keys and values.
        """
        ...

    def attend(self, layer: int, qkv: Tensor, rope: Rotary, last: bool) -> Tensor | QTensor:
        """Return each query's causal attention over its sequence so far and this forward's keys.

        Args:
            qkv: [T, (H + 2G) * D], not yet rotated.
            last: Whether this is the last layer, whose output is only that of `rows`.

        Returns:
            [T, H * D], or the 1 x 128 groups that the next linear would make of these values.
        """
        ...


class PackedKeyValues:
    """The keys and values of training: whole sequences end to end, which the batch itself holds.

    Args:
        cu_seqlens: int64 [S + 1], on the CPU (then the host waits for nothing) or the device.
        device: The device of the batch; default: that of cu_seqlens.
        stems: The rows that are computed, where sequences share their first tokens; None: all.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        plan: PrecisionPlan,
        device: torch.device | None = None,
        stems: Stems | None = None,
    ) -> None:
        device = cu_seqlens.device if device is None else device
        on_gpu = device.type == "cuda" and plan.kv != "fp32"
        self._plan = plan
        self._cu_seqlens = cu_seqlens if on_gpu else cu_seqlens.to(device)
        self._tiles: QueryTiles | None = None
        self._row_of = None if stems is None else stems.row_of.to(device)
        if on_gpu and stems is None:
            self._tiles = QueryTiles.packed(cu_seqlens.tolist(), device)
        elif on_gpu and stems is not None:
            self._tiles = QueryTiles.packed(stems.run_starts, device, stems.stem_of)
        lengths = set() if stems is not None else set(cu_seqlens.diff().tolist())
        self._length = lengths.pop() if len(lengths) == 1 else None
        self.rows = None

    def attend(self, layer: int, qkv: Tensor, rope: Rotary, last: bool) -> Tensor:
        """Return attention as `KeyValues.attend` does, differentiable."""
        plan = self._plan
        if self._tiles is not None:
            from jetrl.models.attention_hopper import attend_packed_hopper

            return attend_packed_hopper(qkv, rope, self._tiles, plan, self._length)
        q, k, v = rope.heads(qkv)
        if rope.trace is not None:  # codes are made once more, for whoever watches
            stored = quantize_keys_and_values(k.detach(), v.detach(), plan.kv, plan.scales)
            tell(rope.trace, "keys and values", torch.cat([stored_values(*x) for x in stored], 1))
        return attend_packed(q, k, v, self._cu_seqlens, plan.kv, plan.scales, self._row_of).flatten(
            -2, -1
        )
