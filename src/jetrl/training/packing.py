"""Minibatch selection and sequence packing. Does not import torch.

`data.batch` chooses the minibatches: `all` uses every sample once, in whole groups per update;
`shuffle_r1` samples pairs (Zhu et al. 2025, "Shuffle-R1", arXiv 2508.05612). A group of 2N samples
is sorted by advantage, sample i is paired with sample 2N + 1 - i, and the pairs with the largest
advantage differences are kept. Each update draws its share of the pairs with probability
proportional to |A1| + |A2|, without replacement; within a step, a pair may recur or never occur.

The samples of an update are packed without padding into micro-batches of a token budget by
first-fit decreasing. Within a micro-batch they keep sample order. A sequence longer than the budget
gets its own micro-batch. Packing is deterministic.

With shared prompts (`models.packed`), a stem (the whole 128-token blocks of a prompt) counts once
per micro-batch, and samples prefer a micro-batch that has their stem. Since this changes the
packing, `train.share_prompts = "auto"` shares only if enough tokens are saved. The decision depends
only on the samples' tokens, so all ranks and a resumed run agree.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jetrl.errors import UserError
from jetrl.randomness import derive_seed, weighted_draw
from jetrl.settings.loading import Settings
from jetrl.training.advantages import group_advantages
from jetrl.types import Batch, Example, ImageSpan, PromptInputs, Sample, stem_length

MOST_LOGPROB = 1e-4  # other engines may round the log-prob of a certain token above 0


def check_samples(samples: Sequence[Sample], exact: bool) -> None:
    """Raise UserError for a sample with mismatched lengths or invalid log-probs.

    Under an `exact` plan, wrong log-probs are left to the comparison with the trainer, which
    reports their bits.
    """
    for i, sample in enumerate(samples):
        done, where = sample.completion, f"sample {i} (prompt {sample.prompt.id!r})"
        count = len(done.token_ids)
        if len(done.logprobs) != count:
            needs = f"Completion.logprobs needs one number per token, not {len(done.logprobs)}"
            raise UserError(f"{where}: {needs} for {count} tokens")
        if len(done.versions) not in (0, count):
            needs = "Completion.versions needs one number per token, or none"
            raise UserError(f"{where}: {needs}, not {len(done.versions)} for {count} tokens")
        for start, end in done.environment:
            if not 0 <= start <= end <= count:
                raise UserError(
                    f"{where}: Completion.environment = [{start}, {end}) is not inside its "
                    f"{count} tokens"
                )
        if exact and not done.versions:
            continue
        logprobs = np.asarray(done.logprobs, dtype=np.float64)
        bad = np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= MOST_LOGPROB)))
        if len(bad):
            token, value = int(bad[0]), logprobs[bad[0]]
            needs = "the sampler's natural log of a probability, finite and at most 0"
            raise UserError(
                f"{where}: the log-prob of token {token} is {value}; it must be {needs}"
            )


def choose_minibatches(
    samples: Sequence[Sample], settings: Settings, num_updates: int
) -> list[list[int]]:
    """Return the sample numbers of each update of a step, by `data.batch`."""
    groups = [sample.group for sample in samples]
    updates = settings.train.updates_per_step
    # Shuffle-R1 needs advantages before they are computed for training, so compute them from
    # rewards.
    if settings.data.batch == "all":
        return split_minibatches(groups, updates)
    advantages = group_advantages([sample.score.reward for sample in samples], groups)
    pairs = contrast_pairs(advantages, groups, settings.data.keep_pairs)
    return shuffled_minibatches(
        pairs, updates, derive_seed(settings.run.seed, "minibatches", num_updates)
    )


def split_minibatches(groups: Sequence[int], num_minibatches: int) -> list[list[int]]:
    """Return ascending sample numbers per update; each sample once, in whole groups if possible."""
    if len(groups) < num_minibatches:
        raise UserError(
            f"lower train.updates_per_step = {num_minibatches}: only {len(groups)} samples"
        )
    # Split by groups if there are enough, else by samples.
    units = _members(groups)
    if len(units) < num_minibatches:
        units = [[i] for i in range(len(groups))]
    # Consecutive units, in shares that differ in size by at most one.
    bounds = [len(units) * k // num_minibatches for k in range(num_minibatches + 1)]
    return [sorted(itertools.chain(*units[start:end])) for start, end in itertools.pairwise(bounds)]


def _members(groups: Sequence[int]) -> list[list[int]]:
    """Return the sample numbers of each group."""
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    return list(members.values())


class Pair(NamedTuple):
    """Two samples of a group, by number, sampled in proportion to weight = |A1| + |A2|."""

    best: int
    worst: int
    weight: float


def contrast_pairs(
    advantages: Sequence[float] | np.ndarray, groups: Sequence[int], keep: float
) -> list[Pair]:
    """Return the kept fraction of each group's pairs (at least one), largest difference first."""
    pairs = []
    for members in _members(groups):
        # Pair best with worst, then inwards; break ties by number, so that all ranks agree.
        order = sorted(members, key=lambda i: (-advantages[i], i))
        num_pairs = len(order) // 2
        for rank in range(min(num_pairs, max(1, int(keep * num_pairs)))):
            best, worst = order[rank], order[-1 - rank]
            weight = abs(float(advantages[best])) + abs(float(advantages[worst]))
            pairs.append(Pair(best, worst, weight))
    return pairs


