"""`kernels.draft` on Hopper: drafts are looked up by one kernel, a lane a row.

The kernel is latency, few loads that wait for each other: row, slot, position, last tokens, entry,
what stands there, what follows. It writes the drafts that `kernels.draft.propose` returns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.decode_hopper import check_rows
from jetrl.kernels.decode_state import DecodeState
from jetrl.kernels.draft_state import (
    HASH_FACTOR,
    HASH_SHIFT,
    MAX_DRAFT,
    ORDERS,
    Drafts,
    DraftText,
)

_LANES = 32  # rows of a program: a warp's, so that many programs wait side by side


@triton.jit
def ngram_entry(
    text_ptr, group, last, mask, entries,
    ORDER: tl.constexpr, HASH_FACTOR: tl.constexpr, HASH_SHIFT: tl.constexpr,
):  # fmt: skip
    """Return the entry of a table for the n-gram that ends at a place, as `draft.ngram_entry`.

    Args:
        text_ptr: int32 [N], the text.
        group: int64 [LANES], the prompts' keys.
        last: int64 [LANES], the place of each n-gram's last token.
        HASH_FACTOR: of `draft_state`.
        HASH_SHIFT: of `draft_state`.
    """
    hashed = group
    for back in tl.static_range(ORDER):
        token = tl.load(text_ptr + last - back, mask=mask, other=0).to(tl.int64)
        hashed = (hashed ^ token) * tl.full([], HASH_FACTOR, tl.int64)
        hashed = hashed ^ (hashed >> 32)
    return (hashed >> HASH_SHIFT) & (entries - 1)


@triton.jit
def _look_up(
    text_ptr, table_ptr, group, end, position, active, entries,
    ORDER: tl.constexpr, HASH_FACTOR: tl.constexpr, HASH_SHIFT: tl.constexpr,
):  # fmt: skip
    """Return where the last ORDER tokens of a sequence stood before, and whether they did.

    Args:
        text_ptr: int32 [N], the text.
        table_ptr: int32 [entries], the table of n-grams of this order.
        group: int64 [LANES], the prompts' keys.
        end: int64 [LANES], the place of each sequence's last token.
        position: int32 [LANES], its position.
        ORDER: tokens of an n-gram.
        HASH_FACTOR, HASH_SHIFT: of `draft_state`.
    """
    enough = active & (position >= ORDER - 1)
    entry = ngram_entry(text_ptr, group, end, enough, entries, ORDER, HASH_FACTOR, HASH_SHIFT)
    place = tl.load(table_ptr + entry, mask=enough, other=-1).to(tl.int64)
    # What stands there must still be the n-gram: places are written again, hashes collide.
    same = enough & (place >= ORDER - 1) & (place != end)
    for back in tl.static_range(ORDER):
        there = tl.load(text_ptr + place - back, mask=same, other=-1)
        own = tl.load(text_ptr + end - back, mask=same, other=-2)
        same = same & (there == own)
    return place, same


@triton.jit(do_not_specialize=["count", "size", "width", "slots", "entries"])
def _propose_kernel(
    text_ptr, tables_ptr, group_ptr, position_ptr, active_ptr, rows_ptr,
    tokens_ptr, counts_ptr, sources_ptr,
    count, size, width, slots, entries,
    FIRST: tl.constexpr, SECOND: tl.constexpr, MAX_DRAFT: tl.constexpr, FIRST_ONLY: tl.constexpr,
    HASH_FACTOR: tl.constexpr, HASH_SHIFT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Look up a draft for each row.

    Args:
        text_ptr, tables_ptr, group_ptr: of `DraftText`, read.
        position_ptr, active_ptr: of `DecodeState`, read.
        rows_ptr: int64 [count], the slot of each row.
        tokens_ptr, counts_ptr, sources_ptr: of `Drafts`, written.
        size: tokens of the text, N.
        width: tokens of a slot's row of the text.
        entries: entries of a table.
        FIRST, SECOND: the lengths of n-grams.
        FIRST_ONLY: whether n-grams of the second length lead to no draft.
        HASH_FACTOR, HASH_SHIFT: of `draft_state`.
    """
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = row < count
    slot = tl.load(rows_ptr + row, mask=mask, other=0)
    active = mask & (tl.load(active_ptr + slot, mask=mask, other=0) > 0)
    position = tl.load(position_ptr + slot, mask=active, other=0)
    group = tl.load(group_ptr + slot, mask=active, other=0)
    end = slot * width + position

    # Both tables at once, so that their loads wait side by side; the longer n-gram goes first.
    long_place, long_same = _look_up(
        text_ptr, tables_ptr, group, end, position, active, entries, FIRST, HASH_FACTOR, HASH_SHIFT
    )
    place = long_place
    alive = long_same
    if not FIRST_ONLY:
        short_place, short_same = _look_up(
            text_ptr, tables_ptr + entries, group, end, position, active, entries,
            SECOND, HASH_FACTOR, HASH_SHIFT,
        )  # fmt: skip
        place = tl.where(long_same, long_place, short_place)
        alive = long_same | short_same

    # What followed there, up to the first place that holds no token.
    length = tl.zeros([LANES], tl.int32)
    source = tl.where(place >= slots * width, 2, tl.where(place // width == slot, 0, 1))
    tl.store(sources_ptr + row, tl.where(alive, source, 0).to(tl.int32), mask=mask)
    for i in tl.static_range(MAX_DRAFT):
        at = place + 1 + i
        token = tl.load(text_ptr + at, mask=alive & (at < size), other=-1)
        alive = alive & (token >= 0)
        length += alive.to(tl.int32)
        tl.store(tokens_ptr + row * MAX_DRAFT + i, token, mask=mask)
    tl.store(counts_ptr + row, length, mask=mask)


def propose(
    draft_text: DraftText, state: DecodeState, rows: Tensor, longest_only: bool = False
) -> Drafts:
    """Return what `kernels.draft.propose` returns, on Hopper.

    Args:
        rows: int64 [B], the slot of each row.
        longest_only: whether only the longest n-grams lead to a draft.
    """
    count = check_rows(rows)
    tokens = torch.empty(count, MAX_DRAFT, dtype=torch.int32, device=rows.device)
    counts, sources = torch.empty(2, count, dtype=torch.int32, device=rows.device).unbind(0)
    _propose_kernel[(triton.cdiv(count, _LANES),)](
        draft_text.text, draft_text.tables, draft_text.group, state.position, state.active, rows,
        tokens, counts, sources,
        count, len(draft_text.text), draft_text.width, draft_text.slots,
        draft_text.tables.shape[1], *ORDERS, MAX_DRAFT, longest_only,
        HASH_FACTOR, HASH_SHIFT, _LANES, num_warps=1,
    )  # fmt: skip
    return Drafts(tokens, counts, sources)
