"""Speculative decoding: drafts of the next tokens, from earlier text or from a draft head.

`Speculation` keeps the draft text (`kernels.draft`) for the life of an engine, so that completions
serve as drafts for the same prompts in later steps. Checkpoints omit it, since drafts change no
token. With both sources, a sequence uses a draft from text if its last three tokens match an
n-gram, otherwise one from the head.

The host adds a sequence's tokens when it gets a slot, and completions when they end; in between,
the device adds the tokens that it samples. `draft_widths` chooses the number of verified tokens per
batch; each sequence gets a share by its acceptance rate (`DraftText.quality`).
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
    Offers,
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

    The head reads the hidden state from which a sequence's last token was drawn; each decode
    forward saves it per slot. The first forward of a sequence runs without the head.
    """

    def __init__(self, head: DraftHead, slots: int) -> None:
        self.head = head
        device = head.policy.device
        size = head.policy.config.hidden_size
        # Per slot: hidden state of the last sampled token, [S, D], and a valid flag, int32 [S].
        # `_on` is 1 once the head has been trained.
        self._hidden = torch.zeros(slots, size, dtype=head.policy.weights.dtype, device=device)
        self._ready = torch.zeros(slots, dtype=torch.int32, device=device)
        self._on = torch.zeros(1, dtype=torch.int32, device=device)

    def begin(self) -> None:
        """Begin a call; no sequence has a hidden state yet."""
        self._ready.zero_()
        self._on.fill_(int(self.head.trained))

    def reset(self, slots: Tensor) -> None:
        """Forget the hidden states of slots, int64 [N], which new sequences take."""
        self._ready[slots] = 0

    def propose(self, state: DecodeState, rows: Tensor, count: int, text: Drafts | None) -> Drafts:
        """Return a draft per row of slots, int64 [B]: from text, else `count` head tokens."""
        # A finished sequence may have no token.
        last = state.token[rows].long().clamp(0, self.head.policy.config.vocab_size - 1)
        tokens = self.head.draft(self._hidden[rows], last, count)
        tokens = pad(tokens, (0, MAX_DRAFT - count), value=UNKNOWN)
        ready = self._ready[rows]
        if text is None:
            return Drafts(tokens, ready * count, torch.full_like(ready, HEAD))
        by_head = (text.counts == 0) & (ready > 0)
        return Drafts(
            tokens=torch.where(by_head[:, None], tokens, text.tokens),
            counts=torch.where(by_head, count, text.counts),
            sources=torch.where(by_head, HEAD, text.sources),
        )

    def keep(self, hidden: Tensor, inputs: VerifyInputs, state: DecodeState, rows: Tensor) -> None:
        """Save the hidden states, of [R, D], of the last draws of slots `rows`, int64 [B]."""
        # The row of the last accepted token; an arbitrary row if the sequence is inactive.
        drawn = state.position[rows] - (inputs.lengths - inputs.queries)
        last = (inputs.first + drawn - 1).clamp(0, len(hidden) - 1).long()
        self._hidden.index_copy_(0, rows, hidden[last])
        self._ready.index_copy_(0, rows, (inputs.queries > 0).int() * self._on)


MODES = ("off", "text", "head", "auto")
_NONE = (0,) * len(SOURCES)
_NO_DRAFTS = SpeculationStats(0, 0, _NONE, _NONE, 0.0, 0.0)
_Piece = tuple[int, list[int], RunningSequence]  # Index in the text, tokens, their sequence.


