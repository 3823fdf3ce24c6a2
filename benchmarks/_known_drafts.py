"""Drafts that are known completions with wrong tokens among them, for benchmarks of speculation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from benchmarks._timing import Row
from torch import Tensor

from jetrl.kernels.decode_state import MAX_DRAFT, UNKNOWN, DecodeState, Drafts
from jetrl.models.draft_head import DraftHead
from jetrl.rollout.draft_widths import DraftWidths, Width
from jetrl.rollout.launched_step import to_device
from jetrl.rollout.sequence import RunningSequence
from jetrl.rollout.sizes import padded_batch
from jetrl.rollout.speculation import Speculation, Spent
from jetrl.types import Completion


class FixedWidth(DraftWidths):
    """The same width and share of rows in every step, for comparison with what `auto` chooses.

    Args:
        most: The most tokens of a sequence in a forward.
        share: The rows of a forward for each sequence.
    """

    def __init__(self, most: int, share: float) -> None:
        super().__init__(always=True)
        self._most, self._share = most, share

    def choose(self, sequences: int) -> Width:
        """Return the width, with as many rows as the step's sequences ask for."""
        size = padded_batch(sequences)
        return Width(self._most, min(int(size * self._share), size * self._most), True)


class KnownDrafts(Speculation):
    """Drafts that are known completions, with wrong tokens among them.

    Args:
        slots: The most running sequences.
        max_model_len: The most tokens of a sequence.
        device: The device.
        head: A draft head, whose guesses are made as well and thrown away.
        mode: "auto", or "text" to verify drafts in every forward.
    """

    def __init__(
        self,
        slots: int,
        max_model_len: int,
        device: torch.device,
        head: DraftHead | None = None,
        mode: str = "auto",
    ) -> None:
        super().__init__(mode, slots, max_model_len, device, head)
        # The token of each position, of each slot's sequence, with room for a draft behind the
        # last; and how many are known from a position on, up to the longest draft.
        self._width = max_model_len + MAX_DRAFT + 1
        shape = (slots + 1, self._width)
        self._script = torch.full(shape, UNKNOWN, dtype=torch.int32, device=device)
        self._left = torch.zeros(shape, dtype=torch.int32, device=device)
        self._base = torch.arange(slots + 1, device=device) * self._width + 1
        self._behind = torch.arange(MAX_DRAFT, device=device)
        self._known: Sequence[np.ndarray] = ()

    def know(self, completions: Sequence[Completion], right: float, vocabulary: int) -> None:
        """Take the completions of the next call.

        Args:
            completions: The completions, in the order of the call's sequences.
            right: The chance of a token of a draft to be the completion's.
            vocabulary: The number of tokens that a wrong one is drawn from.
        """
        chance = np.random.default_rng(0)
        known = []
        for completion in completions:
            tokens = np.array(completion.token_ids)
            wrong = chance.random(len(tokens)) >= right
            known.append(np.where(wrong, (tokens + 1) % vocabulary, tokens))
        self._known = known

    def arrive(self, arrivals: Sequence[tuple[int, RunningSequence]]) -> None:
        """Take in the text, and the known completion, of sequences that get a slot."""
        super().arrive(arrivals)
        if not arrivals:
            return
        scripts = np.full((len(arrivals), self._width), UNKNOWN, dtype=np.int32)
        left = np.zeros_like(scripts)
        for row, (_, sequence) in enumerate(arrivals):
            start, known = len(sequence.prompt), self._known[sequence.index]
            end = start + len(known)
            scripts[row, start:end] = known
            left[row, start:end] = np.minimum(np.arange(len(known), 0, -1), MAX_DRAFT)
        device = self._script.device
        slots = to_device([slot for slot, _ in arrivals], device)
        self._script[slots] = to_device(scripts, device)
        self._left[slots] = to_device(left, device)

    def propose(self, state: DecodeState, rows: Tensor, width: int) -> Drafts:
        """Return the known tokens behind each row's last one, after a look-up in the text."""
        drafts = super().propose(state, rows, width)
        first = (self._base + state.position)[rows]
        tokens = self._script.view(-1)[first[:, None] + self._behind]
        return Drafts(tokens, self._left.view(-1)[first], drafts.sources)


def differences(
    completions: Sequence[Completion], expected: Sequence[Completion]
) -> tuple[int, int]:
    """Return how many tokens, and how many log-probs as bits, differ from the expected ones.

    Args:
        completions: The completions.
        expected: Completions of the same lengths.
    """
    tokens = logprobs = 0
    for one, other in zip(completions, expected, strict=True):
        assert len(one.token_ids) == len(other.token_ids), "completions of other lengths"
        pairs = ((one.token_ids, other.token_ids), (one.logprobs, other.logprobs))
        different = [int((np.array(a) != np.array(b)).sum()) for a, b in pairs]
        tokens, logprobs = tokens + different[0], logprobs + different[1]
    return tokens, logprobs


def width_rows(spent: Mapping[tuple[int, int, int], Spent]) -> Row:
    """Return what forwards took and brought, by SEQUENCES/MOST/ROWS.

    Args:
        spent: The same as `Speculation.spent`.
    """
    return {
        "/".join(map(str, size)): {
            "forwards": one.forwards,
            "ms": round(1e3 * one.seconds / one.forwards, 3),
            "tokens": round(one.tokens / max(1, one.sequences), 3),
        }
        for size, one in sorted(spent.items())
    }