def shuffled_minibatches(pairs: Sequence[Pair], num_minibatches: int, seed: int) -> list[list[int]]:
    """Return ascending sample numbers per update: its share of the pairs, sampled by weight."""
    # Pairs of weight 0 carry no signal: draw them only if all weights are 0.
    drawable = [pair for pair in pairs if pair.weight > 0] or list(pairs)
    weights = np.array([pair.weight or 1.0 for pair in drawable])
    bounds = [len(pairs) * k // num_minibatches for k in range(num_minibatches + 1)]
    minibatches = []
    for k in range(num_minibatches):
        count = min(len(drawable), max(1, bounds[k + 1] - bounds[k]))
        drawn = [drawable[i] for i in weighted_draw(weights, count, derive_seed(seed, k))]
        minibatches.append(sorted(i for pair in drawn for i in (pair.best, pair.worst)))
    return minibatches


def pack(
    samples: Sequence[Sample],
    tokens_per_micro_batch: int,
    sample_ids: Sequence[int] | None = None,
    share_prompts: bool = False,
) -> list[Batch]:
    """Return samples as micro-batches of at most N tokens (or one longer sequence).

    loss_mask is True exactly at sampled tokens; advantages are 0 until `with_advantages`. Samples
    without a completion token are dropped.
    """
    chosen = range(len(samples)) if sample_ids is None else sample_ids
    # The first trained token is predicted at the last prompt token.
    for i in chosen:
        sample = samples[i]
        if not len(sample.inputs):
            raise UserError(f"prompt {sample.prompt.id!r} has no tokens before its completion")
    sequences = {
        i: _Sequence(samples[i].inputs, done.token_ids, done.logprobs, done.environment)
        for i in chosen
        if (done := samples[i].completion).token_ids
    }
    return _pack(sequences, tokens_per_micro_batch, share_prompts)


def pack_examples(examples: Sequence[Example], tokens_per_micro_batch: int) -> list[Batch]:
    """Return demonstrations as micro-batches, like `pack`, with rollout_logprobs of 0."""
    for i, example in enumerate(examples):
        for part, name in ((example.prompt, "prompt"), (example.completion, "completion")):
            if not len(part):
                raise UserError(f"supervised example {i}: its {name} has no tokens")
    sequences = {
        i: _Sequence(
            prompt=PromptInputs(tuple(e.prompt), e.images),
            completion=e.completion,
            logprobs=[0.0] * len(e.completion),
            environment=e.environment,
        )
        for i, e in enumerate(examples)
    }
    return _pack(sequences, tokens_per_micro_batch, share_prompts=False)


def targets(batch: Batch) -> np.ndarray:
    """Return the positions of the trained tokens of a batch, int64 [N], ascending."""
    return np.flatnonzero(batch.loss_mask)


def trained_lengths(batch: Batch) -> np.ndarray:
    """Return the trained tokens of each sequence of a batch, int64 [S]."""
    return np.add.reduceat(batch.loss_mask, batch.cu_seqlens[:-1], dtype=np.int64)


def by_sample(
    batches: Sequence[Batch], values: Sequence[np.ndarray], num_samples: int
) -> list[np.ndarray]:
    """Regroup values [n] per batch into values [n] per sample of the step."""
    per_sample: list[np.ndarray] = [np.zeros(0, dtype=v.dtype) for v in values[:1]] * num_samples
    for batch, value in zip(batches, values, strict=True):
        ends = np.cumsum(trained_lengths(batch))
        for i, part in zip(batch.sample_ids, np.split(value, ends[:-1]), strict=True):
            per_sample[i] = part
    return per_sample


def by_batch(batch: Batch, values: Sequence[np.ndarray]) -> np.ndarray:
    """Regroup values [n] per sample into values [n] at the trained tokens of a batch."""
    return np.concatenate([values[i] for i in batch.sample_ids])


def with_advantages(batch: Batch, advantages: Sequence[np.ndarray]) -> Batch:
    """Return a batch with advantages filled in from float32 [n] per sample of the step."""
    # Prompt and environment tokens keep advantage 0.
    advantage_T = np.zeros(batch.num_tokens, dtype=np.float32)
    advantage_T[targets(batch)] = by_batch(batch, advantages)
    return dataclasses.replace(batch, advantages=advantage_T)


def with_prompts(batch: Batch, prompts: Mapping[bytes, PromptInputs]) -> Batch:
    """Return a batch with other prompts before the same completions, given by the old ones' keys.

    Trained tokens keep their order. Prompts are not shared.
    """
    sequences = {}
    for i, (start, end) in enumerate(itertools.pairwise(batch.cu_seqlens.tolist())):
        # A completion begins with the first trained token.
        first = start + int(np.argmax(batch.loss_mask[start:end]))
        told = np.flatnonzero(~batch.loss_mask[first:end]).tolist()
        spans = (span.within(start, first) for span in batch.images)
        images = tuple(span for span in spans if span is not None)
        old = PromptInputs(tuple(batch.token_ids[start:first].tolist()), images)
        sequences[i] = _Sequence(
            prompt=prompts[old.key()],
            completion=batch.token_ids[first:end].tolist(),
            logprobs=batch.rollout_logprobs[first:end].tolist(),
            environment=[(token, token + 1) for token in told],
        )
    (whole,) = _pack(sequences, sum(s.length for s in sequences.values()), share_prompts=False)
    return whole


class _Sequence(NamedTuple):
    """A prompt, its completion, and the spans of the completion that are not trained on."""

    prompt: PromptInputs
    completion: Sequence[int]
    logprobs: Sequence[float]
    environment: Sequence[tuple[int, int]]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.completion)


