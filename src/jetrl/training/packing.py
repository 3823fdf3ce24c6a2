"""Packing: sequences end to end in micro-batches, by a budget of tokens, without padding.

A step's samples are first split into disjoint minibatches, one for each optimizer update, by whole
groups where there are enough of them. A minibatch is then packed into micro-batches: longest
sequence first into the first micro-batch with room (first fit decreasing), and within a micro-batch
in sample order. A sequence longer than the budget gets a micro-batch of its own. Nothing is random:
the same samples give the same batches.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jetrl.errors import UserError
from jetrl.types import Batch, Example, Sample


def pack(
    samples: Sequence[Sample],
    tokens_per_micro_batch: int,
    sample_ids: Sequence[int] | None = None,
) -> list[Batch]:
    """Samples as micro-batches of at most `tokens_per_micro_batch` tokens (or one longer sequence).

    Args:
        samples: of one step.
        tokens_per_micro_batch: prompt and completion tokens a micro-batch.
        sample_ids: which of the samples to pack; default all.

    Returns:
        Batches whose loss_mask is True at exactly the completion tokens, with advantages of 0
        (`with_advantages` sets them). A sample without a completion token is left out: there is
        nothing to train on. May be empty.

    Raises:
        UserError: a sample with an empty prompt: its first token would have no log-prob.
        ValueError: lengths that do not agree.
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
    return _pack(
        [i for i in chosen if samples[i].completion.token_ids],
        [sample.prompt_token_ids for sample in samples],
        [sample.completion.token_ids for sample in samples],
        [sample.completion.logprobs for sample in samples],
        [sample.completion.environment for sample in samples],
        tokens_per_micro_batch,
    )


def pack_examples(examples: Sequence[Example], tokens_per_micro_batch: int) -> list[Batch]:
    """Supervised examples as micro-batches.

    As `pack`; rollout_logprobs are 0.

    Raises:
        UserError: an example with an empty prompt or completion.
    """
    for i, example in enumerate(examples):
        for part, name in ((example.prompt, "prompt"), (example.completion, "completion")):
            if not len(part):
                raise UserError(f"supervised example {i}: its {name} has no tokens")
    return _pack(
        range(len(examples)),
        [example.prompt for example in examples],
        [example.completion for example in examples],
        [[0.0] * len(example.completion) for example in examples],
        [example.environment for example in examples],
        tokens_per_micro_batch,
    )


def split_minibatches(groups: Sequence[int], num_minibatches: int) -> list[list[int]]:
    """The samples of each optimizer update of a step: disjoint, in order, together all of them.

    Args:
        groups: [N], the group of each sample.
        num_minibatches: how many; groups stay whole if there are at least as many of them.

    Returns:
        Sample numbers, ascending, of each minibatch. Their sizes differ by at most one group (or
        one sample, where groups had to be cut).

    Raises:
        UserError: fewer samples than minibatches.
    """
    if len(groups) < num_minibatches:
        raise UserError(
            f"train.updates_per_step = {num_minibatches} but the step has only {len(groups)} "
            "samples: lower it, or raise rollout.prompts_per_step or rollout.samples_per_prompt"
        )
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    units = list(members.values())
    if len(units) < num_minibatches:
        units = [[i] for i in range(len(groups))]
    bounds = [len(units) * k // num_minibatches for k in range(num_minibatches + 1)]
    return [
        sorted(i for unit in units[start:end] for i in unit)
        for start, end in itertools.pairwise(bounds)
    ]


def targets(batch: Batch) -> np.ndarray:
    """Positions of the tokens that are trained on: int64, ascending."""
    return np.flatnonzero(batch.loss_mask)


def trained_lengths(batch: Batch) -> np.ndarray:
    """Tokens of each sequence that are trained on: int64 [S]."""
    return np.add.reduceat(batch.loss_mask, batch.cu_seqlens[:-1], dtype=np.int64)


def by_sample(
    batches: Sequence[Batch], values: Sequence[np.ndarray], num_samples: int
) -> list[np.ndarray]:
    """Values at the trained tokens of batches, [N] each, as [n] for each sample of the step: empty
    where a sample has no token."""
    found: list[np.ndarray] = [np.zeros(0, dtype=v.dtype) for v in values[:1]] * num_samples
    for batch, value in zip(batches, values, strict=True):
        ends = np.cumsum(trained_lengths(batch))
        for i, part in zip(batch.sample_ids, np.split(value, ends[:-1]), strict=True):
            found[i] = part
    return found


def by_batch(batch: Batch, values: Sequence[np.ndarray]) -> np.ndarray:
    """Values of each sample's trained tokens, [n] for each sample of the step, as the [N] of a
    batch: what `by_sample` took apart."""
    return np.concatenate([values[i] for i in batch.sample_ids])


def with_advantages(batch: Batch, advantages: Sequence[np.ndarray]) -> Batch:
    """The batch with the advantages of its trained tokens, float32 [n] for each sample of the
    step."""
    advantage_T = np.zeros(batch.num_tokens, dtype=np.float32)
    advantage_T[targets(batch)] = by_batch(batch, advantages)
    return dataclasses.replace(batch, advantages=advantage_T)


def _pack(
    chosen: Sequence[int],
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    environment: Sequence[Sequence[tuple[int, int]]],
    tokens_per_micro_batch: int,
) -> list[Batch]:
    if tokens_per_micro_batch < 1:
        raise ValueError(f"tokens_per_micro_batch must be positive, not {tokens_per_micro_batch}")
    lengths = {i: len(prompts[i]) + len(completions[i]) for i in chosen}
    batches = []
    for ids in _first_fit_decreasing(lengths, tokens_per_micro_batch):
        cu_seqlens = np.cumsum([0, *(lengths[i] for i in ids)], dtype=np.int64)
        num_tokens = int(cu_seqlens[-1])
        token_ids = np.empty(num_tokens, dtype=np.int64)
        loss_mask = np.zeros(num_tokens, dtype=np.bool_)
        rollout_logprobs = np.zeros(num_tokens, dtype=np.float32)
        for i, start, end in zip(ids, cu_seqlens, cu_seqlens[1:], strict=False):
            first = start + len(prompts[i])
            token_ids[start:first] = prompts[i]
            token_ids[first:end] = completions[i]
            loss_mask[first:end] = True
            for said, until in environment[i]:
                loss_mask[first + said : first + until] = False
            rollout_logprobs[first:end] = logprobs[i]
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


def _first_fit_decreasing(lengths: dict[int, int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(lengths, key=lambda i: (-lengths[i], i)):
        for k, left in enumerate(room):
            if lengths[i] <= left:
                bins[k].append(i)
                room[k] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(budget - lengths[i])
    return [sorted(ids) for ids in bins]
