"""Decode steps between two forwards, on the device: no token passes through Python.

Each running sequence has a slot. Row r of a forward is the sequence in slot rows[r]; rows with an
inactive slot have length 0 and change nothing. One forward of plain decode is

    inputs = next_inputs(state, rows, page_size)            inputs of model, cache and sampler
    tokens, logprobs, lse = ...                             forward pass and sampling
    take_draws(state, rows, tokens, logprobs, lse, out)     advance or end each sequence

With speculative decoding, a forward takes up to Q queries per sequence (its last token and a draft)
and samples at every position with the random bits of that position (`verify_inputs`,
`take_verified`). Samples are accepted up to and including the first that differs from the draft, so
the sequence is bitwise equal to plain decode for any draft.

All steps can be captured in a CUDA graph. The host decides a few forwards later when a sequence
ends (`rollout.stopping`). The device ends it at a stop id, at its limit or at non-finite logits;
stop strings and stop ids beyond MAX_STOP_IDS are left to the host. Legend: `kernels.decode_state`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.backend import kernels_of
from jetrl.kernels.decode_state import (
    BROKEN,
    COST_FACTOR,
    COST_TOP,
    NOT_DRAWN,
    QUALITY_ONE,
    QUALITY_SHIFT,
    REACH_BITS,
    DecodeInputs,
    DecodeState,
    Drafts,
    DraftText,
    Drawn,
    Offers,
    Verified,
    VerifyInputs,
)
from jetrl.kernels.draft import extend
from jetrl.kernels.sampling import random_bits


def next_inputs(state: DecodeState, rows: Tensor, page_size: int) -> DecodeInputs:
    """Return the inputs of the next forward for the sequences in slots `rows`, int64 [B]."""
    if (kernels := kernels_of(rows)) is not None:
        return kernels.next_inputs(state, rows, page_size)
    active = state.active[rows] > 0
    position = torch.where(active, state.position[rows], 0).long()
    page = state.tables[rows, position // page_size].long()
    # The forward at position p samples the token at p + 1, so its random bits belong to p + 1.
    bits = _random_bits(state, rows, position + 1)
    return DecodeInputs(
        token_ids=torch.where(active, state.token[rows], 0).long(),
        positions=torch.where(active, position + state.offset[rows], 0),
        slots=torch.where(active, page * page_size + position % page_size, -1),
        lengths=torch.where(active, position + 1, 0).int(),
        bits=torch.where(active, bits, -1),
    )


def _random_bits(state: DecodeState, slots: Tensor, positions: Tensor) -> Tensor:
    """Return the random bits of tokens at positions, int64 [R], on their device."""
    drawn = random_bits(
        seed=state.seed[slots].cpu().numpy(),
        sequence=state.key[slots].cpu().numpy(),
        position=positions.cpu().numpy(),
    )
    return torch.from_numpy(drawn).to(positions.device)


def take_draws(
    state: DecodeState, rows: Tensor, tokens: Tensor, logprobs: Tensor, lse: Tensor, out: Drawn
) -> None:
    """Record the tokens, logprobs and lse [B] of a forward, and advance or end each sequence.

    A sequence ends at a stop id, at its limit, or if its lse is not finite. Updates state in place,
    writes row `out.count` of the outputs and increments that counter.
    """
    if (kernels := kernels_of(rows)) is not None:
        kernels.take_draws(state, rows, tokens, logprobs, lse, out)
        return
    active = state.active[rows] > 0
    finite = torch.isfinite(lse)
    at, count = int(out.count), len(rows)
    written = torch.where(finite, tokens, BROKEN)
    out.tokens[at, :count] = torch.where(active, written, NOT_DRAWN).int()
    out.logprobs[at, :count] = torch.where(active, logprobs, 0.0)
    out.count.add_(1)
    live, drawn = rows[active], tokens[active].int()
    state.token[live] = drawn
    state.position[live] += 1
    ends = _ends(state, live, drawn, state.position[live], finite[active])
    state.active[live] = (~ends).int()


def _ends(
    state: DecodeState, slots: Tensor, tokens: Tensor, positions: Tensor, finite: Tensor
) -> Tensor:
    """Return the mask of tokens that end their sequence, by the device part of the stop rule."""
    stopped = torch.isin(tokens, state.stops[1 : 1 + int(state.stops[0])])
    return stopped | (positions >= state.limit[slots]) | ~finite


def verify_inputs(
    state: DecodeState,
    draft_text: DraftText,
    drafts: Drafts,
    rows: Tensor,
    page_size: int,
    width: int,
    size: int,
) -> VerifyInputs:
    """Return the inputs of the next forward: the last token of each sequence, then draft tokens.

    A draft is truncated to the width, to the sequence's limit and to its share of the rows.

    Args:
        rows: int64 [B], slot of each sequence.
        width: Q, maximum number of queries per sequence, at most MAX_QUERIES.
        size: R, number of rows of the forward, from B to B * Q.
    """
    assert len(rows) <= size <= len(rows) * width, f"{size} rows of {len(rows)} sequences"
    if (kernels := kernels_of(rows)) is not None:
        return kernels.verify_inputs(state, draft_text, drafts, rows, page_size, width, size)
    active = state.active[rows] > 0
    position = torch.where(active, state.position[rows], 0).long()
    # The query at position p samples the token at p + 1, which must not exceed the limit.
    wanted = torch.minimum(drafts.counts, state.limit[rows] - 1 - position).clamp(0, width - 1)
    wanted = torch.where(active, wanted, 0).int()
    extra = size - int(active.sum())
    drafted = share_rows(wanted, draft_text.quality[rows], extra, int(position.sum()))
    queries = torch.where(active, 1 + drafted, 0)
    first = (
        queries.cumsum(0) - queries if width > 1 else torch.arange(len(rows), device=rows.device)
    )
    # Compute values per query, then scatter them to rows.
    ahead = torch.arange(width, device=rows.device)
    used = ahead < queries[:, None]
    places = (first[:, None] + ahead)[used]
    positions = (position[:, None] + ahead)[used]
    tokens = torch.cat([state.token[rows][:, None], drafts.tokens[:, : width - 1]], dim=1)[used]
    slot = rows[:, None].expand_as(used)[used]
    page = state.tables[slot, positions // page_size].long()
    bits = _random_bits(state, slot, positions + 1)
    lengths = torch.where(active, position + queries, 0).int()

    def by_row(values: Tensor, padding: int) -> Tensor:
        return values.new_full((size,), padding).index_put((places,), values)

    return VerifyInputs(
        token_ids=by_row(tokens.long(), 0),
        positions=by_row(positions + state.offset[slot], 0),
        slots=by_row(page * page_size + positions % page_size, -1),
        bits=by_row(bits, -1),
        keys=by_row(lengths[:, None].expand_as(used)[used], 0),
        lengths=lengths,
        queries=queries.int(),
        first=first.int(),
    )


def share_rows(wanted: Tensor, quality: Tensor, extra: int, turn: int) -> Tensor:
    """Return the number of draft tokens that a forward verifies per sequence, int32 [B].

    Draft token j is accepted with probability about s^j, where s is the acceptance rate of the
    sequence. The most probable tokens are verified: floor(x / cost) per sequence, with the largest
    x for which there are enough rows. The remaining rows go to the next token of some sequences,
    starting at a different one each turn.

    Args:
        wanted: int32 [B], length of each draft.
        quality: int32 [B], `DraftText.quality` of each sequence.
        extra: number of rows for draft tokens.
    """
    cost = COST_FACTOR * (COST_TOP - quality)
    reach = 0
    for bit in reversed(range(REACH_BITS)):
        if int(torch.minimum(wanted, (reach + 2**bit) // cost).sum()) <= extra:
            reach += 2**bit
    drafted = torch.minimum(wanted, reach // cost)
    following = torch.minimum(wanted, (reach + 1) // cost) > drafted
    if reach == 2**REACH_BITS - 1:
        return drafted  # The next tokens are too unlikely.
    order = (following.cumsum(0) - 1 + turn) % following.sum().clamp(min=1)
    return drafted + (following & (order < extra - drafted.sum()))


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
    """Record the accepted tokens of a forward, and advance or end each sequence.

    Also extends draft_text and updates its quality. Takes tokens, int64 [R], and their logprobs and
    lse, float32 [R]; an lse that is not finite means that no token was sampled.
    """
    if (kernels := kernels_of(rows)) is not None:
        kernels.take_verified(
            state, draft_text, drafts, inputs, rows, tokens, logprobs, lse, out, width
        )
        return
    batch = len(rows)
    position = state.position[rows].long()
    ahead = torch.arange(width, device=rows.device)
    # Gather rows into [B, Q]; unused entries read an arbitrary row.
    places = (inputs.first[:, None] + ahead).clamp(max=len(tokens) - 1)
    drawn, finite = tokens[places].int(), torch.isfinite(lse[places])
    # Accept tokens up to the first that ends the sequence or differs from the draft.
    ends = _ends(state, rows[:, None], drawn, position[:, None] + 1 + ahead, finite)
    guesses = torch.nn.functional.pad(drafts.tokens, (0, 1), value=NOT_DRAWN)[:, :width]
    goes_on = (drawn == guesses) & ~ends & (ahead + 1 < inputs.queries[:, None])
    counts = 1 + goes_on.int().cumprod(1).sum(1)
    counts = torch.where(inputs.queries > 0, counts, 0)
    # Outputs for the host.
    at, taken = int(out.count), ahead < counts[:, None]
    out.tokens[at, : batch * width] = torch.where(
        taken, torch.where(finite, drawn, BROKEN), NOT_DRAWN
    ).flatten()
    out.logprobs[at, : batch * width] = torch.where(taken, logprobs[places], 0.0).flatten()
    hit = (drawn[:, 0] == drafts.tokens[:, 0]) & (drafts.counts > 0)
    offers = Offers(
        drafted=inputs.queries - 1, source=drafts.sources, hit=hit, offered=drafts.counts > 0
    )
    out.offers[at, :batch] = torch.where(counts > 0, offers.packed(), 0).int()
    out.count.add_(1)
    # Update the sequences: text, last token, position, active flag and draft quality.
    live = counts > 0
    slots, last = rows[live], (counts[live] - 1)[:, None]
    extend(draft_text, rows[live], position[live], drawn[live].long(), counts[live])
    state.token[slots] = drawn[live].gather(1, last).squeeze(1)
    state.position[slots] += counts[live].int()
    state.active[slots] = (~ends[live].gather(1, last).squeeze(1)).int()
    before = draft_text.quality[slots]
    after = before + ((QUALITY_ONE * hit[live] - before) >> QUALITY_SHIFT)
    draft_text.quality[slots] = torch.where(drafts.counts[live] > 0, after, before).int()
