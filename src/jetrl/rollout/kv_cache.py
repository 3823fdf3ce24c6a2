"""The paged KV cache, and attention over it during rollout.

    codes   [layers, pages, page_size, G, D]   float8_e4m3fn or int8, or the values as they are
    scales  [layers, pages, page_size, G]      float32 next to FP8 or INT8 codes, else absent

`layers` are those with attention; other mixers have no keys.

A forward runs a flat list of T tokens from many sequences. Each layer quantizes their keys and
values, writes them to their slots, and then attends. On a GPU, kernels read the pages in place. On
a CPU, queries of sequences with similar lengths form parts; the pages of a part are gathered into a
dense batch. Parts limit time and memory, and change no bit.

In the last layer only the last token of a prompt attends. All layers share one range of memory,
which a GPU can free and map again at the same addresses (`mapped_memory`).

Dimensions: T tokens of the forward, B items of a part, Q queries per item, P pages per item, L keys
(at most P * page_size), H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from jetrl.kernels.attention import integer
from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles, SequenceQueries
from jetrl.kernels.attention.reference import (
    Stored,
    attend_dense,
    quantize_keys_and_values,
    stored_values,
)
from jetrl.kernels.backend import device_kernels
from jetrl.models.attention import kv_bytes_per_token
from jetrl.models.families import ModelConfig
from jetrl.models.layer import Rotary
from jetrl.precision.backend import has_kernels
from jetrl.precision.formats import key_and_value_formats
from jetrl.precision.plan import PrecisionPlan
from jetrl.precision.quantize import QTensor
from jetrl.rollout.launched_step import to_device

if TYPE_CHECKING:
    from jetrl.rollout.mapped_memory import MappedMemory


class _KVStore:
    """The keys, or the values, of the layers with attention, by layer number in the decoder.

    Codes are [layers, P, page_size, G, D], scales float32 [layers, P, page_size, G] or None.
    """

    def __init__(self, codes: Tensor, scales: Tensor | None, layers: Sequence[int]) -> None:
        self.codes, self.scales = codes, scales
        self._place = {layer: place for place, layer in enumerate(layers)}
        # The same memory as bytes: not every device can index FP8 types.
        self._raw = codes if scales is None else codes.view(torch.uint8)

    def write(self, layer: int, slots: Tensor, stored: Stored) -> None:
        """Write codes [T, G, D] and scales [T, G] to slots int64 [T], page * page_size + offset."""
        codes, scales = stored
        assert codes.dtype == self.codes.dtype, f"{codes.dtype} into a cache of {self.codes.dtype}"
        raw = codes if scales is None else codes.view(torch.uint8)
        place = self._place[layer]
        self._raw[place].flatten(0, 1)[slots] = raw
        if self.scales is not None and scales is not None:
            self.scales[place].flatten(0, 1)[slots] = scales

    def values(self, layer: int, slots: Tensor) -> Tensor:
        """Return the values of slots, float32 [T, G, D], for inspection."""
        place = self._place[layer]
        codes = self._raw[place].flatten(0, 1)[slots].view(self.codes.dtype)
        scales = None if self.scales is None else self.scales[place].flatten(0, 1)[slots]
        return stored_values((codes, scales))

    def layer(self, layer: int) -> Stored:
        """Return one layer in place: codes [P, page_size, G, D] and scales (or None)."""
        place = self._place[layer]
        return self.codes[place], None if self.scales is None else self.scales[place]

    def gather(self, layer: int, pages: Tensor, num_keys: int) -> Stored:
        """Return the first keys of tables int64 [B, P]: codes [B, L, G, D], scales [B, L, G]."""
        place = self._place[layer]
        codes = self._raw[place][pages].flatten(1, 2)[:, :num_keys].view(self.codes.dtype)
        if self.scales is None:
            return codes, None
        return codes, self.scales[place][pages].flatten(1, 2)[:, :num_keys]

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy pages, int64 [n] each, in all layers; all are read before one is written."""
        self._raw[:, destinations] = self._raw[:, sources]
        if self.scales is not None:
            self.scales[:, destinations] = self.scales[:, sources]


