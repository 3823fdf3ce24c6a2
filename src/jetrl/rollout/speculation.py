"""Speculation: drafts of a sequence's next tokens, from earlier text or from a draft head.

`Speculation` owns the text of drafts (`kernels.draft`) for the life of an engine, so that a step's
completions serve as drafts for the same prompts later. Checkpoints leave it out: drafts change no
token. With both sources, a sequence takes the text's draft if its last three tokens lead to one,
and else the head's.

The host adds a sequence's tokens when it gets a slot and a completion when it has ended; in between
the device adds its own draws. The number of verified tokens is one choice for the batch
(`draft_widths`); a sequence's share follows from its right drafts (`DraftText.quality`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from jetrl.kernels.decode_state import (
    FIRST_QUALITY,
    HEAD,
    LAG,
    MAX_DRAFT,
    MAX_QUERIES,
    SOURCES,
    UNKNOWN,
    DecodeState,
    Drafts,
    DraftText,
    VerifyInputs,
)
from jetrl.kernels.draft import propose, remember
from jetrl.memory.pages import CPU_ARCHIVE, GPU_ARCHIVE
from jetrl.models.draft_head import DraftHead
from jetrl.rollout.draft_widths import DraftWidths, Seen, Width
from jetrl.rollout.launched_step import LaunchedStep, to_device
from jetrl.rollout.options import SpeculationStats
from jetrl.rollout.sequence import RunningSequence
from jetrl.rollout.sizes import padded_batch
from jetrl.types import PromptInputs


class HeadDrafts:
    """Drafts from a draft head (`models.draft_head`), all on the device.

    The head guesses from the hidden state of a sequence's last draw, which every forward of decode
    keeps per slot. A sequence's first forward goes without the head.
    """

    def __init__(self, head: DraftHead, slots: int) -> None:
        self.head = head
        device = head.policy.device
        size = head.policy.config.hidden_size
        # [S, D], the hidden state that each sequence's last token was drawn from; int32 [S], 1
        # where there is one; and int32 [1], 1 once the head has learned anything.
        self._hidden = torch.zeros(slots, size, dtype=head.policy.weights.dtype, device=device)
        self._ready = torch.zeros(slots, dtype=torch.int32, device=device)
        self._on = torch.zeros(1, dtype=torch.int32, device=device)

    def begin(self) -> None:
        """Begin a call, in which no sequence has a hidden state yet."""
        self._ready.zero_()
        self._on.fill_(int(self.head.trained))

    def arrive(self, slots: Tensor) -> None:
        """Forget the hidden states of slots, int64 [N], that new sequences have got."""
        self._ready[slots] = 0

    def propose(self, state: DecodeState, rows: Tensor, count: int, text: Drafts | None) -> Drafts:
        """Return a draft for each row of slots, int64 [B]: the text's, else `count` head tokens."""
        # A sequence that has ended may have ended without a token.
        last = state.token[rows].long().clamp(0, self.head.policy.config.vocab_size - 1)
        tokens = self.head.draft(self._hidden[rows], last, count)
        tokens = pad(tokens, (0, MAX_DRAFT - count), value=UNKNOWN)
        ready = self._ready[rows]
        if text is None:
            return Drafts(tokens, ready * count, torch.full_like(ready, HEAD))
        own = (text.counts == 0) & (ready > 0)
        return Drafts(
            torch.where(own[:, None], tokens, text.tokens),
            torch.where(own, count, text.counts),
            torch.where(own, HEAD, text.sources),
        )

    def keep(self, hidden: Tensor, inputs: VerifyInputs, state: DecodeState, rows: Tensor) -> None:
        """Keep the hidden states, of [R, D], that slots `rows`, int64 [B], drew from last."""
        # The query of the last token that counted; any row of a sequence that is not active.
        drawn = state.position[rows] - (inputs.lengths - inputs.queries)
        last = (inputs.first + drawn - 1).clamp(0, len(hidden) - 1).long()
        self._hidden.index_copy_(0, rows, hidden[last])
        self._ready.index_copy_(0, rows, (inputs.queries > 0).int() * self._on)


