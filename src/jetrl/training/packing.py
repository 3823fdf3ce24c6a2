"""Packing: sequences end to end in micro-batches, by a budget of tokens, without padding.

No torch here. The samples of an update are packed longest first into the first micro-batch with
room (first fit decreasing), and within a micro-batch they are in sample order. A sequence longer
than the budget gets a micro-batch of its own. Nothing is random: the same samples give the same
batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jetrl.errors import UserError
from jetrl.types import Batch, Example, Sample


def pack(
    samples: Sequence[Sample],
    tokens_per_micro_batch: int,
    sample_ids: Sequence[int] | None = None,
) -> list[Batch]:
    """Return samples as micro-batches of at most so many tokens (or one longer sequence).

    Args:
        samples: All samples of one step.
        tokens_per_micro_batch: Prompt and completion tokens a micro-batch.
        sample_ids: The numbers of the samples to pack; by default all.

    Returns:
        Batches whose loss_mask is True at exactly the sampled tokens, with advantages of 0
        (`with_advantages` sets them). A sample without a completion token is left out: there is
        nothing to train on. May be empty.

    Raises:
        UserError: A sample with an empty prompt: its first token would have no log-prob.
        ValueError: Lengths that do not agree.
    """
    chosen = range(len(samples)) if sample_ids is None else sample_ids
    for i in chosen:
        sample = samples[i]
        if not sample.prompt_token_ids:
            raise UserError(
                f"prompt {sample.prompt.id!r} has no tokens: a completion's first token needs at "
                "least one token before it"
            )
        if len(sample.completion.token_ids) != len(sample.completion.logprobs):
            raise ValueError(
                f"sample {i}: {len(sample.completion.token_ids)} completion tokens but "
                f"{len(sample.completion.logprobs)} log-probs"
            )
    sequences = {
        i: _Sequence(samples[i].prompt_token_ids, done.token_ids, done.logprobs, done.environment)
        for i in chosen
        if (done := samples[i].completion).token_ids
    }
    return _pack(sequences, tokens_per_micro_batch)


def pack_examples(examples: Sequence[Example], tokens_per_micro_batch: int) -> list[Batch]:
    """Return worked answers as micro-batches, as `pack` does, with rollout_logprobs of 0.

    Args:
        examples: The worked answers.
        tokens_per_micro_batch: Prompt and completion tokens a micro-batch.

    Raises:
        UserError: An example with an empty prompt or completion.
    """
    for i, example in enumerate(examples):
        for part, name in ((example.prompt, "prompt"), (example.completion, "completion")):
            if not len(part):
                raise UserError(f"supervised example {i}: its {name} has no tokens")
    sequences = {
        i: _Sequence(e.prompt, e.completion, [0.0] * len(e.completion), e.environment)
        for i, e in enumerate(examples)
    }
    return _pack(sequences, tokens_per_micro_batch)


def targets(batch: Batch) -> np.ndarray:
    """Return the positions of the trained tokens of a batch, int64 [N], ascending."""
    return np.flatnonzero(batch.loss_mask)


def trained_lengths(batch: Batch) -> np.ndarray:
    """Return how many tokens of each sequence of a batch are trained on, int64 [S]."""
    return np.add.reduceat(batch.loss_mask, batch.cu_seqlens[:-1], dtype=np.int64)


def by_sample(
    batches: Sequence[Batch], values: Sequence[np.ndarray], num_samples: int
) -> list[np.ndarray]:
    """Return values at the trained tokens of batches as values of samples; `by_batch` undoes this.

    Args:
        batches: The batches of a step.
        values: [N] for each batch, a value for each of its trained tokens.
        num_samples: How many samples the step has.

    Returns:
        [n] for each sample of the step; empty where a sample has no token.
    """
    per_sample: list[np.ndarray] = [np.zeros(0, dtype=v.dtype) for v in values[:1]] * num_samples
    for batch, value in zip(batches, values, strict=True):
        ends = np.cumsum(trained_lengths(batch))
        for i, part in zip(batch.sample_ids, np.split(value, ends[:-1]), strict=True):
            per_sample[i] = part
    return per_sample


def by_batch(batch: Batch, values: Sequence[np.ndarray]) -> np.ndarray:
    """Return values of samples as values [N] at the trained tokens of one batch.

    Args:
        batch: One batch of the step.
        values: [n] for each sample of the step, a value for each of its trained tokens.
    """
    return np.concatenate([values[i] for i in batch.sample_ids])


def with_advantages(batch: Batch, advantages: Sequence[np.ndarray]) -> Batch:
    """Return a batch with the advantages of its trained tokens.

    Args:
        batch: One batch of the step.
        advantages: float32 [n] for each sample of the step.
    """
    advantage_T = np.zeros(batch.num_tokens, dtype=np.float32)
    advantage_T[targets(batch)] = by_batch(batch, advantages)
    return dataclasses.replace(batch, advantages=advantage_T)


class _Sequence(NamedTuple):
    """A prompt with its completion, and the spans of the completion that are not trained on."""

    prompt: Sequence[int]
    completion: Sequence[int]
    logprobs: Sequence[float]
    environment: Sequence[tuple[int, int]]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.completion)


def _pack(sequences: Mapping[int, _Sequence], tokens_per_micro_batch: int) -> list[Batch]:
    """Return sequences, by sample number, as batches of at most so many tokens."""
    if tokens_per_micro_batch < 1:
        raise ValueError(f"tokens_per_micro_batch must be positive, not {tokens_per_micro_batch}")
    batches = []
    for ids in _first_fit_decreasing(sequences, tokens_per_micro_batch):
        cu_seqlens = np.cumsum([0, *(sequences[i].length for i in ids)], dtype=np.int64)
        num_tokens = int(cu_seqlens[-1])
        token_ids = np.empty(num_tokens, dtype=np.int64)
        loss_mask = np.zeros(num_tokens, dtype=np.bool_)
        rollout_logprobs = np.zeros(num_tokens, dtype=np.float32)
        for i, start, end in zip(ids, cu_seqlens, cu_seqlens[1:], strict=False):
            sequence = sequences[i]
            first = start + len(sequence.prompt)
            token_ids[start:first] = sequence.prompt
            token_ids[first:end] = sequence.completion
            loss_mask[first:end] = True
            for begin, stop in sequence.environment:
                loss_mask[first + begin : first + stop] = False
            rollout_logprobs[first:end] = sequence.logprobs
        batches.append(
            Batch(
                token_ids=token_ids,
                cu_seqlens=cu_seqlens,
                loss_mask=loss_mask,
                rollout_logprobs=rollout_logprobs,
                advantages=np.zeros(num_tokens, dtype=np.float32),
                sample_ids=np.asarray(ids, dtype=np.int64),
            )
        )
    return batches


def _first_fit_decreasing(sequences: Mapping[int, _Sequence], budget: int) -> list[list[int]]:
    """Return the numbers of the sequences of each batch, ascending.

    A sequence goes into the first batch that has room for it; one longer than the budget has a
    batch of its own. A tree of the largest room below each node finds that batch, so that the time
    grows with the number of sequences and not with its square.
    """
    size = 1
    while size < len(sequences):
        size *= 2
    bins: list[list[int]] = []
    room = [budget] * (2 * size)  # of node k, whose children are 2k and 2k + 1; leaves are batches
    for i in sorted(sequences, key=lambda i: (-sequences[i].length, i)):
        length = min(sequences[i].length, budget)
        node = 1
        while node < size:
            node = 2 * node + (room[2 * node] < length)
        k = node - size
        if k == len(bins):
            bins.append([])
        bins[k].append(i)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [sorted(ids) for ids in bins]