def stores(
    memory: Tensor, layers: Sequence[int], shape: tuple[int, ...], plan: PrecisionPlan
) -> tuple[_KVStore, _KVStore]:
    """Return stores over uint8 memory: scales, then codes. `shape` is that of one layer."""
    shape = (len(layers), *shape)
    formats = key_and_value_formats(plan.kv)
    keys, values = (format.dtype for format in formats)
    if formats[0].code is None:
        codes = memory.view(keys).view(2, *shape)
        return _KVStore(codes[0], None, layers), _KVStore(codes[1], None, layers)
    scales_size = 2 * 4 * math.prod(shape[:-1])
    scales = memory[:scales_size].view(torch.float32).view(2, *shape[:-1])
    codes = memory[scales_size:].view(2, *shape)
    return (
        _KVStore(codes[0].view(keys), scales[0], layers),
        _KVStore(codes[1].view(values), scales[1], layers),
    )


GPU_PAGE_SIZE = 64  # tokens: attention kernels read a page as one block of keys
_MAX_QUERIES = 256  # longer chunks are split, so that their first queries read fewer keys
MAX_GATHERED = 2**24  # maximum elements of keys per part


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence in a forward, from row `row` of the T tokens."""

    row: int
    start: int
    length: int
    pages: list[int]


@dataclass(frozen=True)
class Part:
    """Queries that attend in one dense batch; padding repeats the first row or page of an item.

    Attributes:
        rows, positions: int64 [B, Q].
        valid: bool [B, Q], False for padding.
        pages: int64 [B, P].
        num_keys: L, which excludes the rest of the last page.
    """

    rows: Tensor
    positions: Tensor
    valid: Tensor
    pages: Tensor
    num_keys: int


@dataclass(frozen=True)
class _LastLayer:
    """Tokens that attend in the last layer: rows int64 [R] of T, and work for rows 0 to R."""

    rows: Tensor
    work: AttentionWork


@dataclass(frozen=True)
class DecodeWork:
    """Attention of one new token, or several that verify a draft, per sequence of B.

    A captured forward reads the tensors at replay.

    Attributes:
        tables: int32 [B, P], pages of each sequence in order, padded arbitrarily.
        lengths: int32 [B], keys of each sequence, including new ones.
        longest: Upper bound of the lengths, which sizes the launch.
        queries: Several new tokens per sequence, or None for one.
    """

    tables: Tensor
    lengths: Tensor
    longest: int
    queries: SequenceQueries | None = None


AttentionWork = list[Part] | DecodeWork | QueryTiles


@dataclass(frozen=True)
class _OverPages:
    """The stores of a decoder, with slots and attention work of the tokens of one forward."""

    keys: _KVStore
    values: _KVStore
    num_layers: int
    plan: PrecisionPlan
    slots: Tensor
    work: AttentionWork
    last: _LastLayer | None = None

    @property
    def rows(self) -> Tensor | None:
        return None if self.last is None else self.last.rows

    def _stored(self, layer: int) -> Tensor:
        """Return the dequantized keys and values, float32 [T, 2 * G, D], for a trace."""
        return torch.cat([x.values(layer, self.slots) for x in (self.keys, self.values)], dim=1)

    def _queries(self, q: Tensor, last: bool) -> tuple[Tensor, AttentionWork]:
        """Return the queries of q [T, H, D] that attend in a layer, with their work."""
        if last and self.last is not None:
            return q[self.last.rows], self.last.work
        return q, self.work


class PagedKeyValues(_OverPages):
    """The `KeyValues` of one forward, from gathered pages in plain PyTorch."""

    def attend(self, layer: int, qkv: Tensor, rope: Rotary, last: bool) -> Tensor:
        q, k, v = rope.heads(qkv)
        attended = self.attend_heads(layer, q, k, v, last).flatten(-2, -1)
        if rope.trace is not None:
            rope.trace("keys and values", self._stored(layer))
        return attended

    def attend_heads(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, last: bool = False
    ) -> Tensor:
        """Store rotated keys and values [T, G, D], and attend for rotated queries [T, H, D].

        Return [T, H, D], or [R, H, D] in the last layer.
        """
        # Write first, since a token attends to itself.
        keys, values = quantize_keys_and_values(k, v, self.plan.kv, self.plan.scales)
        self.keys.write(layer, self.slots, keys)
        self.values.write(layer, self.slots, values)
        q, parts = self._queries(q, last)
        assert isinstance(parts, list), "gathered pages attend in parts"
        # Each part is a dense batch of sequences with similar lengths.
        out = torch.empty_like(q)
        for part in parts:
            part_keys = self.keys.gather(layer, part.pages, part.num_keys)
            part_values = self.values.gather(layer, part.pages, part.num_keys)
            dense = self._attend_part(q[part.rows], part_keys, part_values, part.positions)
            out[part.rows[part.valid]] = dense[part.valid]
        return out

    def _attend_part(self, q: Tensor, keys: Stored, values: Stored, positions: Tensor) -> Tensor:
        """Return attention of a dense batch, [B, Q, H, D]."""
        if self.plan.integer_attention:
            return integer.attend(q, keys, values, positions, self.plan.scales)
        return attend_dense(q, keys, values, positions, self.plan.attention_split)


class _DeviceKeyValues(_OverPages):
    """The `KeyValues` of one forward on a GPU, with kernels that read pages in place.

    Decode and prefill have their own kernels, with the same bits per token. `DecodeWork` never
    touches the host, so a CUDA graph can capture the forward.
    """

    def attend(self, layer: int, qkv: Tensor, rope: Rotary, last: bool) -> Tensor | QTensor:
        """Implement `KeyValues.attend`, with codes for the next linear layer if that is FP8."""
        # Norm, rotate, quantize and write the new tokens, in one kernel.
        k, k_scales = self.keys.layer(layer)
        v, v_scales = self.values.layer(layer)
        pages = KeyValueCodes(k=k, k_scales=k_scales, v=v, v_scales=v_scales)
        kernels = device_kernels(qkv)
        q = kernels.qk_norm_rotary_cache(
            qkv, rope.positions, rope.table, rope.norm_weights, rope.eps, rope.num_heads, pages,
            self.slots, self.plan.scales, rope.exponents,
        )  # fmt: skip
        if rope.trace is not None:
            rope.trace("rotary", q)
            rope.trace("keys and values", self._stored(layer))
        # Attend. The kernel writes FP8 codes for the next layer, unless a trace needs values.
        q, work = self._queries(q, last)
        format = self.plan.linear_format("rollout", layer, self.num_layers)
        watched = rope.trace is not None or rope.as_values
        as_codes, scales = format.grouped and not watched, self.plan.scales
        split = self.plan.attention_split or kernels.SPLIT_KEYS
        if isinstance(work, DecodeWork):
            tables, lengths, longest = work.tables, work.lengths, work.longest
            if as_codes:
                return kernels.attend_decode_quantized(
                    q, pages, tables, lengths, longest, scales, split, work.queries
                )
            o = kernels.attend_decode(q, pages, tables, lengths, longest, split, work.queries)
            return o.flatten(1)
        assert not isinstance(work, list), "kernels attend in tiles"
        if as_codes:
            return kernels.attend_prefill_quantized(q, pages, work, scales, split)
        return kernels.attend_prefill(q, pages, work, split).flatten(1)


def part_of(items: list[Span], page_size: int, device: torch.device) -> Part:
    """Return items of similar size as one dense batch, padded to the longest."""
    num_queries = max(item.length for item in items)
    used = [-(-(item.start + item.length) // page_size) for item in items]
    num_pages = max(used)
    pages = [
        item.pages[:count] + item.pages[:1] * (num_pages - count)
        for item, count in zip(items, used, strict=True)
    ]
    # Padding repeats the first query of an item; its output is dropped.
    sizes = [(item.row, item.start, item.length) for item in items]
    rows, starts, lengths = torch.tensor(sizes, device=device).unbind(1)
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


def _gpu_work(spans: Sequence[Span], device: torch.device) -> DecodeWork | QueryTiles:
    """Return work for the attention kernels: `DecodeWork` if each span is one token."""
    lengths = [span.start + span.length for span in spans]
    counts = [-(-length // GPU_PAGE_SIZE) for length in lengths]
    pages = [span.pages[:count] for span, count in zip(spans, counts, strict=True)]
    if any(span.length != 1 for span in spans):
        return QueryTiles.paged([span.length for span in spans], lengths, pages, device)
    widest = max(counts)
    tables = [row + [0] * (widest - len(row)) for row in pages]
    return DecodeWork(
        to_device(np.array(tables, dtype=np.int32), device),
        to_device(np.array(lengths, dtype=np.int32), device),
        max(lengths),
    )


def _group_items(spans: Sequence[Span], max_keys: int) -> list[list[Span]]:
    """Split spans into items of up to 256 queries; group similar ones, up to `max_keys` keys."""
    items = [
        Span(span.row + at, span.start + at, min(_MAX_QUERIES, span.length - at), span.pages)
        for span in spans
        for at in range(0, span.length, _MAX_QUERIES)
    ]
    # From the longest on, each item joins the previous group if that wastes little work.
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


class PagedCache:
    """Pages of keys and values of all layers, which attention reads in place or gathers."""

    def __init__(
        self,
        config: ModelConfig,
        plan: PrecisionPlan,
        num_pages: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        plan = plan.on("rollout")
        # No kernel reads FP32 pages.
        self.reads_pages_in_place = has_kernels(device) and not plan.keys_in_fp32
        assert not self.reads_pages_in_place or page_size == GPU_PAGE_SIZE, f"pages of {page_size}"
        self.num_pages = num_pages
        self.page_size = page_size
        self._plan = plan
        self._num_layers = config.num_layers
        self._token_elements = config.num_kv_heads * config.head_dim
        self.num_bytes = num_pages * self.page_bytes(config, plan, page_size)
        self._memory: MappedMemory | None = None
        if self.reads_pages_in_place:
            from jetrl.rollout.mapped_memory import MappedMemory

            self._memory = MappedMemory(self.num_bytes, device)
            self._memory.map()
            self._bytes = self._memory.tensor()
        else:
            self._bytes = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        # Kernels also read padding slots, which must not hold arbitrary bytes.
        self._bytes.zero_()
        shape = (num_pages, page_size, config.num_kv_heads, config.head_dim)
        self._keys, self._values = stores(self._bytes, config.layers_with_keys, shape, plan)

    @staticmethod
    def page_bytes(config: ModelConfig, plan: PrecisionPlan, page_size: int) -> int:
        """Return the bytes per page over all layers, including scales."""
        return page_size * kv_bytes_per_token(config, plan.on("rollout"))

    @property
    def ready(self) -> bool:
        return self._memory is None or self._memory.mapped

    def unmap(self) -> bool:
        """Free the memory of the pages, keeping addresses; return False if not supported."""
        if self._memory is not None:
            self._memory.unmap()
        return self._memory is not None

    def remap(self) -> None:
        """Map memory for the pages again; they are empty."""
        assert self._memory is not None, "this cache keeps its memory"
        self._memory.map()
        self._bytes.zero_()

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, destination) in all layers; reads all sources before writing."""
        if pairs:
            sources, destinations = to_device(pairs, self._keys.codes.device).unbind(1)
            self._keys.copy(sources, destinations)
            self._values.copy(sources, destinations)

    def key_values(
        self, spans: Sequence[Span], ends: bool = False
    ) -> PagedKeyValues | _DeviceKeyValues:
        """Return the `KeyValues` of a forward over spans, which fill rows 0 to T in order.

        With `ends` the output has only the last token of each span, [spans, H * D].
        """
        assert self.ready, "the memory of the pages is unmapped"
        device = self._keys.codes.device
        slots_T = to_device(self._slots(spans), device)
        source = _DeviceKeyValues if self.reads_pages_in_place else PagedKeyValues
        last = None
        if ends:  # In the last layer, the last token of each span attends.
            rows = to_device([span.row + span.length - 1 for span in spans], device)
            last_tokens = [
                Span(row, start=span.start + span.length - 1, length=1, pages=span.pages)
                for row, span in enumerate(spans)
            ]
            last = _LastLayer(rows, self._work(last_tokens))
        return source(
            keys=self._keys,
            values=self._values,
            num_layers=self._num_layers,
            plan=self._plan,
            slots=slots_T,
            work=self._work(spans),
            last=last,
        )

    def _work(self, spans: Sequence[Span]) -> AttentionWork:
        """Return the attention work for spans on this device."""
        device = self._keys.codes.device
        if self.reads_pages_in_place:
            return _gpu_work(spans, device)
        budget = max(1, MAX_GATHERED // self._token_elements)
        return [part_of(items, self.page_size, device) for items in _group_items(spans, budget)]

    def _slots(self, spans: Sequence[Span]) -> np.ndarray:
        """Return the slot of each token, page * page_size + offset, int64 [T]."""
        slots = []
        for span in spans:
            at = np.arange(span.start, span.start + span.length)
            pages = np.array(span.pages)[at // self.page_size]
            slots.append(pages * self.page_size + at % self.page_size)
        return np.concatenate(slots)

    def decode_key_values(self, slots: Tensor, work: DecodeWork) -> _DeviceKeyValues:
        """Return the `KeyValues` of decode for slots int64 [B], negative for padding."""
        return _DeviceKeyValues(
            keys=self._keys,
            values=self._values,
            num_layers=self._num_layers,
            plan=self._plan,
            slots=slots,
            work=work,
        )
