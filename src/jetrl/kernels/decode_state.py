"""The records of decode on the device: sequences, a forward's inputs and draws, and drafts.

The device keeps the stop token ids and each sequence's last position, which end a sequence, so no
forward waits for the host. `rollout.stopping` has the whole rule.

A draft guesses a sequence's next tokens: an n-gram table leads from its last tokens to the same
tokens in earlier text, and the draft is the text that follows there. A stale table, a race of two
writers or another prompt's text costs speed but changes no bit. The text is one line of token ids:
a row of `width` tokens per slot, then the archive, completions one after the other, each followed
by UNKNOWN.

Legend: S slots, W pages per table, B sequences of a forward, R its rows, K forwards whose draws a
`Drawn` holds, Q queries per sequence at most, N tokens of all text, E entries of a table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NOT_DRAWN = -1  # in `Drawn.tokens`: the sequence had ended before this forward
BROKEN = -2  # in `Drawn.tokens`: the logits have no finite softmax
MAX_STOP_IDS = 256
MAX_ROWS = 4096  # of a forward on a GPU: a single program reads the draws of all rows


@dataclass(frozen=True)
class DecodeState:
    """The running sequences on the device, each in a slot that it keeps until it ends.

    Attributes:
        token: int32 [S], the last token drawn, whose key and value are not yet in the cache.
        position: int32 [S], the position of that token in its sequence.
        limit: int32 [S], the position of the last token that may be drawn.
        key: int64 [S], the sequence's key of random numbers.
        active: int32 [S], 1 while the sequence runs, 0 in a free slot or once it has ended.
        tables: int32 [S, W], the sequence's KV pages in order of position.
        seed: int64 [1], the seed of the call's random numbers.
        stops: int32 [1 + MAX_STOP_IDS], the number of stop ids, then the ids.
    """

    token: Tensor
    position: Tensor
    limit: Tensor
    key: Tensor
    active: Tensor
    tables: Tensor
    seed: Tensor
    stops: Tensor

    @staticmethod
    def empty(slots: int, width: int, device: torch.device) -> DecodeState:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return DecodeState(
            token=zeros(slots),
            position=zeros(slots),
            limit=zeros(slots),
            key=zeros(slots, dtype=torch.int64),
            active=zeros(slots),
            tables=zeros(slots, width),
            seed=zeros(1, dtype=torch.int64),
            stops=zeros(1 + MAX_STOP_IDS),
        )


@dataclass(frozen=True)
class DecodeInputs:
    """The inputs of model, cache and sampler in one forward of decode.

    A row whose sequence is not active has length 0, slot -1 and bits -1, and changes nothing.

    Attributes:
        token_ids: int64 [B], like positions.
        slots: int64 [B], the places of new keys and values in the cache: page * page_size + offset.
        lengths: int32 [B], the number of keys that the row's query sees.
        bits: int64 [B], the random bits of the draw (`kernels.sampling.random_bits`).
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    bits: Tensor


@dataclass(frozen=True)
class Drawn:
    """The draws of up to K forwards, which the host reads together.

    Attributes:
        tokens: int32 [K, B], token ids, NOT_DRAWN or BROKEN.
        logprobs: float32 [K, B].
        count: int32 [1], the forwards so far: the row that the next one writes.
    """

    tokens: Tensor
    logprobs: Tensor
    count: Tensor


MAX_DRAFT = 7  # tokens of a draft at most: a forward verifies up to 8 tokens of a sequence
MAX_QUERIES = MAX_DRAFT + 1
# How good a sequence's drafts are: 256 times the share of them whose first token was right, a mean
# that forgets an eighth with each draft. Sequences begin as if three in four were right.
QUALITY_ONE, QUALITY_SHIFT, FIRST_QUALITY = 256, 3, 192
# A forward has a number of rows for drafts, which go to the tokens that are most likely right. A
# sequence has floor(x / cost) of them, with one x for all sequences and a cost that grows
# with the share of drafts that are wrong: 16 for the best, 528 for the worst. So x, at most
# 2**REACH_BITS - 1, says how unlikely a token may be; a sequence whose drafts are wrong gets 3.
COST_FACTOR, COST_TOP, REACH_BITS = 2, 264, 11
# The lengths of n-grams, in the order in which they are looked up: longer ones are better guesses.
ORDERS = (3, 2)
# An n-gram enters the table when so many tokens behind it are known. So a sequence does not find
# its own end, and a forward, which adds at most as many tokens, hashes none that it has just drawn.
LAG = MAX_QUERIES
UNKNOWN = -1  # in the text: no token; in a table: no place
# An n-gram's hash: products by an odd number near 2**64 divided by the golden ratio, as a signed
# integer. The lowest bits of a product depend on few bits of its factors.
HASH_FACTOR = -7046029254386353131
HASH_SHIFT = 20
# Where a draft came from: the sequence's own text, that of another running sequence with the same
# prompt, a completion of the same prompt that had ended, or the draft head (`models.draft_head`).
SOURCES = ("self", "siblings", "earlier", "head")
HEAD = SOURCES.index("head")


