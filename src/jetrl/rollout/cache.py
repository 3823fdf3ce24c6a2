"""The paged KV cache: the rollout's source of keys and values.

One store for keys and one for values, all layers in one tensor:

    codes   [layers, pages, page_size, G, D]   float8_e4m3fn under kv = fp8, else the values
    scales  [layers, pages, page_size, G]      float32 under kv = fp8, else absent

They lie in one range of memory. Where decode's graphs read it, on a GPU, it can be given back and
come again at the same addresses (`mapped_memory`).

A forward runs a flat list of T tokens of many sequences. In each layer their keys and values are
quantized and written to their slots; then the tokens attend, in parts: a part is queries of
sequences of similar length, whose pages are gathered into one dense batch. Padding, and what else
is in a part, cannot change a bit of a result (`attend_dense`); the parts only bound time and
memory.

Dimensions: T tokens of the forward, B items of a part, Q queries an item, P pages an item, L keys
(at most P * page_size), H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.kernels.attention import attend_dense, quantize_kv
from jetrl.models.attention import Rotary, kv_bytes_per_token
from jetrl.models.families import ModelConfig
from jetrl.precision.hopper import hopper
from jetrl.precision.plan import PrecisionPlan
from jetrl.precision.quantize import QTensor
from jetrl.rollout.in_flight import to_device

_DTYPES = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp32": torch.float32}
GPU_PAGE_SIZE = 64  # tokens: the attention kernels read a page as one block of keys
_MAX_QUERIES = 256  # queries of one item: a longer chunk is cut, so that its first queries see less
_MAX_GATHERED = 2**24  # elements of keys gathered for one part


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence in a forward: rows row to row + length of its T tokens, at
    positions start to start + length. pages: the sequence's page table."""

    row: int
    start: int
    length: int
    pages: list[int]


@dataclass(frozen=True)
class Part:
    """Queries that attend together. rows, positions: int64 [B, Q], of the queries; padding repeats
    an item's first. valid: bool [B, Q], False for padding. pages: int64 [B, P], padded likewise.
    num_keys: L, what the longest item sees; the rest of the last page is left out."""

    rows: Tensor
    positions: Tensor
    valid: Tensor
    pages: Tensor
    num_keys: int


class PagedCache:
    """Keys and values of all layers in pages. Which page is whose, the scheduler knows.

    Args:
        config: the model's sizes. plan: its `kv` is the stored format, its `scales` their rule.
        num_pages, page_size: in pages and in tokens a page.
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
        self._heads, self._head_dim = config.num_kv_heads, config.head_dim
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
        self._keys, self._values = _stores(self._bytes, shape, plan)

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
        """Copies pages (source, destination), all sources read before any destination is
        written.
        """
        if pairs:
            sources, destinations = to_device(pairs, self._keys.codes.device).unbind(1)
            self._keys.copy(sources, destinations)
            self._values.copy(sources, destinations)

    def key_values(
        self, spans: Sequence[Span], ends: bool = False
    ) -> PagedKeyValues | HopperKeyValues:
        """The `KeyValues` of one forward over these spans, which fill rows 0 to T in order. ends:
        the last token of each span is all whose output is asked for."""
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
            return _gpu_work(spans, device)
        budget = max(1, _MAX_GATHERED // (self._heads * self._head_dim))
        return [self._part(items, device) for items in group_items(spans, budget)]

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

    def _part(self, items: list[Span], device: torch.device) -> Part:
        num_queries = max(item.length for item in items)
        used = [-(-(item.start + item.length) // self.page_size) for item in items]
        num_pages = max(used)
        pages = [
            item.pages[:count] + item.pages[:1] * (num_pages - count)
            for item, count in zip(items, used, strict=True)
        ]
        rows = torch.tensor([item.row for item in items], device=device)
        starts = torch.tensor([item.start for item in items], device=device)
        lengths = torch.tensor([item.length for item in items], device=device)
        offsets = torch.arange(num_queries, device=device).expand(len(items), num_queries)
        valid = offsets < lengths[:, None]
        offsets = torch.where(valid, offsets, 0)
        return Part(
            rows=rows[:, None] + offsets,
            positions=starts[:, None] + offsets,
            valid=valid,
            pages=torch.tensor(pages, device=device),
            num_keys=max(item.start + item.length for item in items),
        )


@dataclass(frozen=True)
class LastLayer:
    """What the last layer attends for. rows: int64 [R], of the T tokens. work: the `Part`s, or the
    GPU's work, of these tokens alone, in rows 0 to R."""

    rows: Tensor
    work: Any


