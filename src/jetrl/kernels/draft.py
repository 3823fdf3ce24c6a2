"""Drafts from text: the tokens that followed earlier occurrences of a sequence's last tokens.

The last three tokens, or else two, are looked up in a table of n-grams of the same prompt: the
sequence's own text, that of the prompt's other samples, and completions of earlier calls.

    drafts = propose(draft_text, state, rows)         before a forward
    extend(draft_text, ...)                           with the draws of a forward
    remember(draft_text, places, tokens, groups)      with text from the host

No step needs to be exact, since every token of a draft is drawn again (`kernels.decode`). Legend:
as in `kernels.decode_state`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.backend import kernels_of
from jetrl.kernels.decode_state import (
    HASH_FACTOR,
    HASH_SHIFT,
    LAG,
    MAX_DRAFT,
    ORDERS,
    UNKNOWN,
    DecodeState,
    Drafts,
    DraftText,
)


def propose(
    draft_text: DraftText, state: DecodeState, rows: Tensor, longest_only: bool = False
) -> Drafts:
    """Return a draft for the sequence of each row, whose slots are rows, int64 [B].

    Args:
        longest_only: whether only the longest n-grams lead to a draft.
    """
    if (kernels := kernels_of(rows)) is not None:
        return kernels.propose(draft_text, state, rows, longest_only)
    text, width = draft_text.text, draft_text.width
    own = rows * width
    end = own + torch.where(state.active[rows] > 0, state.position[rows], 0).long()
    place = torch.full_like(rows, UNKNOWN)
    for table, order in zip(draft_text.tables, ORDERS, strict=True):
        if longest_only and order != ORDERS[0]:
            continue
        enough = (state.active[rows] > 0) & (state.position[rows] >= order - 1)
        last = torch.where(enough, end, order - 1)
        entry = table[ngram_entry(draft_text, draft_text.group[rows], last, order)].long()
        # What stands there must still be the n-gram: places are written again, hashes collide.
        same = enough & (entry >= order - 1) & (entry != last)
        for back in range(order):
            same &= text[(entry - back).clamp(min=0)] == text[last - back]
        place = torch.where((place == UNKNOWN) & same, entry, place)
    after = place[:, None] + torch.arange(1, MAX_DRAFT + 1)
    tokens = torch.where(
        (place[:, None] >= 0) & (after < len(text)), text[after.clamp(0, len(text) - 1)], UNKNOWN
    )
    counts = (tokens >= 0).int().cumprod(1).sum(1)
    sources = torch.where(place >= draft_text.slots * width, 2, ((place // width) != rows).long())
    return Drafts(tokens, counts.int(), torch.where(place >= 0, sources, 0).int())


def ngram_entry(draft_text: DraftText, groups: Tensor, last: Tensor, order: int) -> Tensor:
    """Return table entries, int64 [M], of n-grams of `order` tokens.

    Args:
        groups: int64 [M], the prompts' keys.
        last: int64 [M], the place of each n-gram's last token.
    """
    hashed = groups
    for back in range(order):
        hashed = (hashed ^ draft_text.text[last - back].long()) * HASH_FACTOR
        hashed = hashed ^ (hashed >> 32)
    return (hashed >> HASH_SHIFT) & (draft_text.tables.shape[1] - 1)


def extend(
    draft_text: DraftText, rows: Tensor, position: Tensor, tokens: Tensor, counts: Tensor
) -> None:
    """Append the tokens that a forward drew to their sequences' text, and learn older n-grams.

    Args:
        position: int64 [B], the position of each sequence's last token before the forward.
        tokens: int64 [B, Q], the tokens drawn.
        counts: int64 [B], how many of them count, 0 for a row that is not active.
    """
    base, ahead = rows * draft_text.width, torch.arange(tokens.shape[1])
    new = ahead < counts[:, None]
    places = (base + position + 1)[:, None] + ahead
    draft_text.text[places[new]] = tokens[new].int()
    # Each new token completes what follows the n-gram that ends LAG tokens before it.
    ends = (position + 1 - LAG)[:, None] + ahead
    groups = draft_text.group[rows][:, None].expand_as(ends)
    for table, order in zip(draft_text.tables, ORDERS, strict=True):
        known = new & (ends >= order - 1)
        last = (base[:, None] + ends)[known]
        table[ngram_entry(draft_text, groups[known], last, order)] = last.int()


def remember(
    draft_text: DraftText, places: Tensor, tokens: Tensor, groups: Tensor, lag: int
) -> None:
    """Write text from the host and learn its n-grams, with torch on every device.

    Args:
        places: int64 [M], the place of each token; pieces of text are consecutive places.
        tokens: int64 [M], token ids, and UNKNOWN for the end of a piece.
        groups: int64 [M], the key of the prompt that each token belongs to.
        lag: tokens that must follow an n-gram: LAG for a sequence that `extend` continues, 1 for a
            completion that has ended.
    """
    draft_text.text[places] = tokens.int()
    for table, order in zip(draft_text.tables, ORDERS, strict=True):
        window = order + lag
        if len(places) < window:
            continue
        # An n-gram and what follows it have to be one piece of this text.
        first, end = slice(0, len(places) - window + 1), slice(window - 1, len(places))
        known = (tokens.unfold(0, window, 1) >= 0).all(1)
        known &= (places[end] - places[first] == window - 1) & (groups[end] == groups[first])
        last = places[first] + order - 1
        entry = ngram_entry(draft_text, groups[first], last, order)
        # The others go to one entry as UNKNOWN, so that nothing waits for their number.
        table[torch.where(known, entry, 0)] = torch.where(known, last, UNKNOWN).int()
