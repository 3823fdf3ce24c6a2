"""Packing, the sharing of prompts that it decides, and the split into minibatches."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.training.conftest import make_sample
from tests.training.shared import settings as trainer_settings
from tests.training.shared import snapshot

from jetrl.errors import UserError
from jetrl.training.packing import (
    WORTH_SHARING,
    Pair,
    by_batch,
    by_sample,
    choose_minibatches,
    contrast_pairs,
    pack,
    pack_examples,
    shares_prompts,
    shuffled_minibatches,
    split_minibatches,
    targets,
    trained_lengths,
    with_advantages,
)
from jetrl.training.trainer import Trainer
from jetrl.types import Example, Sample


def test_literal_batch(sample):
    samples = [
        sample(0, [5, 6], [7], logprobs=[-0.5]),
        sample(1, [8], [9, 4], logprobs=[-0.1, -2.0]),
    ]
    (batch,) = pack(samples, 100)
    assert not batch.advantages.any()
    batch = with_advantages(batch, [np.float32([1]), np.float32([-1, -1])])
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 4]
    assert batch.token_ids.dtype == batch.cu_seqlens.dtype == batch.sample_ids.dtype == np.int64
    assert batch.cu_seqlens.tolist() == [0, 3, 6]
    assert batch.loss_mask.tolist() == [False, False, True, False, True, True]
    assert batch.rollout_logprobs.dtype == batch.advantages.dtype == np.float32
    np.testing.assert_array_equal(batch.rollout_logprobs, np.float32([0, 0, -0.5, 0, -0.1, -2]))
    assert batch.advantages.tolist() == [0, 0, 1, 0, -1, -1]
    assert batch.sample_ids.tolist() == [0, 1]
    assert targets(batch).tolist() == [2, 4, 5]


@st.composite
def random_samples(draw: st.DrawFn) -> list[Sample]:
    """Samples with environment spans; some completions are empty."""
    tokens, samples = st.integers(0, 8), []
    for i in range(draw(st.integers(0, 12))):
        prompt = draw(st.lists(tokens, min_size=1, max_size=30))
        completion = draw(st.lists(tokens, max_size=30))
        logprobs = [-(1.0 + position) for position in range(len(completion))]
        start, end = sorted(draw(st.tuples(*[st.integers(0, len(completion))] * 2)))
        plain = make_sample(i, prompt, completion, logprobs=logprobs)
        done = dataclasses.replace(plain.completion, environment=((start, end),))
        samples.append(dataclasses.replace(plain, completion=done))
    return samples


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(samples=random_samples(), budget=st.integers(1, 50))
def test_every_token_lands_once_in_the_first_batch_with_room(samples, budget):
    """First fit by decreasing length, with masks and log-probs next to their tokens."""
    room: list[int] = []
    expected: list[list[int]] = []
    kept = [i for i, s in enumerate(samples) if s.completion.token_ids]
    lengths = [len(s.prompt_token_ids) + len(s.completion.token_ids) for s in samples]
    for i in sorted(kept, key=lambda i: (-lengths[i], i)):
        k = next((k for k, left in enumerate(room) if lengths[i] <= left), len(room))
        if k == len(room):
            room.append(budget)
            expected.append([])
        room[k] -= lengths[i]
        expected[k].append(i)
    batches = pack(samples, budget)
    assert [batch.sample_ids.tolist() for batch in batches] == [sorted(ids) for ids in expected]
    for batch in batches:
        assert batch.num_tokens <= budget or len(batch.sample_ids) == 1
        starts, ends = batch.cu_seqlens, batch.cu_seqlens[1:]
        assert (starts[0], ends[-1]) == (0, batch.num_tokens)
        for i, start, end in zip(batch.sample_ids, starts, ends, strict=False):
            prompt, done = samples[i].prompt_token_ids, samples[i].completion
            assert tuple(batch.token_ids[start:end]) == (*prompt, *done.token_ids)
            ((first, last),) = done.environment
            mask = [not first <= position < last for position in range(len(done.token_ids))]
            assert batch.loss_mask[start:end].tolist() == [False] * len(prompt) + mask
            trained = batch.loss_mask[start:end]
            logprobs = np.float32([0.0] * len(prompt) + [*done.logprobs])
            assert (batch.rollout_logprobs[start:end][trained] == logprobs[trained]).all()
    # Values per sample return to their samples.
    values = [np.arange(trained_lengths(b).sum()) + 1000 * k for k, b in enumerate(batches)]
    back = by_sample(batches, values, len(samples))
    for batch, value in zip(batches, values, strict=True):
        assert by_batch(batch, back).tolist() == value.tolist()
    if batches:  # a sample in none of them has no values
        assert by_sample(batches, values, len(samples) + 1)[-1].tolist() == []


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(groups=st.lists(st.integers(0, 5), min_size=1, max_size=30), count=st.integers(1, 8))
def test_minibatches_take_every_sample_once_and_keep_groups_whole(groups, count):
    assume(count <= len(groups))
    parts = split_minibatches(groups, count)
    assert len(parts) == count
    assert all(part == sorted(part) and part for part in parts)
    assert sorted(i for part in parts for i in part) == list(range(len(groups)))
    if count <= len(set(groups)):
        homes = {(groups[i], k) for k, part in enumerate(parts) for i in part}
        assert len(homes) == len(set(groups)), "a group is cut"


def test_examples():
    batches = pack_examples([Example([1, 2], [3]), Example([4], [5, 6])], 3)
    assert [b.token_ids.tolist() for b in batches] == [[1, 2, 3], [4, 5, 6]]
    assert [b.loss_mask.tolist() for b in batches] == [[0, 0, 1], [0, 1, 1]]


def test_examples_have_no_log_probs_and_share_no_prompts(sample):
    (batch,) = pack_examples([Example([1] * 128, [2]), Example([1] * 128, [3])], 1000)
    assert not batch.rollout_logprobs.any()
    assert batch.stem_ids is None
    (batch,) = pack([sample(0, [1] * 128, [2]), sample(0, [1] * 128, [3])], 1000)
    assert batch.stem_ids is None


def test_an_update_may_have_a_single_sample():
    assert split_minibatches([0, 0], 2) == [[0], [1]]


def test_a_prompt_or_completion_without_tokens_is_named(sample):
    with pytest.raises(UserError, match=r"'p3' has no tokens"):
        pack([sample(3, [], [1])], 100)
    with pytest.raises(UserError, match=r"example 1: its completion"):
        pack_examples([Example([1], [2]), Example([1], [])], 3)


def test_environment_tokens_are_not_trained_on(sample):
    plain = sample(0, [1, 2], [3, 4, 5, 6, 7], logprobs=[-1.0, -2.0, 0.0, 0.0, -3.0])
    completion = dataclasses.replace(plain.completion, environment=((2, 4),))
    (batch,) = pack([dataclasses.replace(plain, completion=completion)], 100)
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert trained_lengths(batch).tolist() == [3]
    (batch,) = pack_examples([Example([1], [2, 3, 4], [(1, 2)])], 100)
    assert batch.loss_mask.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "groups, count, expected",
    [
        pytest.param([0, 1, 0, 1], 2, [[0, 2], [1, 3]], id="groups-not-neighbours"),
        pytest.param([0, 0, 1, 1, 2, 2], 2, [[0, 1], [2, 3, 4, 5]], id="uneven-groups"),
        pytest.param([0, 0, 0, 0], 2, [[0, 1], [2, 3]], id="one-group-is-cut"),
    ],
)
def test_split(groups, count, expected):
    assert split_minibatches(groups, count) == expected


def group(sample, index: int, prompt: int, completions: list[int]):
    return [sample(index, [index] + [1] * (prompt - 1), [2] * n) for n in completions]


@pytest.mark.parametrize("completion, shared", [(2543, True), (2545, False)])
def test_auto_shares_prompts_where_enough_is_saved(sample, completion: int, shared: bool) -> None:
    """A group of 8 saves 7 stems of 256 tokens, which is 8% of 8 * (256 + n) for n of 2544."""
    samples = group(sample, 0, 256, [completion] * 8)
    assert WORTH_SHARING == 0.08
    assert shares_prompts("auto", samples) is shared
    assert not shares_prompts("auto", samples, [0])
    assert shares_prompts(True, samples)
    assert not shares_prompts(False, samples)


def test_pairs_of_a_group_by_hand():
    # Sorted: 1.5 (sample 2), 0.5 (0), 0.2 (4), -0.3 (5), -0.9 (3), -1.0 (1).
    advantages = [0.5, -1.0, 1.5, -0.9, 0.2, -0.3]
    pairs = contrast_pairs(advantages, [7] * 6, keep=1.0)
    assert pairs == [Pair(2, 1, 2.5), Pair(0, 3, 1.4), Pair(4, 5, 0.5)]
    assert contrast_pairs(advantages, [7] * 6, keep=0.67) == pairs[:2]
    assert contrast_pairs(advantages, [7] * 6, keep=0.5) == pairs[:1]
    assert contrast_pairs(advantages, [7] * 6, keep=0.01) == pairs[:1], "one of each group"


def test_an_update_draws_its_share_of_pairs_by_weight_without_repetition():
    pairs = [Pair(2 * i, 2 * i + 1, weight) for i, weight in enumerate([1.0, 1.0, 2.0, 4.0])]
    seen: Counter[int] = Counter()
    for seed in range(500):
        minibatches = shuffled_minibatches(pairs, 2, seed)
        assert [len(batch) for batch in minibatches] == [4, 4]
        for batch in minibatches:
            assert len(set(batch)) == 4
            assert batch == sorted(batch)
            assert all(i + 1 in batch for i in batch if i % 2 == 0), "pairs stay together"
            seen.update(batch)
    # Without repetition, two of four: 4 comes more often than 2, and 2 than 1, less than in
    # proportion; the share of a draw's first pick alone is exactly the weight's.
    assert seen[6] > seen[4] > seen[0]
    assert abs(seen[0] - seen[2]) < 5 * np.sqrt(1000 * 0.25)
    assert shuffled_minibatches(pairs, 2, 3) == shuffled_minibatches(pairs, 2, 3)
    assert shuffled_minibatches(pairs, 2, 3) != shuffled_minibatches(pairs, 2, 4)


def test_pairs_that_tell_nothing_are_drawn_only_when_there_are_no_others():
    idle, telling = Pair(0, 1, 0.0), Pair(2, 3, 1.0)
    assert shuffled_minibatches([idle, telling], 2, seed=1) == [[2, 3], [2, 3]]
    assert shuffled_minibatches([idle], 1, seed=1) == [[0, 1]]


def test_a_step_trains_on_the_drawn_pairs_and_stays_exact(bigram):
    policy = bigram()
    samples = policy.draw((1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 1.0, 1.0))
    trainer = Trainer(
        policy, trainer_settings({"updates_per_step": 2}, data={"batch": "shuffle_r1"})
    )
    chosen = choose_minibatches(samples, trainer.settings, 0)
    assert [len(batch) for batch in chosen] == [2, 2], "one pair of four samples' two, twice"
    tokens = sum(len(samples[i].completion.token_ids) for batch in chosen for i in batch)
    before = snapshot(policy)
    metrics = trainer.step(samples).metrics
    assert metrics["mismatch/num_tokens"] == tokens
    assert metrics["mismatch/num_different"] == 0
    assert metrics["policy/active_fraction"] == 1.0
    assert (policy.masters["table.weight"] != before["table.weight"]).any()
    assert trainer.optimizer.num_updates == 2
