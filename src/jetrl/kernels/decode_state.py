"""Device records of decode: sequences, inputs and outputs of a forward, and drafts.

Stop token ids and length limits are on the device, so no forward waits for the host.
`rollout.stopping` has the complete stop rule.

A draft proposes the next tokens of a sequence: an n-gram table maps its last tokens to an earlier
occurrence, and the tokens that followed there are the draft. Stale entries, write races and hits in
another prompt's text reduce acceptance but change no bit of the output. The text is a flat array of
token ids: one row of `width` tokens per slot, then the archive of completions, each followed by
UNKNOWN.

Legend: S slots, W pages per table, B sequences per forward, R rows per forward, K forwards per
`Drawn`, Q maximum queries per sequence, N tokens of text, E entries per table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NOT_DRAWN = -1  # in `Drawn.tokens`: the sequence had already ended
BROKEN = -2  # in `Drawn.tokens`: the softmax of the logits is not finite
MAX_STOP_IDS = 256
MAX_ROWS = 4096  # rows per forward on a GPU, since one program handles the outputs of all rows


@dataclass(frozen=True)
class DecodeState:
    """Running sequences on the device, each in a slot that it keeps until it ends.

    Attributes:
        token: int32 [S], last sampled token; its key and value are not in the cache yet.
        position: int32 [S], position of that token.
        limit: int32 [S], position of the last token to sample.
        key: int64 [S], random-number key of the sequence.
        active: int32 [S], 1 for a running sequence, 0 for a free slot or a finished sequence.
        tables: int32 [S, W], KV pages of the sequence, ordered by position.
        seed: int64 [S], random seed of the sequence.
        offset: int32 [S], rotary position of a token minus its position.
        stops: int32 [1 + MAX_STOP_IDS], number of stop ids, then the ids.
    """

    token: Tensor
    position: Tensor
    limit: Tensor
    key: Tensor
    active: Tensor
    tables: Tensor
    seed: Tensor
    offset: Tensor
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
            seed=zeros(slots, dtype=torch.int64),
            offset=zeros(slots),
            stops=zeros(1 + MAX_STOP_IDS),
        )


@dataclass(frozen=True)
class DecodeInputs:
    """Inputs of model, cache and sampler for one decode forward.

    Rows of inactive sequences have length 0, slot -1 and bits -1, and change nothing.

    Attributes:
        token_ids: int64 [B].
        positions: int64 [B], rotary positions of the tokens.
        slots: int64 [B], cache slots of the new keys and values: page * page_size + offset.
        lengths: int32 [B], number of keys that the query attends to.
        bits: int64 [B], random bits of the sample (`kernels.sampling.random_bits`).
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    bits: Tensor


@dataclass(frozen=True)
class Drawn:
    """Sampled tokens of up to K forwards, copied to the host together.

    Attributes:
        tokens: int32 [K, B], token ids, NOT_DRAWN or BROKEN.
        logprobs: float32 [K, B].
        count: int32 [1], number of forwards so far, which is the row that the next one writes.
    """

    tokens: Tensor
    logprobs: Tensor
    count: Tensor


MAX_DRAFT = 7  # maximum draft length: a forward verifies up to 8 tokens per sequence
MAX_QUERIES = MAX_DRAFT + 1
# Draft quality of a sequence: 256 times the acceptance rate of first draft tokens, a moving average
# that decays by 1/8 per draft. A new sequence starts at an acceptance rate of 3/4.
QUALITY_ONE, QUALITY_SHIFT, FIRST_QUALITY = 256, 3, 192
# A forward has a fixed number of rows for draft tokens; they go to the tokens most likely to be
# accepted. Each sequence gets floor(x / cost) rows, with the same x for all sequences and a cost
# that grows with its rejection rate: 16 for the best drafts, 528 for the worst. So x, at most
# 2**REACH_BITS - 1, bounds how unlikely a token may be; the worst sequence gets at most 3 rows.
COST_FACTOR, COST_TOP, REACH_BITS = 2, 264, 11
# n-gram lengths, in lookup order: longer matches give better drafts.
ORDERS = (3, 2)
# An n-gram enters the table once LAG tokens after it are known. So a sequence never matches its own
# end, and a forward, which adds at most LAG tokens, never hashes tokens that it has just sampled.
LAG = MAX_QUERIES
UNKNOWN = -1  # no token (in the text) or no entry (in a table)
# Multiplicative n-gram hash: an odd number near 2**64 divided by the golden ratio, as int64. The
# shift drops the low bits of the product, which depend on few bits of the factors.
HASH_FACTOR = -7046029254386353131
HASH_SHIFT = 20
# Draft sources: the sequence's own text, another running sequence with the same prompt, a finished
# completion of the same prompt, or the draft head (`models.draft_head`).
SOURCES = ("self", "siblings", "earlier", "head")
HEAD = SOURCES.index("head")