class _Stem(NamedTuple):
    """Number of the first sequence with this stem, and the stem length in tokens; 0 if unshared."""

    id: int
    length: int


def _stems(sequences: Mapping[int, _Sequence]) -> dict[int, _Stem]:
    first: dict[bytes, int] = {}
    stems = {}
    for i, sequence in sequences.items():
        length = stem_length(len(sequence.prompt))
        key = sequence.prompt.first(length).key()
        stems[i] = _Stem(first.setdefault(key, i) if length else i, length)
    return stems


def _pack(
    sequences: Mapping[int, _Sequence], tokens_per_micro_batch: int, share_prompts: bool
) -> list[Batch]:
    """Return sequences, in sample order, as batches of at most N computed tokens."""
    batches = []
    stems = _stems(sequences) if share_prompts else {i: _Stem(i, 0) for i in sequences}
    for ids in _first_fit_decreasing(sequences, stems, tokens_per_micro_batch):
        cu_seqlens = np.cumsum([0, *(sequences[i].length for i in ids)], dtype=np.int64)
        num_tokens = int(cu_seqlens[-1])
        token_ids, positions = np.empty((2, num_tokens), dtype=np.int64)
        loss_mask = np.zeros(num_tokens, dtype=np.bool_)
        rollout_logprobs = np.zeros(num_tokens, dtype=np.float32)
        images: list[ImageSpan] = []
        # Copy each sequence into place: prompt, completion, mask, rollout log-probs.
        for i, start, end in zip(ids, cu_seqlens, cu_seqlens[1:], strict=False):
            sequence = sequences[i]
            first = start + len(sequence.prompt)
            token_ids[start:first] = sequence.prompt.token_ids
            token_ids[first:end] = sequence.completion
            positions[start:end] = sequence.prompt.positions(0, sequence.length)
            # Spans of images count the tokens of the batch.
            images += sequence.prompt.image_spans(0, len(sequence.prompt), at=int(start))
            loss_mask[first:end] = True
            # Environment tokens are context: they were not sampled.
            for begin, stop in sequence.environment:
                loss_mask[first + begin : first + stop] = False
            rollout_logprobs[first:end] = sequence.logprobs
        batch = Batch(
            token_ids=token_ids,
            positions=positions,
            cu_seqlens=cu_seqlens,
            loss_mask=loss_mask,
            rollout_logprobs=rollout_logprobs,
            advantages=np.zeros(num_tokens, dtype=np.float32),
            sample_ids=np.asarray(ids, dtype=np.int64),
            stem_ids=np.array([stems[i].id for i in ids]) if share_prompts else None,
            stem_lengths=np.array([stems[i].length for i in ids]) if share_prompts else None,
            images=tuple(images),
        )
        batches.append(batch)
    return batches


