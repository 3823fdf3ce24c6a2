"""Drafts of the running sequences from a draft head (`models.draft_head`), all on the device.

The head guesses from the hidden state from which a sequence's last token was drawn. So the state of
the last query that counted is kept for each slot, by every forward of decode. A sequence that has
just got its slot has none: its first forward goes without the head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from jetrl.kernels.decode_state import DecodeState
from jetrl.kernels.draft_state import HEAD, MAX_DRAFT, UNKNOWN, Drafts, VerifyInputs
from jetrl.models.draft_head import DraftHead
from jetrl.rollout.launched_step import to_device


class HeadDrafts:
    """The draft head of a policy, with the hidden states that it begins at."""

    def __init__(self, head: DraftHead, slots: int) -> None:
        self.head = head
        device = head.policy.device
        size = head.policy.config.hidden_size
        # [S, D], the hidden state that each sequence's last token was drawn from; int32 [S], 1
        # where there is one; and int32 [1], 1 once the head has learned anything.
        self._hidden = torch.zeros(slots, size, dtype=head.policy.weights.dtype, device=device)
        self._ready = torch.zeros(slots, dtype=torch.int32, device=device)
        self._on = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def trained(self) -> bool:
        """Return whether the head has learned anything."""
        return self.head.trained

    def begin(self) -> None:
        """Begin a call, in which no sequence has a hidden state yet."""
        self._ready.zero_()
        self._on.fill_(int(self.head.trained))

    def arrive(self, slots: Sequence[int]) -> None:
        """Take in that new sequences have got these slots."""
        self._ready[to_device(slots, self._ready.device)] = 0

    def propose(self, state: DecodeState, rows: Tensor, count: int, text: Drafts | None) -> Drafts:
        """Return a draft for each row: the text's where it has one, else the head's.

        Args:
            rows: int64 [B], the slot of each row.
            count: The tokens that the head guesses, from 1.
            text: The drafts from text, or None.
        """
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
        """Keep the hidden states from which a forward drew the sequences' last tokens.

        Args:
            hidden: [R, D], those of all rows of the forward.
            rows: int64 [B], the slot of each row.
        """
        # The query of the last token that counted; any row of a sequence that is not active.
        drawn = state.position[rows] - (inputs.lengths - inputs.queries)
        last = (inputs.first + drawn - 1).clamp(0, len(hidden) - 1).long()
        self._hidden.index_copy_(0, rows, hidden[last])
        self._ready.index_copy_(0, rows, (inputs.queries > 0).int() * self._on)