class PagedKeyValues:
    """`jetrl.models.attention.KeyValues` over a `PagedCache`, for the tokens of one forward.

    slots: int64 [T], page * page_size + offset, where each token's keys and values go. last: where
    not every token's output is asked for.
    """

    def __init__(
        self,
        keys: _Store,
        values: _Store,
        plan: PrecisionPlan,
        slots: Tensor,
        parts: list[Part],
        last: LastLayer | None = None,
    ) -> None:
        self._keys, self._values, self._plan = keys, values, plan
        self._slots, self._parts, self._last = slots, parts, last
        self.rows = None if last is None else last.rows

    def attend(self, layer: int, qkv: Tensor, rope: Rotary, last: bool) -> Tensor:
        """As `KeyValues.attend`."""
        return self.attend_heads(layer, *rope.heads(qkv), last).flatten(-2, -1)

    def attend_heads(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, last: bool = False
    ) -> Tensor:
        """Stores k, v [T, G, D]; q [T, H, D] attends to its sequence so far. Returns [T, H, D], of
        the last layer for `rows`."""
        self._keys.write(layer, self._slots, *quantize_kv(k, self._plan.kv, self._plan.scales))
        self._values.write(layer, self._slots, *quantize_kv(v, self._plan.kv, self._plan.scales))
        parts = self._parts
        if last and self._last is not None:
            q, parts = q[self._last.rows], self._last.work
        out = torch.empty_like(q)
        for part in parts:
            k_codes, k_scales = self._keys.gather(layer, part.pages, part.num_keys)
            v_codes, v_scales = self._values.gather(layer, part.pages, part.num_keys)
            dense = attend_dense(q[part.rows], k_codes, k_scales, v_codes, v_scales, part.positions)
            out[part.rows[part.valid]] = dense[part.valid]
        return out


@dataclass(frozen=True)
class DecodeWork:
    """One new token for each of B sequences. tables: int32 [B, P], their pages in order, anything
    after them. lengths: int32 [B], keys of each with the new one. longest: at least the longest, an
    integer that sizes the launch. The tensors are read in place: a captured forward follows them.
    """

    tables: Tensor
    lengths: Tensor
    longest: int


class HopperKeyValues:
    """The same on a GPU, where one kernel norms, rotates and writes keys and values into the pages,
    and another reads them in place. Decode and chunks have kernels of their own; a token's bits are
    the same.

    slots: int64 [T], page * page_size + offset, where each token's keys and values go; negative for
    nowhere (a row of padding). work: `DecodeWork`, or the kernels' tiles of a forward with chunks.
    last: where not every token's output is asked for. Nothing here touches the host: with decode
    work a forward can be captured in a CUDA graph.
    """

    def __init__(
        self,
        keys: _Store,
        values: _Store,
        plan: PrecisionPlan,
        slots: Tensor,
        work: Any,
        last: LastLayer | None = None,
    ) -> None:
        self._keys, self._values, self._plan = keys, values, plan
        self._slots, self._work, self._last = slots, work, last
        self.rows = None if last is None else last.rows

    def attend(self, layer: int, qkv: Tensor, rope: Rotary, last: bool) -> Tensor | QTensor:
        """As `KeyValues.attend`: the codes that the next linear reads, if it is FP8."""
        kernels = hopper("kernels.attention_gpu")
        k, k_scales = self._keys.layer(layer)
        v, v_scales = self._values.layer(layer)
        fused = hopper("kernels.rotary_triton")
        q = fused.qk_norm_rotary_cache(
            qkv, rope.positions, rope.table, rope.norm_copies, rope.eps, rope.num_heads,
            fused.CacheSlots(k, v, k_scales, v_scales), self._slots, self._plan.scales,
        )  # fmt: skip
        pages = kernels.KeyValueCodes(k, k_scales, v, v_scales)
        if rope.trace is not None:
            rope.trace("rotary", q)
            rope.trace("keys and values", kernels.stored_values(pages, self._slots))
        work: Any = self._work
        if last and self._last is not None:
            q, work = q[self._last.rows], self._last.work
        attend, quantized = kernels.attend_prefill, kernels.attend_prefill_quantized
        arguments: tuple[Any, ...] = (work,)
        if isinstance(work, DecodeWork):
            attend, quantized = kernels.attend_decode, kernels.attend_decode_quantized
            arguments = (work.tables, work.lengths, work.longest)
        format = self._plan.linear_format("rollout", layer, len(self._keys.codes))
        if format == "fp8" and rope.trace is None:
            codes: QTensor = quantized(q, pages, *arguments, self._plan.scales)
            return codes
        attended: Tensor = attend(q, pages, *arguments).flatten(1)
        return attended