@dataclass(frozen=True)
class DraftText:
    """Text that drafts are copied from, and n-gram tables that index it.

    Attributes:
        text: int32 [N], token ids or UNKNOWN: one row per slot, then the archive.
        tables: int32 [len(ORDERS), E], index in `text` of the last token of an n-gram, keyed by a
            hash of prompt group and n-gram; E is a power of two.
        group: int64 [S], prompt key of each slot: drafts come only from the same prompt.
        quality: int32 [S], recent acceptance rate of first draft tokens, 0 to QUALITY_ONE, which
            sets how the sequences share the rows of a forward.
        width: length of a slot row, which ends with an extra UNKNOWN.
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
        """Return empty text for sequences of at most `width` tokens."""
        assert entries & (entries - 1) == 0, f"{entries} entries are not a power of two"
        # Each row ends with an extra UNKNOWN, so that no draft runs into the next row; the first
        # entry of the archive does the same for the last row.
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
        """Index in `text` of the first token of the archive."""
        return self.slots * self.width + 1


@dataclass(frozen=True)
class Drafts:
    """The drafts of a forward, one per sequence.

    Attributes:
        tokens: int32 [B, MAX_DRAFT], token ids; arbitrary past the end of a draft.
        counts: int32 [B], length of each draft, 0 for none.
        sources: int32 [B], index of the draft source in SOURCES.
    """

    tokens: Tensor
    counts: Tensor
    sources: Tensor


@dataclass(frozen=True)
class VerifyInputs:
    """Inputs of model, cache and sampler for a forward that verifies drafts.

    An active sequence has 1 to Q queries in consecutive rows: its last token, then draft tokens.
    Active sequences follow each other without gaps; the remaining rows are padding with slot -1 and
    bits -1, and change nothing. If Q is 1, each sequence has one row, which is padding if inactive.

    Attributes:
        token_ids: int64 [R].
        positions: int64 [R], rotary positions of the tokens.
        slots: int64 [R], cache slots of keys and values: page * page_size + offset.
        bits: int64 [R], random bits of the sample at each position.
        keys: int32 [R], number of keys that the last query of the same sequence attends to; 0 for
            padding.
        lengths: int32 [B], the same number per sequence; 0 if inactive.
        queries: int32 [B], number of queries per sequence, 0 to Q.
        first: int32 [B], row of the first query of each sequence.
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
class Offers:
    """Drafts as the host counts them: integers, one entry per forward and sequence.

    Attributes:
        drafted: Number of draft tokens verified.
        source: Index in SOURCES.
        hit: 1 if the first draft token was sampled.
        offered: 1 if there was a draft, verified or not.
    """

    drafted: Tensor
    source: Tensor
    hit: Tensor
    offered: Tensor

    def packed(self) -> Tensor:
        """Return the entries as in `Verified.offers`; the kernels write the same bits."""
        return self.drafted + 8 * self.source + 32 * self.hit + 64 * self.offered

    @staticmethod
    def unpacked(packed: Tensor) -> Offers:
        return Offers(
            drafted=packed & 7,
            source=(packed >> 3) & 3,
            hit=(packed >> 5) & 1,
            offered=(packed >> 6) & 1,
        )


@dataclass(frozen=True)
class Verified:
    """Accepted tokens of up to K forwards that verified drafts, copied to the host together.

    A forward writes the first B * Q (or B) entries of its row.

    Attributes:
        tokens: int32 [K, at least B * Q], Q per sequence: accepted token ids, then NOT_DRAWN;
            BROKEN if the softmax of the logits is not finite.
        logprobs: float32, same shape.
        offers: int32 [K, at least B], packed `Offers`.
        count: int32 [1], number of forwards so far, which is the row that the next one writes.
    """

    tokens: Tensor
    logprobs: Tensor
    offers: Tensor
    count: Tensor
