"""Prefill: forwards over prompts, and the first draws after them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jetrl.kernels.decode_state import BROKEN
from jetrl.kernels.sampling import random_bits
from jetrl.models.packed import ForwardInputs
from jetrl.models.policy import Policy
from jetrl.rollout.kv_cache import PagedCache, Span
from jetrl.rollout.launched_step import LaunchedStep, mark, to_device, to_host
from jetrl.rollout.sampler import Sampler, chunks_of_draws, filtering_of
from jetrl.rollout.scheduler import ScheduledStep
from jetrl.rollout.sequence import RunningSequence
from jetrl.types import ImageSpan


@dataclass(frozen=True)
class Prefill:
    """Forwards that fill the cache with prompts and draw the tokens after them."""

    policy: Policy
    cache: PagedCache

    def launch(self, step: ScheduledStep, sequences: Sequence[RunningSequence]) -> LaunchedStep:
        """Start a prefill step, after its page copies, without waiting for the device."""
        device = self.policy.device
        began, called = mark(device), time.perf_counter()
        logits = self.forward(step, sequences)
        tokens, logprobs = (to_host(x[None]) for x in self.draw(logits, step, sequences))
        return LaunchedStep(
            step,
            tokens=tokens,
            logprobs=logprobs,
            began=began,
            host_s=time.perf_counter() - called,
            ready=mark(device),
        )

    @torch.no_grad()
    def forward(self, step: ScheduledStep, sequences: Sequence[RunningSequence]) -> Tensor:
        """Fill the cache; return float32 logits [R, V], one row per chunk that draws, in order."""
        token_ids: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        images: list[ImageSpan] = []
        for chunk in step.chunks:
            sequence = sequences[chunk.sequence]
            spans.append(
                Span(
                    row=len(token_ids), start=chunk.start, length=chunk.length, pages=sequence.pages
                )
            )
            # A chunk may begin or end inside an image.
            prompt, end = sequence.prompt, chunk.start + chunk.length
            images += prompt.image_spans(chunk.start, end, at=len(token_ids))
            token_ids += sequence.tokens(chunk.start, chunk.length)
            positions += prompt.positions(chunk.start, end)
        device, rows_of = self.policy.device, self.policy.image_rows(images)
        inputs = ForwardInputs(torch.tensor(token_ids), torch.tensor(positions), rows_of)
        hidden = self.policy.rollout_forward(
            inputs.to(device), self.cache.key_values(spans, ends=True)
        )
        # Only chunks at the end of their sequence need logits.
        rows = [row for row, chunk in enumerate(step.chunks) if chunk.draws]
        if not rows:
            return torch.empty((0, self.policy.config.vocab_size), device=device)
        return self.policy.rollout_logits(hidden[to_device(rows, device)])

    def draw(
        self, logits: Tensor, step: ScheduledStep, sequences: Sequence[RunningSequence]
    ) -> tuple[Tensor, Tensor]:
        """Return token ids (int64) and log-probs (float32) of `step.draws`, without waiting.

        All draws of a chunk share its row of logits [R, V]. An id BROKEN stands for logits without
        a finite softmax.
        """
        draws_of_rows = [chunk.draws for chunk in step.chunks if chunk.draws]
        device = logits.device
        rows = [row for row, draws in enumerate(draws_of_rows) for _ in draws]
        drawing = [sequences[index] for draws in draws_of_rows for index in draws]
        # The position of a draw is the number of tokens before it.
        counters = [(s.params.seed, s.key, s.num_tokens) for s in drawing]
        seed, key, position = np.array(counters, dtype=np.int64).reshape(-1, 3).T
        bits = random_bits(seed, key, position)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
        logprobs = torch.empty(len(rows), device=device)
        # Samples of a prompt share logits, so draws are chunked to limit memory.
        for part in chunks_of_draws(len(rows), logits):
            params = [sequence.params for sequence in drawing[part]]
            drawn, logprobs[part], lse = Sampler.of(params, device).draw(
                logits[to_device(rows[part], device)],
                bits=to_device(bits[part], device),
                rows=slice(None),
                filtering=filtering_of(params),
                plan=self.policy.plan,
            )
            tokens[part] = torch.where(torch.isfinite(lse), drawn, BROKEN)
        return tokens, logprobs
