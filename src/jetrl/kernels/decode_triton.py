"""`kernels.decode` and `kernels.draft` in Triton: one kernel before a forward, one after sampling.

These kernels are latency-bound: a few dependent loads. Each lane handles one row of plain decode,
or one sequence when drafts are verified. Kernels that increment the counter of forwards or share
rows among sequences run as a single program.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels import decode_state
from jetrl.kernels.decode_state import (
    MAX_ROWS,
    DecodeInputs,
    DecodeState,
    Drafts,
    DraftText,
    Drawn,
    Verified,
    VerifyInputs,
)

# The constants of `decode_state` as constexprs.
NOT_DRAWN, BROKEN = tl.constexpr(decode_state.NOT_DRAWN), tl.constexpr(decode_state.BROKEN)
MAX_DRAFT, LAG = tl.constexpr(decode_state.MAX_DRAFT), tl.constexpr(decode_state.LAG)
FIRST, SECOND = (tl.constexpr(order) for order in decode_state.ORDERS)
HASH_FACTOR = tl.constexpr(decode_state.HASH_FACTOR)
HASH_SHIFT = tl.constexpr(decode_state.HASH_SHIFT)
QUALITY_ONE = tl.constexpr(decode_state.QUALITY_ONE)
QUALITY_SHIFT = tl.constexpr(decode_state.QUALITY_SHIFT)
COST_FACTOR = tl.constexpr(decode_state.COST_FACTOR)
COST_TOP = tl.constexpr(decode_state.COST_TOP)


@triton.jit
def random_bits(seed, key, position):
    """Return random bits, int64 [...], equal to those of `kernels.sampling.random_bits`."""
    low: tl.constexpr = 0xFFFFFFFF
    c0, c1, _, _ = tl.philox(
        seed,
        (key & low).to(tl.uint32),
        ((key >> 32) & low).to(tl.uint32),
        (position & low).to(tl.uint32),
        ((position >> 32) & low).to(tl.uint32),
    )
    wide = (c0.to(tl.uint64) << 32) | c1.to(tl.uint64)
    return (wide >> 11).to(tl.int64)


@triton.jit
def _inputs_kernel(
    token_ptr,
    position_ptr,
    key_ptr,
    active_ptr,
    tables_ptr,
    seed_ptr,
    offset_ptr,
    rows_ptr,
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    lengths_ptr,
    bits_ptr,
    count,
    width,
    PAGE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Gather the `DecodeInputs` of a forward from the slots in `rows_ptr`, one row per lane."""
    # The chain of dependent loads: row -> slot -> position -> page.
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = row < count
    slot = tl.load(rows_ptr + row, mask=mask, other=0)
    active = mask & (tl.load(active_ptr + slot, mask=mask, other=0) > 0)
    token = tl.load(token_ptr + slot, mask=active, other=0)
    position = tl.load(position_ptr + slot, mask=active, other=0)
    page = tl.load(tables_ptr + slot * width + position // PAGE, mask=active, other=0)
    place = page.to(tl.int64) * PAGE + position % PAGE

    # The forward at position p samples the token at p + 1, so its random bits belong to p + 1.
    key = tl.load(key_ptr + slot, mask=active, other=0)
    seed = tl.load(seed_ptr + slot, mask=active, other=0)
    bits = random_bits(seed, key, position.to(tl.int64) + 1)

    # The buffers are uninitialized, so inactive rows are written too.
    turned = position + tl.load(offset_ptr + slot, mask=active, other=0)
    tl.store(token_ids_ptr + row, token.to(tl.int64), mask=mask)
    tl.store(positions_ptr + row, turned.to(tl.int64), mask=mask)
    tl.store(slots_ptr + row, tl.where(active, place, -1), mask=mask)
    tl.store(lengths_ptr + row, tl.where(active, position + 1, 0), mask=mask)
    tl.store(bits_ptr + row, tl.where(active, bits, -1), mask=mask)


@triton.jit
def _take_kernel(
    token_ptr,
    position_ptr,
    limit_ptr,
    active_ptr,
    stops_ptr,
    rows_ptr,
    tokens_ptr,
    logprobs_ptr,
    lse_ptr,
    out_tokens_ptr,
    out_logprobs_ptr,
    out_count_ptr,
    count,
    lines,
    out_width,
    LANES: tl.constexpr,
):
    """Record the tokens of a forward in row `out_count`, and advance or end each sequence."""
    row = tl.arange(0, LANES)  # a single program, since it increments the counter
    mask = row < count
    slot = tl.load(rows_ptr + row, mask=mask, other=0)
    active = mask & (tl.load(active_ptr + slot, mask=mask, other=0) > 0)

    # For the host: the token, or the reason that there is none.
    token = tl.load(tokens_ptr + row, mask=active, other=0).to(tl.int32)
    logprob = tl.load(logprobs_ptr + row, mask=active, other=0.0)
    lse = tl.load(lse_ptr + row, mask=active, other=0.0)
    finite = tl.abs(lse) < float("inf")
    at = tl.load(out_count_ptr)
    written = tl.where(active, tl.where(finite, token, BROKEN), NOT_DRAWN)
    kept = mask & (at < lines)
    tl.store(out_tokens_ptr + at * out_width + row, written, mask=kept)
    tl.store(out_logprobs_ptr + at * out_width + row, logprob, mask=kept)

    # End sequences by the device part of the stop rule (`rollout.stopping`). Stop ids are shared by
    # all rows, so each is one scalar load compared in all lanes.
    position = tl.load(position_ptr + slot, mask=active, other=0) + 1
    runs_on = finite & (position < tl.load(limit_ptr + slot, mask=active, other=0))
    for i in range(0, tl.load(stops_ptr)):
        runs_on = runs_on & (token != tl.load(stops_ptr + 1 + i))
    tl.store(token_ptr + slot, token, mask=active)
    tl.store(position_ptr + slot, position, mask=active)
    tl.store(active_ptr + slot, runs_on.to(tl.int32), mask=active)

    tl.debug_barrier()  # every lane has read the counter
    tl.store(out_count_ptr, at + 1)


def next_inputs(state: DecodeState, rows: Tensor, page_size: int) -> DecodeInputs:
    """`kernels.decode.next_inputs` in Triton."""
    count = _count(rows)
    wide = torch.empty(4, count, dtype=torch.int64, device=rows.device)
    lengths = torch.empty(count, dtype=torch.int32, device=rows.device)
    token_ids, positions, slots, bits = wide.unbind(0)
    _inputs_kernel[(triton.cdiv(count, 128),)](
        state.token,
        state.position,
        state.key,
        state.active,
        state.tables,
        state.seed,
        state.offset,
        rows,
        token_ids,
        positions,
        slots,
        lengths,
        bits,
        count,
        state.tables.shape[1],
        page_size,
        128,
        num_warps=4,
    )
    return DecodeInputs(token_ids, positions, slots, lengths, bits)


def take_draws(
    state: DecodeState, rows: Tensor, tokens: Tensor, logprobs: Tensor, lse: Tensor, out: Drawn
) -> None:
    """`kernels.decode.take_draws` in Triton."""
    count = _count(rows)
    lines, out_width = out.tokens.shape
    _take_kernel[(1,)](
        state.token,
        state.position,
        state.limit,
        state.active,
        state.stops,
        rows,
        tokens,
        logprobs,
        lse,
        out.tokens,
        out.logprobs,
        out.count,
        count,
        lines,
        out_width,
        max(32, triton.next_power_of_2(count)),
        num_warps=4,
    )


def _count(rows: Tensor) -> int:
    """Check that rows are contiguous int64 slots, at most MAX_ROWS, and return their count."""
    assert (rows.dtype, rows.is_contiguous()) == (torch.int64, True)
    assert 1 <= len(rows) <= MAX_ROWS, f"{len(rows)} rows"
    return len(rows)


_LANES = 32  # rows per program: one warp, so that the latencies of many programs overlap


@triton.jit
def ngram_entry(text_ptr, group, last, mask, entries, ORDER: tl.constexpr):
    """Return table indices of n-grams in int32 text, int64 [LANES], as `draft.ngram_entry`."""
    hashed = group
    for back in tl.static_range(ORDER):
        token = tl.load(text_ptr + last - back, mask=mask, other=0).to(tl.int64)
        hashed = (hashed ^ token) * tl.full([], HASH_FACTOR, tl.int64)
        hashed = hashed ^ (hashed >> 32)
    return (hashed >> HASH_SHIFT) & (entries - 1)


@triton.jit
def _look_up(text_ptr, table_ptr, group, end, position, active, entries, ORDER: tl.constexpr):
    """Return the index of an earlier match of the last ORDER tokens, and whether there is one."""
    enough = active & (position >= ORDER - 1)
    entry = ngram_entry(text_ptr, group, end, enough, entries, ORDER)
    place = tl.load(table_ptr + entry, mask=enough, other=-1).to(tl.int64)
    # Compare the tokens: text may have been overwritten, and hashes collide.
    same = enough & (place >= ORDER - 1) & (place != end)
    for back in tl.static_range(ORDER):
        there = tl.load(text_ptr + place - back, mask=same, other=-1)
        own = tl.load(text_ptr + end - back, mask=same, other=-2)
        same = same & (there == own)
    return place, same


@triton.jit(do_not_specialize=["count", "size", "width", "slots", "entries"])
def _propose_kernel(
    text_ptr,
    tables_ptr,
    group_ptr,
    position_ptr,
    active_ptr,
    rows_ptr,
    tokens_ptr,
    counts_ptr,
    sources_ptr,
    count,
    size,
    width,
    slots,
    entries,
    FIRST_ONLY: tl.constexpr,
    LANES: tl.constexpr,
):
    """Look up a draft for each row; FIRST_ONLY uses only n-grams of the first length."""
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = row < count
    slot = tl.load(rows_ptr + row, mask=mask, other=0)
    active = mask & (tl.load(active_ptr + slot, mask=mask, other=0) > 0)
    position = tl.load(position_ptr + slot, mask=active, other=0)
    group = tl.load(group_ptr + slot, mask=active, other=0)
    end = slot * width + position

    # Search both tables so that the latencies of their loads overlap; prefer the longer n-gram.
    long_place, long_same = _look_up(
        text_ptr, tables_ptr, group, end, position, active, entries, FIRST
    )
    place = long_place
    alive = long_same
    if not FIRST_ONLY:
        short_place, short_same = _look_up(
            text_ptr, tables_ptr + entries, group, end, position, active, entries, SECOND
        )
        place = tl.where(long_same, long_place, short_place)
        alive = long_same | short_same

    # Copy the tokens that followed, up to the first UNKNOWN.
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
    """`kernels.draft.propose` in Triton."""
    count = _count(rows)
    tokens = torch.empty(count, decode_state.MAX_DRAFT, dtype=torch.int32, device=rows.device)
    counts, sources = torch.empty(2, count, dtype=torch.int32, device=rows.device).unbind(0)
    _propose_kernel[(triton.cdiv(count, _LANES),)](
        draft_text.text,
        draft_text.tables,
        draft_text.group,
        state.position,
        state.active,
        rows,
        tokens,
        counts,
        sources,
        count,
        len(draft_text.text),
        draft_text.width,
        draft_text.slots,
        draft_text.tables.shape[1],
        longest_only,
        _LANES,
        num_warps=1,
    )
    return Drafts(tokens, counts, sources)


_FORMS = (32, 256, 1024)  # lane counts that are compiled; larger ones use MAX_ROWS


@triton.jit
def _shared_rows(wanted, quality, extra, turn, REACH_BITS: tl.constexpr):
    """Return the number of draft tokens to verify per sequence, as `decode.share_rows`."""
    # Find the largest reach that fits the rows, bit by bit from the highest. The loop is not
    # unrolled: each of its divisions takes seconds to compile.
    cost = COST_FACTOR * (COST_TOP - quality)
    reach = 0
    for i in range(REACH_BITS):
        tried = reach + (1 << (REACH_BITS - 1 - i))
        reach = tl.where(tl.sum(tl.minimum(wanted, tried // cost)) <= extra, tried, reach)
    drafted = tl.minimum(wanted, reach // cost)
    following = tl.minimum(wanted, (reach + 1) // cost) > drafted
    following = following & (reach < (1 << REACH_BITS) - 1)
    count = following.to(tl.int32)
    order = (tl.cumsum(count) - 1 + turn) % tl.maximum(tl.sum(count), 1)
    return drafted + (following & (order < extra - tl.sum(drafted))).to(tl.int32)


@triton.jit(do_not_specialize=["count", "size", "pages", "width"])
def _verify_inputs_kernel(
    token_ptr,
    position_ptr,
    limit_ptr,
    key_ptr,
    active_ptr,
    tables_ptr,
    seed_ptr,
    offset_ptr,
    quality_ptr,
    draft_ptr,
    counts_ptr,
    rows_ptr,
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    bits_ptr,
    keys_ptr,
    lengths_ptr,
    queries_ptr,
    first_ptr,
    count,
    size,
    pages,
    width,
    PAGE: tl.constexpr,
    REACH_BITS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Gather the `VerifyInputs` of a forward from slots and drafts, one sequence per lane."""
    row = tl.arange(0, LANES)  # a single program, since all sequences share the rows
    mask = row < count
    slot = tl.load(rows_ptr + row, mask=mask, other=0)
    active = mask & (tl.load(active_ptr + slot, mask=mask, other=0) > 0)
    position = tl.load(position_ptr + slot, mask=active, other=0)
    queries = active.to(tl.int32)
    first = row
    if width > 1:
        # The query at position p samples the token at p + 1, which must not exceed the limit.
        most = tl.load(limit_ptr + slot, mask=active, other=0) - 1 - position
        wanted = tl.minimum(tl.load(counts_ptr + row, mask=active, other=0), most)
        wanted = tl.minimum(tl.maximum(wanted, 0), width - 1)
        quality = tl.load(quality_ptr + slot, mask=active, other=0)
        extra = size - tl.sum(queries)
        turn = tl.sum(position)
        queries += _shared_rows(wanted, quality, extra, turn, REACH_BITS)
        queries = tl.where(active, queries, 0)
        first = tl.cumsum(queries) - queries
    # A sequence that does not fit the rows gets no queries, so nothing is written out of bounds.
    queries = tl.where(first + queries <= size, queries, 0)
    length = tl.where(queries > 0, position + queries, 0)
    tl.store(queries_ptr + row, queries, mask=mask)
    tl.store(lengths_ptr + row, length, mask=mask)
    tl.store(first_ptr + row, first, mask=mask)

    key = tl.load(key_ptr + slot, mask=active, other=0)
    seed = tl.load(seed_ptr + slot, mask=active, other=0)
    offset = tl.load(offset_ptr + slot, mask=active, other=0)
    last = tl.load(token_ptr + slot, mask=active, other=0)
    # The trip count is a launch argument: an unrolled loop would take seconds to compile.
    for j in range(width):
        used = j < queries
        at = tl.where(used, position + j, 0)
        guess = tl.load(draft_ptr + row * MAX_DRAFT + (j - 1), mask=used & (j > 0), other=0)
        token = tl.where(j > 0, guess, last)
        page = tl.load(tables_ptr + slot * pages + at // PAGE, mask=used, other=0)
        place = page.to(tl.int64) * PAGE + at % PAGE
        bits = random_bits(seed, key, at.to(tl.int64) + 1)
        # With one query per sequence, the row of an inactive sequence is padding in place.
        out = first + j
        written = (used | (mask & (width == 1))) & (out < size)
        tl.store(token_ids_ptr + out, tl.where(used, token, 0).to(tl.int64), mask=written)
        turned = tl.where(used, at + offset, 0)
        tl.store(positions_ptr + out, turned.to(tl.int64), mask=written)
        tl.store(slots_ptr + out, tl.where(used, place, -1), mask=written)
        tl.store(bits_ptr + out, tl.where(used, bits, -1), mask=written)
        tl.store(keys_ptr + out, length, mask=written)

    if width > 1:
        # The buffers are uninitialized: fill the rows after the last query with padding.
        zero = tl.zeros([LANES], tl.int64)
        for start in range(tl.sum(queries), size, LANES):
            left = start + tl.arange(0, LANES)
            padding = left < size
            tl.store(token_ids_ptr + left, zero, mask=padding)
            tl.store(positions_ptr + left, zero, mask=padding)
            tl.store(slots_ptr + left, zero - 1, mask=padding)
            tl.store(bits_ptr + left, zero - 1, mask=padding)
            tl.store(keys_ptr + left, zero.to(tl.int32), mask=padding)


@triton.jit
def _insert_ngrams(text_ptr, tables_ptr, group, base, end, known, entries):
    """Insert the n-grams that end at position `end` of each sequence into the tables."""
    last = base + end
    ok = known & (end >= FIRST - 1)
    entry = ngram_entry(text_ptr, group, last, ok, entries, FIRST)
    tl.store(tables_ptr + entry, last.to(tl.int32), mask=ok)
    ok = known & (end >= SECOND - 1)
    entry = ngram_entry(text_ptr, group, last, ok, entries, SECOND)
    tl.store(tables_ptr + entries + entry, last.to(tl.int32), mask=ok)


@triton.jit(
    do_not_specialize=["count", "out_width", "offers_width", "text_width", "entries", "width"]
)
def _take_verified_kernel(
    token_ptr,
    position_ptr,
    limit_ptr,
    active_ptr,
    stops_ptr,
    text_ptr,
    tables_ptr,
    group_ptr,
    quality_ptr,
    draft_ptr,
    counts_ptr,
    sources_ptr,
    queries_ptr,
    first_ptr,
    rows_ptr,
    tokens_ptr,
    logprobs_ptr,
    lse_ptr,
    out_tokens_ptr,
    out_logprobs_ptr,
    out_offers_ptr,
    out_count_ptr,
    count,
    lines,
    out_width,
    offers_width,
    text_width,
    entries,
    width,
    LANES: tl.constexpr,
):
    """Record the accepted tokens in row `out_count`, and advance or end each sequence."""
    row = tl.arange(0, LANES)  # a single program, since it increments the counter
    mask = row < count
    slot = tl.load(rows_ptr + row, mask=mask, other=0)
    queries = tl.load(queries_ptr + row, mask=mask, other=0)
    first = tl.load(first_ptr + row, mask=mask, other=0)
    active = queries > 0
    position = tl.load(position_ptr + slot, mask=active, other=0)
    limit = tl.load(limit_ptr + slot, mask=active, other=0)
    base = slot * text_width
    group = tl.load(group_ptr + slot, mask=active, other=0)
    offered = tl.load(counts_ptr + row, mask=active, other=0) > 0
    at = tl.load(out_count_ptr)
    kept = mask & (at < lines)
    num_stops = tl.load(stops_ptr)

    # Accept tokens one by one while they match the draft and do not end the sequence.
    alive = active
    taken = tl.zeros([LANES], tl.int32)
    last_token = tl.zeros([LANES], tl.int32)
    runs_on = active
    hit = active & offered
    for j in range(width):
        place = row * width + j
        token = tl.load(tokens_ptr + first + j, mask=alive, other=0).to(tl.int32)
        logprob = tl.load(logprobs_ptr + first + j, mask=alive, other=0.0)
        lse = tl.load(lse_ptr + first + j, mask=alive, other=0.0)
        finite = tl.abs(lse) < float("inf")
        written = tl.where(alive, tl.where(finite, token, BROKEN), NOT_DRAWN)
        tl.store(out_tokens_ptr + at * out_width + place, written, mask=kept)
        tl.store(out_logprobs_ptr + at * out_width + place, logprob, mask=kept)
        tl.store(text_ptr + base + position + 1 + j, token, mask=alive)

        # The device part of the stop rule (`rollout.stopping`).
        goes_on = finite & (position + 1 + j < limit)
        for i in range(0, num_stops):
            goes_on = goes_on & (token != tl.load(stops_ptr + 1 + i))
        taken += alive.to(tl.int32)
        last_token = tl.where(alive, token, last_token)
        runs_on = tl.where(alive, goes_on, runs_on)
        # Insert the n-gram that ends LAG tokens earlier: earlier forwards wrote its tokens.
        end = position + 1 + j - LAG
        _insert_ngrams(text_ptr, tables_ptr, group, base, end, alive, entries)
        drafted = alive & (j < MAX_DRAFT)
        guess = tl.load(draft_ptr + row * MAX_DRAFT + j, mask=drafted, other=NOT_DRAWN)
        same = token == guess
        hit = hit & (same | (j > 0))
        alive = alive & goes_on & same & (j + 1 < queries)

    tl.store(token_ptr + slot, last_token, mask=active)
    tl.store(position_ptr + slot, position + taken, mask=active)
    tl.store(active_ptr + slot, runs_on.to(tl.int32), mask=active)
    source = tl.load(sources_ptr + row, mask=active, other=0)
    # The fields of `Verified.offers`.
    offer = queries - 1 + 8 * source + 32 * hit.to(tl.int32) + 64 * offered.to(tl.int32)
    tl.store(out_offers_ptr + at * offers_width + row, tl.where(active, offer, 0), mask=kept)

    # Draft quality: a moving average that decays by 2**-QUALITY_SHIFT per draft.
    before = tl.load(quality_ptr + slot, mask=active, other=0)
    after = before + ((QUALITY_ONE * hit.to(tl.int32) - before) >> QUALITY_SHIFT)
    tl.store(quality_ptr + slot, after, mask=active & offered)

    tl.debug_barrier()  # every lane has read the counter
    tl.store(out_count_ptr, at + 1)


def verify_inputs(
    state: DecodeState,
    draft_text: DraftText,
    drafts: Drafts,
    rows: Tensor,
    page_size: int,
    width: int,
    size: int,
) -> VerifyInputs:
    """`kernels.decode.verify_inputs` in Triton."""
    count = _count(rows)
    wide = torch.empty(4, size, dtype=torch.int64, device=rows.device)
    keys = torch.empty(size, dtype=torch.int32, device=rows.device)
    each = torch.empty(3, count, dtype=torch.int32, device=rows.device)
    token_ids, positions, slots, bits = wide.unbind(0)
    lengths, queries, first = each.unbind(0)
    _verify_inputs_kernel[(1,)](
        state.token,
        state.position,
        state.limit,
        state.key,
        state.active,
        state.tables,
        state.seed,
        state.offset,
        draft_text.quality,
        drafts.tokens,
        drafts.counts,
        rows,
        token_ids,
        positions,
        slots,
        bits,
        keys,
        lengths,
        queries,
        first,
        count,
        size,
        state.tables.shape[1],
        width,
        page_size,
        decode_state.REACH_BITS,
        _lanes(count),
        num_warps=4,
    )
    return VerifyInputs(token_ids, positions, slots, bits, keys, lengths, queries, first)


def take_verified(
    state: DecodeState,
    draft_text: DraftText,
    drafts: Drafts,
    inputs: VerifyInputs,
    rows: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    lse: Tensor,
    out: Verified,
    width: int,
) -> None:
    """`kernels.decode.take_verified` in Triton."""
    count = _count(rows)
    lines, out_width = out.tokens.shape
    _take_verified_kernel[(1,)](
        state.token,
        state.position,
        state.limit,
        state.active,
        state.stops,
        draft_text.text,
        draft_text.tables,
        draft_text.group,
        draft_text.quality,
        drafts.tokens,
        drafts.counts,
        drafts.sources,
        inputs.queries,
        inputs.first,
        rows,
        tokens,
        logprobs,
        lse,
        out.tokens,
        out.logprobs,
        out.offers,
        out.count,
        count,
        lines,
        out_width,
        out.offers.shape[1],
        draft_text.width,
        draft_text.tables.shape[1],
        width,
        _lanes(count),
        num_warps=4,
    )


def _lanes(count: int) -> int:
    """Return the number of lanes, rounded up to one of a few sizes that are compiled."""
    return next((lanes for lanes in _FORMS if count <= lanes), MAX_ROWS)
