"""Decode several tokens a forward: drafts are verified by drawing every token with its own bits.

A forward takes a sequence's last token and a draft of up to Q - 1 tokens behind it, Q queries, and
draws at every position with that position's own random bits. A draw is right as long as the tokens
before it are: the draws count while each equals the draft's token at its position, and the first
that differs counts too, since it was drawn from the right logits. So the sequence is the one that
decode of one token a forward gives, bit for bit, whatever the draft says. A forward brings 1 to Q
tokens. Keys and values of drafted tokens that were wrong are overwritten, since the next forward
begins at their position.

    drafts = propose(draft_text, state, rows)                           kernels.draft
    inputs = verify_inputs(state, draft_text, drafts, rows, page_size, Q)
    tokens, logprobs, lse = ...                                         the model and Q * B draws
    take_verified(state, draft_text, drafts, inputs, rows, tokens, logprobs, lse, out)

As in `kernels.decode`, nothing is read that is not on the device, and the rule by which a sequence
ends is the same, applied draw by draw.

Legend: S slots, B rows, Q queries of a row, K forwards that a `Verified` holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.kernels.decode_state import BROKEN, NOT_DRAWN, DecodeState
from jetrl.kernels.draft import extend
from jetrl.kernels.draft_state import (
    LEAST_BUDGET,
    MAX_DRAFT,
    Drafts,
    DraftText,
    VerifyInputs,
)
from jetrl.kernels.sampling import random_bits


@dataclass(frozen=True)
class Verified:
    """The draws of up to K forwards that verified drafts, which the host reads together.

    A forward of B rows and Q queries writes the first B * Q, or B, entries of its line.

    Attributes:
        tokens: int32 [K, at least B * Q], token ids, row after row: those that count, then
            NOT_DRAWN; BROKEN for a draw whose logits have no finite softmax.
        logprobs: float32, of the same shape.
        offers: int32 [K, at least B], of each row
            drafted + 8 * source + 32 * hit + 64 * offered: the drafted tokens that were verified,
            the draft's index in SOURCES, whether its first token was drawn, and whether there was
            a draft, verified or not.
        count: int32 [1], the number of forwards taken in so far: the line that the next one writes.
    """

    tokens: Tensor
    logprobs: Tensor
    offers: Tensor
    count: Tensor


def verify_inputs(
    state: DecodeState,
    draft_text: DraftText,
    drafts: Drafts,
    rows: Tensor,
    page_size: int,
    width: int,
) -> VerifyInputs:
    """Return what the next forward of some rows reads: last tokens, and drafts behind them.

    A draft is cut to the width, to the sequence's budget and to its last position.

    Args:
        state: the running sequences.
        draft_text: the text, whose budgets are read.
        drafts: a draft for each row.
        rows: int64 [B], the slot of each row.
        page_size: tokens of a KV page.
        width: the queries of a row, Q, at most MAX_QUERIES.
    """
    if rows.is_cuda:
        from jetrl.kernels.decode_verify_hopper import verify_inputs as verify_inputs_hopper

        return verify_inputs_hopper(state, draft_text, drafts, rows, page_size, width)
    active = state.active[rows] > 0
    position = torch.where(active, state.position[rows], 0).long()
    # The query of position p draws the token of position p + 1, which may be the limit at most.
    most = torch.minimum(draft_text.budget[rows], state.limit[rows] - 1 - position)
    queries = 1 + torch.minimum(drafts.counts, most).clamp(0, width - 1)
    queries = torch.where(active, queries, 0)
    ahead = torch.arange(width)
    used = ahead < queries[:, None]
    positions = torch.where(used, position[:, None] + ahead, 0)
    tokens = torch.cat([state.token[rows][:, None], drafts.tokens[:, : width - 1]], dim=1)
    page = state.tables[rows[:, None], positions // page_size].long()
    bits = random_bits(
        state.seed.expand(positions.numel()).numpy(),
        state.key[rows].repeat_interleave(width).numpy(),
        (positions + 1).flatten().numpy(),
    )
    return VerifyInputs(
        token_ids=torch.where(used, tokens, 0).long().flatten(),
        positions=positions.flatten(),
        slots=torch.where(used, page * page_size + positions % page_size, -1).flatten(),
        bits=torch.where(used.flatten(), torch.from_numpy(bits), -1),
        lengths=torch.where(active, position + queries, 0).int(),
        queries=queries.int(),
    )


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
) -> None:
    """Record the draws of a forward that count, and move each sequence on by as many or end it.

    Args:
        state: the running sequences, changed in place.
        draft_text: the text, which grows by the draws, and the budgets of the next drafts.
        drafts: the drafts that the forward verified.
        inputs: what the forward read.
        rows: int64 [B], the slot of each row.
        tokens: int64 [B * Q], the tokens drawn.
        logprobs: float32 [B * Q], their log-probs.
        lse: float32 [B * Q], the log-sum-exp of each draw's logits, not finite where there was no
            draw.
        out: where the draws are written: the line of its count, which moves on.
    """
    if rows.is_cuda:
        from jetrl.kernels.decode_verify_hopper import take_verified as take_verified_hopper

        take_verified_hopper(state, draft_text, drafts, inputs, rows, tokens, logprobs, lse, out)
        return
    batch = len(rows)
    width = len(tokens) // batch
    drawn, finite = tokens.view(batch, width).int(), torch.isfinite(lse).view(batch, width)
    position, ahead = state.position[rows].long(), torch.arange(width)
    # Which draws end the sequence; and up to which one all tokens before it were drawn.
    ends = torch.isin(drawn, state.stops[1 : 1 + int(state.stops[0])]) | ~finite
    ends |= position[:, None] + 1 + ahead >= state.limit[rows][:, None]
    guesses = torch.nn.functional.pad(drafts.tokens, (0, 1), value=NOT_DRAWN)[:, :width]
    goes_on = (drawn == guesses) & ~ends & (ahead + 1 < inputs.queries[:, None])
    counts = 1 + goes_on.int().cumprod(1).sum(1)
    counts = torch.where(inputs.queries > 0, counts, 0)
    # For the host.
    at, taken = int(out.count), ahead < counts[:, None]
    out.tokens[at, : batch * width] = torch.where(
        taken, torch.where(finite, drawn, BROKEN), NOT_DRAWN
    ).flatten()
    out.logprobs[at, : batch * width] = torch.where(
        taken, logprobs.view(batch, width), 0.0
    ).flatten()
    hit = (drawn[:, 0] == drafts.tokens[:, 0]) & (drafts.counts > 0)
    offer = inputs.queries - 1 + 8 * drafts.sources + 32 * hit + 64 * (drafts.counts > 0)
    out.offers[at, :batch] = torch.where(counts > 0, offer, 0).int()
    out.count.add_(1)
    # The sequences: their text, their last tokens, whether they go on, and how far to guess.
    live = counts > 0
    slots, last = rows[live], (counts[live] - 1)[:, None]
    extend(draft_text, rows[live], position[live], drawn[live].long(), counts[live])
    state.token[slots] = drawn[live].gather(1, last).squeeze(1)
    state.position[slots] += counts[live].int()
    state.active[slots] = (~ends[live].gather(1, last).squeeze(1)).int()
    offered, right = inputs.queries[live] - 1, counts[live] - 1
    before = draft_text.budget[slots]
    after = torch.where(right == 0, before - 1, torch.where(right > 1, MAX_DRAFT, before))
    after = torch.where(offered > 0, after.clamp(min=LEAST_BUDGET), before)
    draft_text.budget[slots] = after
