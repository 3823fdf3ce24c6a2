"""One forward of the policy over the tokens that the scheduler chose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from jetrl.models.policy import Policy
from jetrl.rollout.kv_cache import PagedCache
from jetrl.rollout.launched_step import to_device
from jetrl.rollout.paged_attention import Span
from jetrl.rollout.scheduler import Step
from jetrl.rollout.sequence import RunningSequence


class Runner:
    """Runs steps. The weights are the policy's own, as they are at each call; nothing is copied."""

    def __init__(self, policy: Policy, cache: PagedCache) -> None:
        self._policy = policy
        self._cache = cache

    @property
    def device(self) -> torch.device:
        return self._policy.device

    def copy_pages(self, step: Step) -> None:
        """The copies that come before a step's forwards."""
        self._cache.copy_pages(step.copies)

    def forward(self, step: Step, sequences: Sequence[RunningSequence]) -> Tensor:
        """Runs the tokens of a step over prompts, filling the cache.

        Returns:
            float32 logits [R, V], a row for each chunk that draws, in the order of the chunks; R
            is 0 when all chunks end before their sequence does.
        """
        assert not step.decodes, "decode is the decode batch's"
        token_ids: list[int] = []
        positions: list[np.ndarray] = []
        spans: list[Span] = []
        for chunk in step.chunks:
            sequence = sequences[chunk.sequence]
            spans.append(Span(len(token_ids), chunk.start, chunk.length, sequence.pages))
            token_ids += sequence.tokens(chunk.start, chunk.length)
            positions.append(np.arange(chunk.start, chunk.start + chunk.length))
        device = self._policy.device
        hidden = self._policy.rollout_forward(
            to_device(token_ids, device),
            to_device(np.concatenate(positions), device),
            self._cache.key_values(spans, ends=True),
        )
        drawing = [row for row, chunk in enumerate(step.chunks) if chunk.draws]
        if not drawing:
            return torch.empty((0, self._policy.config.vocab_size), device=device)
        return self._policy.rollout_logits(hidden[to_device(drawing, device)])