MODES = ("off", "text", "head", "auto")
_NONE = (0,) * len(SOURCES)
_NO_DRAFTS = SpeculationStats(0, 0, _NONE, _NONE, 0.0, 0.0)
_Piece = tuple[int, list[int], RunningSequence]  # A place in the text, tokens, and whose they are.


class Speculation:
    """The drafts of one engine, and the counts of the current call in `stats`.

    The modes "text" and "head" verify drafts of that source in every forward of decode, "auto"
    those of all sources if that is faster.
    """

    def __init__(
        self,
        mode: str,
        slots: int,
        max_model_len: int,
        device: torch.device,
        head: DraftHead | None = None,
    ) -> None:
        self._reads_text = mode != "head"
        archive = GPU_ARCHIVE if device.type == "cuda" else CPU_ARCHIVE
        archive = archive if self._reads_text else 1
        # One slot more, which never holds a sequence.
        self.text = DraftText.empty(slots + 1, max_model_len, archive, archive, device)
        rows = padded_batch(slots)
        tokens = torch.zeros(rows, MAX_DRAFT, dtype=torch.int32, device=device)
        counts = torch.zeros(rows, dtype=torch.int32, device=device)
        self._no = Drafts(tokens=tokens, counts=counts, sources=torch.zeros_like(counts))
        self.head = None if head is None or mode == "text" else HeadDrafts(head, slots + 1)
        most = MAX_QUERIES if head is None or self._reads_text else 1 + head.tokens
        self.widths = DraftWidths(mode != "auto", most)
        self._device = device
        self._ended: list[RunningSequence] = []
        self._written = 0  # Tokens of the archive, from its start, that the next text comes behind.
        self.stats = _NO_DRAFTS
        self._since_taken: SpeculationStats | None = None

    def begin(self) -> None:
        """Begin a call: its counts are zero."""
        if self.head is not None:
            self.head.begin()
            self.widths.worth.head_tokens = self.head.head.tokens if self.head.head.trained else 0
        self.widths.times.begin()
        self.stats = _NO_DRAFTS

    def end(self) -> SpeculationStats:
        """End a call that came to its end; return its counts."""
        self._since_taken = self.stats.plus(self._since_taken or _NO_DRAFTS)
        return self.stats

    def take(self) -> SpeculationStats | None:
        """Return the counts of the calls since the last one of this, None without calls."""
        taken, self._since_taken = self._since_taken, None
        return taken

    def arrive(self, arrivals: Sequence[tuple[int, RunningSequence]]) -> None:
        """Add the text of sequences that get a slot."""
        self.put_by()
        # What the slot's last sequence left behind says nothing of the new one.
        slots = to_device([slot for slot, _ in arrivals], self._device)
        self.text.quality[slots] = FIRST_QUALITY
        if self.head is not None:
            self.head.arrive(slots)
        if self._reads_text:
            pieces = [
                (
                    slot * self.text.width,
                    [*sequence.prompt.token_ids, *sequence.generated],
                    sequence,
                )
                for slot, sequence in arrivals
            ]
            self._remember(pieces, LAG)
            groups = [_prompt_key(sequence.prompt) for _, sequence in arrivals]
            self.text.group[slots] = to_device(groups, self._device)

    def choose(self, sequences: int) -> Width:
        """Return what each forward of the next step verifies."""
        if self.head is not None and not self._reads_text and not self.head.head.trained:
            return Width(1, padded_batch(sequences), drafts=False)
        return self.widths.choose(sequences)

    def drafts(self, state: DecodeState, rows: Tensor, verify: Width) -> Drafts:
        """Return a draft for each row of a forward, empty ones if none are looked up."""
        if verify.drafts:
            return self.propose(state, rows, verify.most)
        no, count = self._no, len(rows)
        return Drafts(no.tokens[:count], no.counts[:count], no.sources[:count])

    def propose(self, state: DecodeState, rows: Tensor, width: int) -> Drafts:
        """Return a draft for each row of slots, int64 [B], without waiting for the device.

        A sequence has at most `width` tokens in the forward; at 1 only the text is looked up.
        """
        # Next to a head only long matches of the text count.
        head = self.head
        text = propose(self.text, state, rows, longest_only=head is not None)
        if head is None or width == 1:
            return text
        count = min(head.head.tokens, width - 1)
        return head.propose(state, rows, count, text if self._reads_text else None)

    def ended(self, sequence: RunningSequence) -> None:
        """Keep the text of an ended sequence for drafts of the same prompt."""
        if self._reads_text:
            self._ended.append(sequence)

    def put_by(self) -> None:
        """Write ended completions to the archive, over the oldest; best while the device works."""
        room = len(self.text.text) - self.text.archive_start
        pieces: list[_Piece] = []
        for sequence in self._ended:
            # The prompt's last tokens lead to the first ones of the completion. An entry of
            # UNKNOWN ends the piece.
            text = [*sequence.prompt.token_ids[-2:], *sequence.generated]
            tokens = [*text[: room - 1], UNKNOWN]
            if self._written + len(tokens) > room:
                # Pieces of one call must not lie over each other.
                self._remember(pieces, 1)
                pieces, self._written = [], 0
            pieces.append((self.text.archive_start + self._written, tokens, sequence))
            self._written += len(tokens)
        self._ended.clear()
        self._remember(pieces, 1)

    def _remember(self, pieces: Sequence[_Piece], lag: int) -> None:
        """Write pieces of text, (place, tokens, sequence), and learn their n-grams."""
        if not pieces:
            return
        # All pieces in one copy to the device: places, tokens and their prompts' keys.
        ids = np.concatenate([np.array(text, dtype=np.int64) for _, text, _ in pieces])
        at = np.concatenate([np.arange(at, at + len(text)) for at, text, _ in pieces])
        counts = [len(text) for _, text, _ in pieces]
        keys = np.repeat([_prompt_key(sequence.prompt) for _, _, sequence in pieces], counts)
        device = self._device
        places, tokens, groups = (to_device(x.astype(np.int64), device) for x in (at, ids, keys))
        remember(self.text, places, tokens, groups, lag)

    def take_in(self, launched: LaunchedStep, seconds: float) -> None:
        """Count the result of a decode step, by which the next widths are chosen."""
        step, verify = launched.step, launched.verify
        assert launched.offers is not None, "a step without drafts"
        assert verify is not None, "a step of no size"
        # Draws and offers per forward and sequence; see `Verified.offers` for the bits.
        drawn = (launched.tokens.unflatten(1, (-1, step.width)).numpy() >= 0).sum(-1)
        offers = launched.offers.numpy()
        ran = drawn > 0
        drafted, source = offers & 7, (offers >> 3) & 3
        hit, offered = (offers >> 5) & 1, (offers >> 6) & 1
        of_source = [ran & (source == index) & (drafted > 0) for index in range(len(SOURCES))]
        count = SpeculationStats(
            sequence_forwards=int(ran.sum()),
            tokens=int(drawn.sum()),
            drafted=tuple(int(drafted[here].sum()) for here in of_source),
            accepted=tuple(int((drawn[here] - 1).sum()) for here in of_source),
            decode_s=seconds,
            verify_s=seconds if step.width > 1 else 0.0,
        )
        self.stats = self.stats.plus(count)
        seen = Seen(
            drawn=drawn[ran],
            drafted=drafted[ran],
            hit=hit[ran],
            offered=offered[ran],
            by_head=source[ran] == HEAD,
        )
        self.widths.observe(len(step.chunks), verify, step.repeats, seconds, seen)


@functools.lru_cache(maxsize=4096)
def _prompt_key(prompt: PromptInputs) -> int:
    """Return the key of a prompt as a 63-bit integer."""
    return int.from_bytes(prompt.key(size=8), "little") >> 1
