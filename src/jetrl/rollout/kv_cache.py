"""The paged KV cache: the rollout's source of keys and values.

Keys and values of all layers lie in one range of memory. On a GPU, where decode's graphs read the
range, its memory can be freed and mapped again at the same addresses (`mapped_memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.models.attention import kv_bytes_per_token
from jetrl.models.families import ModelConfig
from jetrl.precision.plan import PrecisionPlan
from jetrl.rollout.launched_step import to_device
from jetrl.rollout.paged_attention import (
    GPU_PAGE_SIZE,
    AttentionWork,
    DecodeWork,
    HopperKeyValues,
    LastLayer,
    PagedKeyValues,
    Span,
    gpu_work,
    parts_of,
    stores,
)

if TYPE_CHECKING:
    from jetrl.rollout.mapped_memory import MappedMemory


class PagedCache:
    """The pages of keys and values of all layers; the scheduler knows the owners of pages.

    Raises:
        UserError: The GPU's kernels do not read pages of this size.
        torch.OutOfMemoryError: There is no memory for the pages.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: PrecisionPlan,
        num_pages: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        plan = plan.on("rollout")
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
        self._memory: MappedMemory | None = None
        if on_gpu:
            from jetrl.rollout.mapped_memory import MappedMemory

            self._memory = MappedMemory(self.num_bytes, device)
            self._memory.map()
            self._bytes = self._memory.tensor()
        else:
            self._bytes = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        self._clear()
        shape = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
        self._keys, self._values = stores(self._bytes, shape, plan)

    @staticmethod
    def page_bytes(config: ModelConfig, plan: PrecisionPlan, page_size: int) -> int:
        """Return the bytes of one page in all layers, scales included."""
        return page_size * kv_bytes_per_token(config, plan.on("rollout"))

    @property
    def reads_pages_in_place(self) -> bool:
        """True if attention reads pages in place: on a Hopper GPU, not in FP32."""
        return self._on_gpu

    @property
    def keeps_addresses(self) -> bool:
        """True if pages can be freed and mapped again at the same addresses."""
        return self._memory is not None

    @property
    def ready(self) -> bool:
        return self._memory is None or self._memory.mapped

    def give_back(self) -> None:
        """Free the pages' memory and contents; their addresses stay."""
        assert self._memory is not None, "this cache keeps its memory"
        self._memory.unmap()

    def take_again(self) -> None:
        """Map memory again for pages that were freed; they are empty.

        Raises:
            torch.OutOfMemoryError: The device does not have so much memory.
        """
        assert self._memory is not None, "this cache keeps its memory"
        self._memory.map()
        self._clear()

    def _clear(self) -> None:
        # Kernels read slots that are only padding too: these must not hold what was there before.
        self._bytes.zero_()

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, destination) in all layers; all sources are read before any write."""
        if pairs:
            sources, destinations = to_device(pairs, self._keys.codes.device).unbind(1)
            self._keys.copy(sources, destinations)
            self._values.copy(sources, destinations)

    def key_values(
        self, spans: Sequence[Span], ends: bool = False
    ) -> PagedKeyValues | HopperKeyValues:
        """Return the `KeyValues` of one forward.

        Args:
            spans: The tokens of the forward, which fill rows 0 to T in order.
            ends: Whether the output is only needed for the last token of each span, [spans, H * D].
        """
        assert self.ready, "the pages' memory has been given back"
        device = self._keys.codes.device
        slots_T = to_device(self._slots(spans), device)
        source = HopperKeyValues if self._on_gpu else PagedKeyValues
        last = None
        if ends:
            rows = to_device([span.row + span.length - 1 for span in spans], device)
            last_tokens = [
                Span(row, span.start + span.length - 1, 1, span.pages)
                for row, span in enumerate(spans)
            ]
            last = LastLayer(rows, self._work(last_tokens))
        return source(self._keys, self._values, self._plan, slots_T, self._work(spans), last)

    def _work(self, spans: Sequence[Span]) -> AttentionWork:
        """Return the work of attention for spans, in the form that the device takes."""
        device = self._keys.codes.device
        if self._on_gpu:
            return gpu_work(spans, device)
        return parts_of(spans, self.page_size, self._token_elements, device)

    def _slots(self, spans: Sequence[Span]) -> np.ndarray:
        """Return the slot of each token, page * page_size + offset, int64 [T]."""
        slots = []
        for span in spans:
            at = np.arange(span.start, span.start + span.length)
            first = span.start // self.page_size
            used = np.array(span.pages[first : at[-1] // self.page_size + 1])
            slots.append(used[at // self.page_size - first] * self.page_size + at % self.page_size)
        return np.concatenate(slots)

    def decode_key_values(self, slots: Tensor, work: DecodeWork) -> HopperKeyValues:
        """Return the `KeyValues` of a forward of decode, from tensors on the device.

        Args:
            slots: int64 [B], the slot of each token; negative for rows of padding.
        """
        return HopperKeyValues(self._keys, self._values, self._plan, slots, work)