class Speculation:
    """The drafts of one engine, with the counts of the current call in `stats`.

    Modes "text" and "head" verify drafts from that source in each decode forward; "auto" verifies
    drafts from all sources when that is faster.
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
        # The extra slot never holds a sequence.
        self.text = DraftText.empty(slots + 1, max_model_len, archive, archive, device)
        rows = padded_batch(slots)
        tokens = torch.zeros(rows, MAX_DRAFT, dtype=torch.int32, device=device)
        counts = torch.zeros(rows, dtype=torch.int32, device=device)
        self._empty = Drafts(tokens=tokens, counts=counts, sources=torch.zeros_like(counts))
        self.head = None if head is None or mode == "text" else HeadDrafts(head, slots + 1)
        most = MAX_QUERIES if head is None or self._reads_text else 1 + head.tokens
        self.widths = DraftWidths(mode != "auto", most)
        self._device = device
        self._ended: list[RunningSequence] = []
        self._written = 0  # Offset in the archive of the next text.
        self.stats = _NO_DRAFTS
        self._since_taken: SpeculationStats | None = None

    def begin(self) -> None:
        """Begin a call, with counts of zero."""
        if self.head is not None:
            self.head.begin()
            head = self.head.head
            self.widths.acceptance.head_tokens = head.tokens if head.trained else 0
        self.widths.times.begin()
        self.stats = _NO_DRAFTS

    def end(self) -> SpeculationStats:
        """End a call that succeeded; return its counts."""
        self._since_taken = self.stats.plus(self._since_taken or _NO_DRAFTS)
        return self.stats

    def take(self) -> SpeculationStats | None:
        """Return the counts of calls that ended since the last `take`; None if there are none."""
        taken, self._since_taken = self._since_taken, None
        return taken

    def admit(self, arrivals: Sequence[tuple[int, RunningSequence]]) -> None:
        """Add the text of sequences that get a slot, given as (slot, sequence)."""
        self.flush_archive()
        slots = to_device([slot for slot, _ in arrivals], self._device)
        self.text.quality[slots] = FIRST_QUALITY
        if self.head is not None:
            self.head.reset(slots)
        if self._reads_text:
            pieces: list[_Piece] = []
            for slot, sequence in arrivals:
                tokens = [*sequence.prompt.token_ids, *sequence.generated]
                pieces.append((slot * self.text.width, tokens, sequence))
            self._write(pieces, LAG)
            groups = [_prompt_key(sequence.prompt) for _, sequence in arrivals]
            self.text.group[slots] = to_device(groups, self._device)

    def choose(self, sequences: int) -> Width:
        """Return the width of the next step's forwards."""
        if self.head is not None and not self._reads_text and not self.head.head.trained:
            return Width(1, padded_batch(sequences), drafts=False)
        return self.widths.choose(sequences)

    def drafts(self, state: DecodeState, rows: Tensor, verify: Width) -> Drafts:
        """Return the drafts of a forward, one per row; empty unless `verify.drafts`."""
        if verify.drafts:
            return self.propose(state, rows, verify.most)
        empty, count = self._empty, len(rows)
        return Drafts(
            tokens=empty.tokens[:count], counts=empty.counts[:count], sources=empty.sources[:count]
        )

    def propose(self, state: DecodeState, rows: Tensor, width: int) -> Drafts:
        """Return a draft per row of slots, int64 [B], without waiting for the device.

        A sequence has at most `width` tokens in the forward; at 1 the head is not run.
        """
        # With a head, only the longest n-grams match.
        head = self.head
        text = propose(self.text, state, rows, longest_only=head is not None)
        if head is None or width == 1:
            return text
        count = min(head.head.tokens, width - 1)
        return head.propose(state, rows, count, text if self._reads_text else None)

    def archive(self, sequence: RunningSequence) -> None:
        """Queue the text of an ended sequence for the archive (`flush_archive`)."""
        if self._reads_text:
            self._ended.append(sequence)

    def flush_archive(self) -> None:
        """Write queued completions to the archive, over the oldest; best while the GPU is busy."""
        room = len(self.text.text) - self.text.archive_start
        pieces: list[_Piece] = []
        for sequence in self._ended:
            # The last tokens of the prompt match before the first of the completion. UNKNOWN ends
            # the piece.
            text = [*sequence.prompt.token_ids[-2:], *sequence.generated]
            tokens = [*text[: room - 1], UNKNOWN]
            if self._written + len(tokens) > room:
                # Pieces of one write must not overlap.
                self._write(pieces, 1)
                pieces, self._written = [], 0
            pieces.append((self.text.archive_start + self._written, tokens, sequence))
            self._written += len(tokens)
        self._ended.clear()
        self._write(pieces, 1)

    def _write(self, pieces: Sequence[_Piece], lag: int) -> None:
        """Write pieces of text and index their n-grams, `lag` tokens late."""
        if not pieces:
            return
        # One copy per column for all pieces.
        places = [np.arange(place, place + len(text)) for place, text, _ in pieces]
        tokens = [np.array(text, dtype=np.int64) for _, text, _ in pieces]
        keys = [_prompt_key(sequence.prompt) for _, _, sequence in pieces]
        groups = np.repeat(np.array(keys, dtype=np.int64), [len(text) for text in tokens])
        device = self._device
        remember(
            self.text,
            to_device(np.concatenate(places), device),
            to_device(np.concatenate(tokens), device),
            to_device(groups, device),
            lag,
        )

    def record(self, launched: LaunchedStep, seconds: float) -> None:
        """Count the results of a decode step; later widths depend on them."""
        step, verify = launched.step, launched.verify
        assert launched.offers is not None, "a step without drafts"
        assert verify is not None, "a step of no size"
        # Draws and offers per forward and sequence.
        drawn = (launched.tokens.unflatten(1, (-1, step.width)).numpy() >= 0).sum(-1)
        ran = drawn > 0
        offers = Offers.unpacked(launched.offers)
        drafted = offers.drafted.numpy()
        source = offers.source.numpy()
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
            hit=offers.hit.numpy()[ran],
            offered=offers.offered.numpy()[ran],
            by_head=source[ran] == HEAD,
        )
        self.widths.observe(len(step.chunks), verify, step.repeats, seconds, seen)


@functools.lru_cache(maxsize=4096)
def _prompt_key(prompt: PromptInputs) -> int:
    """Return the key of a prompt as a 63-bit integer."""
    return int.from_bytes(prompt.key(size=8), "little") >> 1