def _first_fit_decreasing(
    sequences: Mapping[int, _Sequence], stems: Mapping[int, _Stem], budget: int
) -> list[list[int]]:
    """Return the ascending sequence numbers of each batch."""
    longest: dict[int, int] = {}
    for i, sequence in sequences.items():
        id = stems[i].id
        longest[id] = max(longest.get(id, 0), sequence.length)
    # Sort groups with a common stem by their longest member, then longest first; ties by number.
    order = sorted(
        sequences, key=lambda i: (-longest[stems[i].id], stems[i].id, -sequences[i].length, i)
    )
    # Sequences of each batch, and its remaining token budget.
    bins: list[list[int]] = []
    rooms = np.full(len(sequences), budget)
    holders: dict[int, list[int]] = {}  # batches that contain each stem
    for i in order:
        stem = stems[i]
        cost = sequences[i].length - stem.length
        k = next((k for k in holders.get(stem.id, ()) if cost <= rooms[k]), None)
        if k is None:
            # The stem is new in this batch, so it counts; a longer sequence fills the batch.
            cost = min(sequences[i].length, budget)
            k = int(np.argmax(rooms >= cost))
            holders.setdefault(stem.id, []).append(k)
        if k == len(bins):
            bins.append([])
        bins[k].append(i)
        rooms[k] -= cost
    return [sorted(ids) for ids in bins]


# Minimum fraction of tokens saved for "auto" to share. Smaller savings may not pay: GEMM time
# barely changes with a few more rows, and packing may get less even. At the shape of Qwen3-8B,
# saving 10% of the tokens saves 3% of an update; saving 58% saves half.
WORTH_SHARING = 0.08


def shares_prompts(
    setting: bool | str, samples: Sequence[Sample], sample_ids: Iterable[int] | None = None
) -> bool:
    """Return True if an update is packed with shared prompts, per `train.share_prompts`."""
    if setting != "auto":
        return bool(setting)
    total = saved = 0
    stems: set[bytes] = set()
    for i in range(len(samples)) if sample_ids is None else sample_ids:
        prompt, completion = samples[i].inputs, samples[i].completion.token_ids
        if not completion:
            continue
        total += len(prompt) + len(completion)
        # Each stem is computed once: every sequence but the first saves it.
        stem = prompt.first(stem_length(len(prompt)))
        key = stem.key()
        saved += len(stem) if key in stems else 0
        stems.add(key)
    return bool(total) and saved / total >= WORTH_SHARING
