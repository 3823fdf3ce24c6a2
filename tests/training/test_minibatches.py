"""Shuffle-R1: which pairs are kept, how often they are drawn, and a step that is made on them."""

from __future__ import annotations

from collections import Counter

import numpy as np

from jetrl.settings.loading import Settings
from jetrl.training import Trainer
from jetrl.training.minibatches import (
    Pair,
    choose_minibatches,
    contrast_pairs,
    shuffled_minibatches,
)


def test_pairs_of_a_group_by_hand():
    # Sorted: 1.5 (sample 2), 0.5 (0), 0.2 (4), -0.3 (5), -0.9 (3), -1.0 (1).
    advantages = [0.5, -1.0, 1.5, -0.9, 0.2, -0.3]
    pairs = contrast_pairs(advantages, [7] * 6, keep=1.0)
    assert pairs == [Pair(2, 1, 2.5), Pair(0, 3, 1.4), Pair(4, 5, 0.5)]
    assert contrast_pairs(advantages, [7] * 6, keep=0.67) == pairs[:2]
    assert contrast_pairs(advantages, [7] * 6, keep=0.5) == pairs[:1]
    assert contrast_pairs(advantages, [7] * 6, keep=0.01) == pairs[:1], "one of each group"


def test_groups_may_be_mixed_odd_or_single_and_ties_go_by_number():
    advantages = [1.0, 0.0, -1.0, 0.0, 0.0, 3.0]
    assert contrast_pairs(advantages, [0, 1, 0, 1, 0, 2], keep=1.0) == [
        Pair(0, 2, 2.0),  # sample 4 is the middle of three
        Pair(1, 3, 0.0),
    ]


def test_an_update_draws_its_share_of_pairs_by_weight_without_repetition():
    pairs = [Pair(2 * i, 2 * i + 1, weight) for i, weight in enumerate([1.0, 1.0, 2.0, 4.0])]
    seen: Counter[int] = Counter()
    for seed in range(2000):
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
    assert abs(seen[0] - seen[2]) < 5 * np.sqrt(4000 * 0.25)
    assert shuffled_minibatches(pairs, 2, 3) == shuffled_minibatches(pairs, 2, 3)
    assert shuffled_minibatches(pairs, 2, 3) != shuffled_minibatches(pairs, 2, 4)


def test_pairs_that_tell_nothing_are_drawn_only_when_there_are_no_others():
    idle, telling = Pair(0, 1, 0.0), Pair(2, 3, 1.0)
    assert shuffled_minibatches([idle, telling], 2, seed=1) == [[2, 3], [2, 3]]
    assert shuffled_minibatches([idle], 1, seed=1) == [[0, 1]]


REWARDS = (1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 1.0, 1.0)


def settings(**data) -> Settings:
    return Settings.model_validate(
        {
            "data": {"batch": "shuffle_r1", **data},
            "train": {"updates_per_step": 2, "lr": 1e-2, "tokens_per_micro_batch": 8},
        }
    )


def test_a_step_trains_on_the_drawn_pairs_and_stays_exact(bigram):
    policy = bigram()
    samples = policy.draw(REWARDS)
    trainer = Trainer(policy, settings())
    chosen = choose_minibatches(samples, trainer.settings, 0)
    assert [len(batch) for batch in chosen] == [2, 2], "one pair of four samples' two, twice"
    tokens = sum(len(samples[i].completion.token_ids) for batch in chosen for i in batch)
    before = policy.masters["table.weight"].detach().clone()
    metrics = trainer.step(samples).metrics
    assert metrics["mismatch/num_tokens"] == tokens
    assert metrics["mismatch/num_different"] == 0
    assert metrics["policy/active_fraction"] == 1.0
    assert (policy.masters["table.weight"] != before).any()
    assert trainer.optimizer.num_updates == 2
