"""The paged KV cache: the rollout's source of keys and values.

Keys and values of all layers (`stores`) lie in one range of memory. Where decode's graphs read it,
on a GPU, it can be given back and come again at the same addresses (`mapped_memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.models.attention import kv_bytes_per_token
from jetrl.models.families import ModelConfig
from jetrl.precision.hopper import hopper
from jetrl.precision.plan import PrecisionPlan
from jetrl.rollout.kv_stores import stores
from jetrl.rollout.launched_step import to_device
from jetrl.rollout.paged_attention import (
    GPU_PAGE_SIZE,
    DecodeWork,
    HopperKeyValues,
    LastLayer,
    PagedKeyValues,
    Span,
    gpu_work,
    parts_of,
)


class PagedCache:
    """Keys and values of all layers in pages. Which page is whose, the scheduler knows.

    Args:
        config: the model's sizes. plan: its `kv` is the stored format, its `scales` their rule.
        num_pages, page_size: in pages and in tokens a page.

    Attributes:
        num_bytes: of all pages, in all layers.

    Raises:
        UserError: pages of a size that the GPU's kernels do not read.
        torch.OutOfMemoryError: there is no memory for them.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: PrecisionPlan,
        num_pages: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        on_gpu = device.type == "cuda" and plan.kv != "fp32"
        if on_gpu and page_size != GPU_PAGE_SIZE:
            raise UserError(
                f"rollout.page_size = {page_size}: the GPU reads pages of {GPU_PAGE_SIZE} tokens"
            )
        self.num_pages, self.page_size = num_pages, page_size
        self._on_gpu = on_gpu
        self._plan = plan
        self._token_elements = config.num_kv_heads * config.head_dim
        self.num_bytes = num_pages * self.page_bytes(config, plan, page_size)
        self._memory: Any = None
        if on_gpu:
            self._memory = hopper("rollout.mapped_memory").MappedMemory(self.num_bytes, device)
            self._memory.map()
            self._bytes = self._memory.tensor()
        else:
            self._bytes = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        self._clear()
        shape = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
        self._keys, self._values = stores(self._bytes, shape, plan)

    @staticmethod
    def page_bytes(config: ModelConfig, plan: PrecisionPlan, page_size: int) -> int:
        """Bytes of one page in all layers, keys and values, scales included."""
        return page_size * kv_bytes_per_token(config, plan)

    @property
    def reads_pages_in_place(self) -> bool:
        """Whether attention reads pages where they lie: on a Hopper GPU, not in FP32."""
        return self._on_gpu

    @property
    def keeps_addresses(self) -> bool:
        """Whether pages can be given back and taken again where they were."""
        return self._memory is not None

    @property
    def ready(self) -> bool:
        """Whether there is memory for the pages."""
        return self._memory is None or bool(self._memory.mapped)

    def give_back(self) -> None:
        """Gives the pages' memory back, and what is in them; their addresses stay."""
        self._memory.unmap()

    def take_again(self) -> None:
        """Takes memory again for pages that were given back, empty.

        Raises:
            torch.OutOfMemoryError: there is none.
        """
        self._memory.map()
        self._clear()

    def _clear(self) -> None:
        # Not what the memory held before: a slot that is only padding is read all the same.
        self._bytes.zero_()

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages (source, destination) in all layers, all sources read before any destination
        is written.
        """
        if pairs:
            sources, destinations = to_device(pairs, self._keys.codes.device).unbind(1)
            self._keys.copy(sources, destinations)
            self._values.copy(sources, destinations)

    def key_values(
        self, spans: Sequence[Span], ends: bool = False
    ) -> PagedKeyValues | HopperKeyValues:
        """The `KeyValues` of one forward over these spans, which fill rows 0 to T in order. ends:
        output is asked for of the last token of each span alone, [spans, H * D]."""
        assert self.ready, "the pages' memory has been given back"
        device = self._keys.codes.device
        slots_T = to_device(self._slots(spans), device)
        source = HopperKeyValues if self._on_gpu else PagedKeyValues
        last = None
        if ends:
            rows = to_device([span.row + span.length - 1 for span in spans], device)
            alone = [
                Span(row, span.start + span.length - 1, 1, span.pages)
                for row, span in enumerate(spans)
            ]
            last = LastLayer(rows, self._work(alone))
        return source(self._keys, self._values, self._plan, slots_T, self._work(spans), last)

    def _work(self, spans: Sequence[Span]) -> Any:
        """What attention is told of these spans: `Part`s, or what the GPU's kernels take."""
        device = self._keys.codes.device
        if self._on_gpu:
            return gpu_work(spans, device)
        return parts_of(spans, self.page_size, self._token_elements, device)

    def _slots(self, spans: Sequence[Span]) -> np.ndarray:
        """int64 [T]: page * page_size + offset of each token."""
        slots = []
        for span in spans:
            at = np.arange(span.start, span.start + span.length)
            first = span.start // self.page_size
            used = np.array(span.pages[first : at[-1] // self.page_size + 1])
            slots.append(used[at // self.page_size - first] * self.page_size + at % self.page_size)
        return np.concatenate(slots)

    def decode_key_values(self, slots: Tensor, work: DecodeWork) -> HopperKeyValues:
        """The `KeyValues` of a forward of one token a sequence, from tensors on the device; slots:
        int64 [B], as `HopperKeyValues` takes them."""
        return HopperKeyValues(self._keys, self._values, self._plan, slots, work)
