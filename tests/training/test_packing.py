"""Packing and the split into minibatches."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from jetrl.errors import UserError
from jetrl.training.minibatches import split_minibatches
from jetrl.training.packing import (
    _first_fit_decreasing,
    _Sequence,
    _Stem,
    by_batch,
    by_sample,
    pack,
    pack_examples,
    targets,
    trained_lengths,
    with_advantages,
)
from jetrl.types import Example


def advantages(samples):
    """Sample i has the advantage i + 1 at each of its tokens."""
    return [np.full(len(s.completion.token_ids), i + 1, np.float32) for i, s in enumerate(samples)]


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


def test_budget_fills_first_fit_decreasing_and_long_ones_stand_alone(sample):
    lengths = [3, 9, 4, 12, 6, 2]
    samples = [sample(i, [1] * (n - 1), [2]) for i, n in enumerate(lengths)]
    batches = pack(samples, 10)
    # By length: 12 alone, 9, then 6 + 4, then 3 + 2.
    assert [b.sample_ids.tolist() for b in batches] == [[3], [1], [2, 4], [0, 5]]
    assert [b.num_tokens for b in batches] == [12, 9, 10, 5]


def test_every_sample_is_packed_once_whatever_the_budget(sample):
    rng = np.random.default_rng(0)
    samples = []
    for i in range(40):
        prompt, completion = rng.integers(1, 9, 1 + i % 5), rng.integers(1, 9, 1 + i % 7)
        samples.append(
            sample(i // 4, prompt, completion, logprobs=rng.normal(size=len(completion)))
        )
    for budget in (1, 7, 16, 1000):
        batches = pack(samples, budget)
        assert sorted(i for b in batches for i in b.sample_ids) == list(range(40))
        for batch in batches:
            assert batch.num_tokens <= budget or batch.num_sequences == 1
            assert not batch.loss_mask[batch.cu_seqlens[:-1]].any()
            for i, start, end in zip(
                batch.sample_ids, batch.cu_seqlens, batch.cu_seqlens[1:], strict=False
            ):
                s = samples[i]
                middle = start + len(s.prompt_token_ids)
                assert tuple(batch.token_ids[start:middle]) == s.prompt_token_ids
                assert tuple(batch.token_ids[middle:end]) == s.completion.token_ids
                assert not batch.loss_mask[start:middle].any()
                assert batch.loss_mask[middle:end].all()
                np.testing.assert_array_equal(
                    batch.rollout_logprobs[middle:end], np.float32(s.completion.logprobs)
                )
                filled = with_advantages(batch, advantages(samples))
                assert (filled.advantages[middle:end] == i + 1).all()
                assert not filled.advantages[start:middle].any()
        again = pack(samples, budget)
        assert [b.sample_ids.tolist() for b in again] == [b.sample_ids.tolist() for b in batches]


def test_empty_prompt_is_refused(sample):
    with pytest.raises(UserError, match=r"'p3' has no tokens"):
        pack([sample(3, [], [1])], 100)


def test_values_of_samples_and_of_batches(sample):
    samples = [sample(i, [1] * (1 + i % 2), [2] * (i % 4)) for i in range(9)]
    batches = pack(samples, 5)
    assert [trained_lengths(b).tolist() for b in batches] == [
        [len(samples[i].completion.token_ids) for i in b.sample_ids] for b in batches
    ]
    numbers = [10.0 * i + np.arange(i % 4) for i in range(9)]
    values = [by_batch(batch, numbers) for batch in batches]
    back = by_sample(batches, values, len(samples))
    assert [v.tolist() for v in back] == [v.tolist() for v in numbers]


def test_examples():
    batches = pack_examples([Example([1, 2], [3]), Example([4], [5, 6])], 3)
    assert [b.token_ids.tolist() for b in batches] == [[1, 2, 3], [4, 5, 6]]
    assert [b.loss_mask.tolist() for b in batches] == [[0, 0, 1], [0, 1, 1]]
    with pytest.raises(UserError, match=r"example 1: its completion"):
        pack_examples([Example([1], [2]), Example([1], [])], 3)


def test_what_an_environment_said_is_no_target(sample):
    plain = sample(0, [1, 2], [3, 4, 5, 6, 7], logprobs=[-1.0, -2.0, 0.0, 0.0, -3.0])
    completion = dataclasses.replace(plain.completion, environment=((2, 4),))
    (batch,) = pack([dataclasses.replace(plain, completion=completion)], 100)
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert batch.rollout_logprobs.tolist() == [0, 0, -1, -2, 0, 0, -3]
    assert trained_lengths(batch).tolist() == [3]
    (batch,) = pack_examples([Example([1], [2, 3, 4], [(1, 2)])], 100)
    assert batch.loss_mask.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "groups, count, expected",
    [
        pytest.param([0, 0, 1, 1], 1, [[0, 1, 2, 3]], id="one"),
        pytest.param([0, 0, 1, 1], 2, [[0, 1], [2, 3]], id="by-group"),
        pytest.param([0, 1, 0, 1], 2, [[0, 2], [1, 3]], id="groups-not-neighbours"),
        pytest.param([0, 0, 1, 1, 2, 2], 2, [[0, 1], [2, 3, 4, 5]], id="uneven-groups"),
        pytest.param([0, 0, 0, 0], 2, [[0, 1], [2, 3]], id="one-group-is-cut"),
        pytest.param([0, 0, 1], 3, [[0], [1], [2]], id="fewer-groups-than-updates"),
    ],
)
def test_split(groups, count, expected):
    assert split_minibatches(groups, count) == expected


def test_split_of_too_few_samples_names_the_setting():
    with pytest.raises(UserError, match=r"train\.updates_per_step = 4 .* 3 samples"):
        split_minibatches([0, 0, 1], 4)


def test_each_sequence_goes_into_the_first_batch_that_has_room() -> None:
    """First fit, by decreasing length: the tree that finds the batch gives what a search gives."""
    draws = random.Random(0)
    for _ in range(200):
        budget = draws.randint(1, 50)
        lengths = {i: draws.randint(2, 60) for i in draws.sample(range(99), draws.randint(0, 30))}
        room: list[int] = []
        expected: list[list[int]] = []
        for i in sorted(lengths, key=lambda i: (-lengths[i], i)):
            k = next((k for k, left in enumerate(room) if lengths[i] <= left), len(room))
            if k == len(room):
                room.append(budget)
                expected.append([])
            room[k] -= lengths[i]
            expected[k].append(i)
        sequences = {i: _Sequence([0], [0] * (n - 1), [], []) for i, n in lengths.items()}
        stems = {i: _Stem(i, 0) for i in lengths}
        packed = _first_fit_decreasing(sequences, stems, budget)
        assert packed == [sorted(ids) for ids in expected]
