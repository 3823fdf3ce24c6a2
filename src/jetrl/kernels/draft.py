"""N-gram drafts: the tokens that followed an earlier occurrence of a sequence's last tokens.

The last three tokens, or else the last two, are looked up in a table of n-grams for the same
prompt: the sequence's own text, other samples of the prompt, and completions of earlier calls.

    drafts = propose(draft_text, state, rows)         before a forward
    extend(draft_text, ...)                           with the tokens of a forward
    remember(draft_text, places, tokens, groups)      with text from the host

No step needs to be exact, since every draft token is verified (`kernels.decode`). Legend:
`kernels.decode_state`.
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
    """Return one draft per sequence for the slots `rows`, int64 [B].

    Args:
        longest_only: use only the longest n-grams if True.
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
        # Compare the tokens: text may have been overwritten, and hashes collide.
        same = enough & (entry >= order - 1) & (entry != last)
        for back in range(order):
            same &= text[(entry - back).clamp(min=0)] == text[last - back]
        place = torch.where((place == UNKNOWN) & same, entry, place)
    after = place[:, None] + torch.arange(1, MAX_DRAFT + 1, device=rows.device)
    tokens = torch.where(
        (place[:, None] >= 0) & (after < len(text)), text[after.clamp(0, len(text) - 1)], UNKNOWN
    )
    counts = (tokens >= 0).int().cumprod(1).sum(1)
    sources = torch.where(place >= draft_text.slots * width, 2, ((place // width) != rows).long())
    return Drafts(tokens, counts.int(), torch.where(place >= 0, sources, 0).int())


def ngram_entry(draft_text: DraftText, groups: Tensor, last: Tensor, order: int) -> Tensor:
    """Return the table index of each n-gram of `order` tokens, int64 [M].

    Args:
        groups: int64 [M], prompt keys.
        last: int64 [M], index in the text of the last token of each n-gram.
    """
    hashed = groups
    for back in range(order):
        hashed = (hashed ^ draft_text.text[last - back].long()) * HASH_FACTOR
        hashed = hashed ^ (hashed >> 32)
    return (hashed >> HASH_SHIFT) & (draft_text.tables.shape[1] - 1)


def extend(
    draft_text: DraftText, rows: Tensor, position: Tensor, tokens: Tensor, counts: Tensor
) -> None:
    """Append sampled tokens to the text of their sequences, and insert n-grams of older tokens.

    Args:
        position: int64 [B], position of each sequence's last token before the forward.
        tokens: int64 [B, Q], sampled tokens.
        counts: int64 [B], number of accepted tokens, 0 for an inactive row.
    """
    base = rows * draft_text.width
    ahead = torch.arange(tokens.shape[1], device=rows.device)
    new = ahead < counts[:, None]
    places = (base + position + 1)[:, None] + ahead
    draft_text.text[places[new]] = tokens[new].int()
    # Each new token is the last of the LAG tokens that must follow an n-gram.
    ends = (position + 1 - LAG)[:, None] + ahead
    groups = draft_text.group[rows][:, None].expand_as(ends)
    for table, order in zip(draft_text.tables, ORDERS, strict=True):
        known = new & (ends >= order - 1)
        last = (base[:, None] + ends)[known]
        table[ngram_entry(draft_text, groups[known], last, order)] = last.int()


def remember(
    draft_text: DraftText, places: Tensor, tokens: Tensor, groups: Tensor, lag: int
) -> None:
    """Write text from the host and insert its n-grams, in PyTorch on every device.

    Args:
        places: int64 [M], index in the text of each token; a segment of text is contiguous.
        tokens: int64 [M], token ids; UNKNOWN ends a segment.
        groups: int64 [M], prompt key of each token.
        lag: number of tokens that must follow an n-gram: LAG for a sequence that `extend`
            continues, 1 for a finished completion.
    """
    draft_text.text[places] = tokens.int()
    for table, order in zip(draft_text.tables, ORDERS, strict=True):
        window = order + lag
        if len(places) < window:
            continue
        # An n-gram and the `lag` tokens after it must be in one segment.
        first, end = slice(0, len(places) - window + 1), slice(window - 1, len(places))
        known = (tokens.unfold(0, window, 1) >= 0).all(1)
        known &= (places[end] - places[first] == window - 1) & (groups[end] == groups[first])
        last = places[first] + order - 1
        entry = ngram_entry(draft_text, groups[first], last, order)
        # Other n-grams write UNKNOWN to entry 0, which avoids a host sync for their number.
        table[torch.where(known, entry, 0)] = torch.where(known, last, UNKNOWN).int()
