"""The memory of keys and values: two stores in one range of bytes.

    codes   [layers, pages, page_size, G, D]   float8_e4m3fn or int8, or the values as they are
    scales  [layers, pages, page_size, G]      float32 beside FP8 or INT8 codes, else absent

Dimensions: B items of a batch, P pages, L keys, G key-value heads, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jetrl.kernels.attention.layout import CODES, stored_dtype
from jetrl.kernels.attention.reference import stored_values
from jetrl.precision.plan import PrecisionPlan
from jetrl.presets import key_and_value_formats


class KVStore:
    """The keys, or the values, of all layers.

    Args:
        codes: [layers, P, page_size, G, D], in the stored format.
        scales: float32 [layers, P, page_size, G] beside codes, otherwise None.
    """

    def __init__(self, codes: Tensor, scales: Tensor | None) -> None:
        self.codes, self.scales = codes, scales
        # The same memory as bytes: indexing is not implemented for FP8 types on every device.
        self._raw = codes if scales is None else codes.view(torch.uint8)

    def write(self, layer: int, slots: Tensor, codes: Tensor, scales: Tensor | None) -> None:
        """Write the keys or values of T tokens.

        Args:
            slots: int64 [T], page * page_size + offset.
            codes: [T, G, D], in the stored format.
            scales: float32 [T, G] beside codes, otherwise None.
        """
        assert codes.dtype == self.codes.dtype, f"{codes.dtype} into a cache of {self.codes.dtype}"
        raw = codes.view(torch.uint8) if scales is not None else codes
        self._raw[layer].flatten(0, 1)[slots] = raw
        if self.scales is not None:
            assert scales is not None, "codes without their scales"
            self.scales[layer].flatten(0, 1)[slots] = scales

    def values(self, layer: int, slots: Tensor) -> Tensor:
        """Return the values of slots, float32 [T, G, D], for inspection."""
        codes = self._raw[layer].flatten(0, 1)[slots].view(self.codes.dtype)
        scales = None if self.scales is None else self.scales[layer].flatten(0, 1)[slots]
        return stored_values(codes, scales)

    def layer(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return one layer in place: codes [P, page_size, G, D] and scales (or None)."""
        return self.codes[layer], None if self.scales is None else self.scales[layer]

    def gather(self, layer: int, pages: Tensor, num_keys: int) -> tuple[Tensor, Tensor | None]:
        """Return the first keys of page tables: codes [B, L, G, D], scales [B, L, G] or None.

        Args:
            pages: int64 [B, P], the page tables.
        """
        codes = self._raw[layer][pages].flatten(1, 2)[:, :num_keys].view(self.codes.dtype)
        if self.scales is None:
            return codes, None
        return codes, self.scales[layer][pages].flatten(1, 2)[:, :num_keys]

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy pages, int64 [n] each, in all layers; all are read before one is written."""
        self._raw[:, destinations] = self._raw[:, sources]
        if self.scales is not None:
            self.scales[:, destinations] = self.scales[:, sources]


def stores(memory: Tensor, shape: tuple[int, ...], plan: PrecisionPlan) -> tuple[KVStore, KVStore]:
    """Return the stores of keys and values in a range of bytes: all scales, then all codes.

    Args:
        memory: uint8, of just the size of both stores.
        shape: The shape of the codes of one store, [layers, P, page_size, G, D].
        plan: The precision plan, whose `kv` names the stored formats.
    """
    formats = key_and_value_formats(plan.kv)
    keys, values = (stored_dtype(format) for format in formats)
    if formats[0] not in CODES:
        codes = memory.view(keys).view(2, *shape)
        return KVStore(codes[0], None), KVStore(codes[1], None)
    scales_size = 2 * 4 * math.prod(shape[:-1])
    scales = memory[:scales_size].view(torch.float32).view(2, *shape[:-1])
    codes = memory[scales_size:].view(2, *shape)
    return KVStore(codes[0].view(keys), scales[0]), KVStore(codes[1].view(values), scales[1])
