"""What attends in a forward of the rollout: `jetrl.models.attention.KeyValues` over pages.

A forward runs a flat list of T tokens of many sequences. In each layer their keys and values are
quantized and written to their slots; then the tokens attend. On a GPU kernels read the pages in
place. Elsewhere they attend in parts: a part is queries of sequences of similar length, whose pages
are gathered into one dense batch. Padding, and what else is in a part, cannot change a bit of a
result (`attend_dense`); the parts only bound time and memory.

Of prompts only the last tokens' output is read, so the last layer attends for these alone.

Dimensions: T tokens of the forward, B items of a part, Q queries an item, P pages an item, L keys
(at most P * page_size), H query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jetrl.kernels.attention.reference import attend_dense, quantize_kv
from jetrl.models.rotary import Rotary
from jetrl.precision.hopper import hopper
from jetrl.precision.plan import PrecisionPlan
from jetrl.precision.quantize import QTensor
from jetrl.rollout.kv_stores import KVStore
from jetrl.rollout.launched_step import to_device

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


@dataclass(frozen=True)
class LastLayer:
    """What the last layer attends for. rows: int64 [R], of the T tokens. work: the `Part`s, or the
    GPU's work, of these tokens alone, in rows 0 to R."""

    rows: Tensor
    work: Any


@dataclass(frozen=True)
class DecodeWork:
    """One new token for each of B sequences. tables: int32 [B, P], their pages in order, anything
    after them. lengths: int32 [B], keys of each with the new one. longest: at least the longest, an
    integer that sizes the launch. The tensors are read in place: a captured forward follows them.
    """

    tables: Tensor
    lengths: Tensor
    longest: int


class _OverPages:
    """What both sources over a `PagedCache` know of one forward.

    slots: int64 [T], page * page_size + offset, where each token's keys and values go. work: what
    the tokens attend in. last: where not every token's output is asked for.
    """

    def __init__(
        self,
        keys: KVStore,
        values: KVStore,
        plan: PrecisionPlan,
        slots: Tensor,
        work: Any,
        last: LastLayer | None = None,
    ) -> None:
        self._keys, self._values, self._plan = keys, values, plan
        self._slots, self._work, self._last = slots, work, last
        self.rows = None if last is None else last.rows

    def _asked(self, q: Tensor, last: bool) -> tuple[Tensor, Any]:
        """(the queries of q [T, H, D] that attend, in the last layer `rows` alone; their work)."""
        if last and self._last is not None:
            return q[self._last.rows], self._last.work
        return q, self._work


class PagedKeyValues(_OverPages):
    """`jetrl.models.attention.KeyValues` over a `PagedCache`, for the tokens of one forward. work:
    `Part`s."""

    def attend(self, layer: int, qkv: Tensor, rope: Rotary, last: bool) -> Tensor:
        """As `KeyValues.attend`."""
        attended = self.attend_heads(layer, *rope.heads(qkv), last).flatten(-2, -1)
        if rope.trace is not None:
            stored = [x.values(layer, self._slots) for x in (self._keys, self._values)]
            rope.trace("keys and values", torch.cat(stored, dim=1))
        return attended

    def attend_heads(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, last: bool = False
    ) -> Tensor:
        """Stores k, v [T, G, D]; q [T, H, D] attends to its sequence so far. Returns [T, H, D], of
        the last layer for `rows`."""
        self._keys.write(layer, self._slots, *quantize_kv(k, self._plan.kv, self._plan.scales))
        self._values.write(layer, self._slots, *quantize_kv(v, self._plan.kv, self._plan.scales))
        q, parts = self._asked(q, last)
        out = torch.empty_like(q)
        for part in parts:
            k_codes, k_scales = self._keys.gather(layer, part.pages, part.num_keys)
            v_codes, v_scales = self._values.gather(layer, part.pages, part.num_keys)
            dense = attend_dense(q[part.rows], k_codes, k_scales, v_codes, v_scales, part.positions)
            out[part.rows[part.valid]] = dense[part.valid]
        return out


class HopperKeyValues(_OverPages):
    """The same on a GPU, where one kernel norms, rotates and writes keys and values into the pages,
    and another reads them in place. Decode and chunks have kernels of their own; a token's bits are
    the same.

    slots: negative for nowhere (a row of padding). work: `DecodeWork`, or the kernels' tiles of a
    forward with chunks. Nothing here touches the host: with decode work a forward can be captured
    in a CUDA graph.
    """

    def attend(self, layer: int, qkv: Tensor, rope: Rotary, last: bool) -> Tensor | QTensor:
        """As `KeyValues.attend`: the codes that the next linear reads, if it is FP8."""
        kernels = hopper("kernels.attention.hopper")
        k, k_scales = self._keys.layer(layer)
        v, v_scales = self._values.layer(layer)
        fused = hopper("kernels.rotary_hopper")
        q = fused.qk_norm_rotary_cache(
            qkv, rope.positions, rope.table, rope.norm_weights, rope.eps, rope.num_heads,
            fused.CacheSlots(k, v, k_scales, v_scales), self._slots, self._plan.scales,
        )  # fmt: skip
        pages = kernels.KeyValueCodes(k, k_scales, v, v_scales)
        if rope.trace is not None:
            rope.trace("rotary", q)
            rope.trace("keys and values", kernels.stored_values(pages, self._slots))
        q, work = self._asked(q, last)
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


def parts_of(
    spans: Sequence[Span], page_size: int, token_elements: int, device: torch.device
) -> list[Part]:
    """The spans in parts. page_size: in tokens. token_elements: G * D, of the keys of a token."""
    budget = max(1, _MAX_GATHERED // token_elements)
    return [_part(items, page_size, device) for items in group_items(spans, budget)]


def _part(items: list[Span], page_size: int, device: torch.device) -> Part:
    num_queries = max(item.length for item in items)
    used = [-(-(item.start + item.length) // page_size) for item in items]
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


def gpu_work(spans: Sequence[Span], device: torch.device) -> Any:
    """What the attention kernels are told of these spans: `DecodeWork` where each is one token,
    else `kernels.attention_layout.QueryTiles`."""
    lengths = [span.start + span.length for span in spans]
    counts = [-(-length // GPU_PAGE_SIZE) for length in lengths]
    pages = [span.pages[:count] for span, count in zip(spans, counts, strict=True)]
    if any(span.length != 1 for span in spans):
        tiles = hopper("kernels.attention.hopper").QueryTiles
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