@dataclass(frozen=True)
class DraftText:
    """The text that drafts come from, with the n-gram tables that lead into it.

    Attributes:
        text: int32 [N], token ids or UNKNOWN: the rows of the slots, then the archive.
        tables: int32 [number of ORDERS, E], for the hash of a group and its n-gram the place in
            `text` of the n-gram's last token; E is a power of two.
        group: int64 [S], the key of each slot's prompt: drafts come only from the same prompt.
        quality: int32 [S], how often the first tokens of a sequence's last drafts were right, from
            0 to QUALITY_ONE, by which sequences share the rows of a forward.
        width: tokens of a slot's row.
    """

    text: Tensor
    tables: Tensor
    group: Tensor
    quality: Tensor
    width: int

    @staticmethod
    def empty(
        slots: int, width: int, archive: int, entries: int, device: torch.device
    ) -> DraftText:
        """Return a text without tokens, for sequences of at most `width` tokens."""
        assert entries & (entries - 1) == 0, f"{entries} entries are no power of two"
        # One place more: the last token of a row is UNKNOWN, which ends a draft before the next
        # row, as the first place of the archive ends that of the last one.
        size = slots * (width + 1) + 1 + archive

        def filled(*shape: int, value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return DraftText(
            text=filled(size, value=UNKNOWN),
            tables=filled(len(ORDERS), entries, value=UNKNOWN),
            group=filled(slots, value=0, dtype=torch.int64),
            quality=filled(slots, value=FIRST_QUALITY),
            width=width + 1,
        )

    @property
    def slots(self) -> int:
        return len(self.group)

    @property
    def archive_start(self) -> int:
        """The place of the archive's first token in `text`."""
        return self.slots * self.width + 1


@dataclass(frozen=True)
class Drafts:
    """A draft for each sequence of a forward.

    Attributes:
        tokens: int32 [B, MAX_DRAFT], token ids; arbitrary past a draft's end.
        counts: int32 [B], the tokens of each draft, 0 for none.
        sources: int32 [B], the index of the draft's source in SOURCES.
    """

    tokens: Tensor
    counts: Tensor
    sources: Tensor


@dataclass(frozen=True)
class VerifyInputs:
    """The inputs of model, cache and sampler in a forward that verifies drafts.

    An active sequence has 1 to Q queries in consecutive rows, its last token and tokens of its
    draft, and the next active sequence follows. The other rows are padding, with slot -1 and
    bits -1, and change nothing. If Q is 1 each sequence has a row; that of an inactive one is
    padding.

    Attributes:
        token_ids: int64 [R], like positions.
        slots: int64 [R], the places of keys and values in the cache: page * page_size + offset.
        bits: int64 [R], the random bits of each position's draw.
        keys: int32 [R], the number of keys that the last query of the row's sequence sees; 0 for
            padding.
        lengths: int32 [B], the same for each sequence; 0 if not active.
        queries: int32 [B], the number of its queries, from 0 to Q.
        first: int32 [B], the row of its first query.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    bits: Tensor
    keys: Tensor
    lengths: Tensor
    queries: Tensor
    first: Tensor


@dataclass(frozen=True)
class Verified:
    """The draws of up to K forwards that verified drafts, which the host reads together.

    A forward writes the first B * Q, or B, entries of its line.

    Attributes:
        tokens: int32 [K, at least B * Q], token ids, Q of each sequence: those that count, then
            NOT_DRAWN; BROKEN for a draw whose logits have no finite softmax.
        logprobs: float32, of the same shape.
        offers: int32 [K, at least B], drafted + 8 * source + 32 * hit + 64 * offered: draft tokens
            verified, the draft's index in SOURCES, whether its first token was drawn, and whether
            there was a draft, verified or not.
        count: int32 [1], the forwards so far: the line that the next one writes.
    """

    tokens: Tensor
    logprobs: Tensor
    offers: Tensor
    count: Tensor