class _Store:
    """Keys, or values, of all layers: codes and their scales."""

    def __init__(self, codes: Tensor, scales: Tensor | None) -> None:
        self.codes, self.scales = codes, scales
        # Bytes of the same memory: indexing is not implemented for FP8 types on every device.
        self._raw = codes if scales is None else codes.view(torch.uint8)

    def write(self, layer: int, slots: Tensor, codes: Tensor, scales: Tensor | None) -> None:
        assert codes.dtype == self.codes.dtype, f"{codes.dtype} into a cache of {self.codes.dtype}"
        raw = codes.view(torch.uint8) if scales is not None else codes
        self._raw[layer].flatten(0, 1)[slots] = raw
        if self.scales is not None:
            assert scales is not None, "FP8 codes without their scales"
            self.scales[layer].flatten(0, 1)[slots] = scales

    def layer(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """(codes [P, page_size, G, D], scales [P, page_size, G] or None), in place."""
        return self.codes[layer], None if self.scales is None else self.scales[layer]

    def gather(self, layer: int, pages: Tensor, num_keys: int) -> tuple[Tensor, Tensor | None]:
        """(codes [B, L, G, D], scales [B, L, G] or None): the first L keys of tables [B, P]."""
        codes = self._raw[layer][pages].flatten(1, 2)[:, :num_keys].view(self.codes.dtype)
        if self.scales is None:
            return codes, None
        return codes, self.scales[layer][pages].flatten(1, 2)[:, :num_keys]

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        self._raw[:, destinations] = self._raw[:, sources]
        if self.scales is not None:
            self.scales[:, destinations] = self.scales[:, sources]


def _stores(memory: Tensor, shape: tuple[int, ...], plan: PrecisionPlan) -> tuple[_Store, _Store]:
    """Keys and values of codes of this shape, in these bytes: all scales, then all codes."""
    if plan.kv != "fp8":
        codes = memory.view(_DTYPES[plan.kv]).view(2, *shape)
        return _Store(codes[0], None), _Store(codes[1], None)
    scales_size = 2 * 4 * math.prod(shape[:-1])
    scales = memory[:scales_size].view(torch.float32).view(2, *shape[:-1])
    codes = memory[scales_size:].view(_DTYPES["fp8"]).view(2, *shape)
    return _Store(codes[0], scales[0]), _Store(codes[1], scales[1])


def _gpu_work(spans: Sequence[Span], device: torch.device) -> Any:
    """What the attention kernels are told of these spans."""
    lengths = [span.start + span.length for span in spans]
    counts = [-(-length // GPU_PAGE_SIZE) for length in lengths]
    pages = [span.pages[:count] for span, count in zip(spans, counts, strict=True)]
    if any(span.length != 1 for span in spans):
        tiles = hopper("kernels.attention_gpu").QueryTiles
        return tiles.paged([span.length for span in spans], lengths, pages, device)
    widest = max(counts)
    tables = [row + [0] * (widest - len(row)) for row in pages]
    return DecodeWork(
        to_device(np.array(tables, dtype=np.int32), device),
        to_device(np.array(lengths, dtype=np.int32), device),
        max(lengths),
    )


def group_items(spans: Sequence[Span], max_keys: int) -> list[list[Span]]:
    """Cuts spans into items of at most 256 queries and groups items that waste little as a batch:
    queries and keys within a factor of two, and at most `max_keys` keys together (or one item)."""
    items = [
        Span(span.row + at, span.start + at, min(_MAX_QUERIES, span.length - at), span.pages)
        for span in spans
        for at in range(0, span.length, _MAX_QUERIES)
    ]
    items.sort(key=lambda item: (item.length, item.start), reverse=True)
    groups: list[list[Span]] = []
    most_queries = most_keys = 0
    for item in items:
        keys = item.start + item.length
        fits = (
            groups
            and 2 * item.length > most_queries
            and most_keys < 2 * keys
            and keys < 2 * most_keys
            and max(most_keys, keys) * (len(groups[-1]) + 1) <= max_keys
        )
        if fits:
            groups[-1].append(item)
            most_keys = max(most_keys, keys)
        else:
            groups.append([item])
            most_queries, most_keys = item.length, keys
    return groups
