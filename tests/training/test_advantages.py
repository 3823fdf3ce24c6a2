"""Group advantages, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jetrl.errors import UserError
from jetrl.training.advantages import (
    ESTIMATORS,
    StepRewards,
    check_rewards,
    group_advantages,
    overlong_penalties,
)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e9 + 0.1])
def test_equal_rewards_give_exact_zero(reward, normalize_std):
    # The float64 mean of seven times 0.1 is not 0.1: without care this is 1e-17 / 1e-6.
    assert not group_advantages([reward] * 7, [0] * 7, normalize_std).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_reward_that_is_not_finite_is_named(bad):
    with pytest.raises(UserError, match=r"sample 2 \(group 9\)"):
        group_advantages([0, 1, bad], [9, 9, 9])


def test_a_group_of_one_has_advantage_0_and_groups_are_normalized_unless_told():
    advantages = group_advantages([5.0, 0.0, 1.0], [7, 9, 9])
    assert advantages == pytest.approx([0.0, -(0.5**0.5), 0.5**0.5], rel=2e-6)
    alone = StepRewards(np.array([5.0]), np.array([7]), [np.zeros(2)])
    assert ESTIMATORS["leave_one_out"](alone).advantages[0].tolist() == [0.0, 0.0]


def test_leave_one_out_compares_with_the_mean_of_the_others():
    rewards = np.array([1.0, 0.0, 0.5, 4.0])
    step = StepRewards(rewards, np.zeros(4, dtype=int), [np.zeros(1)] * 4)
    others = [np.delete(rewards, i).mean() for i in range(4)]
    found = np.concatenate(ESTIMATORS["leave_one_out"](step).advantages)
    assert found == pytest.approx(rewards - others, rel=1e-6)


def test_the_largest_reward_is_taken():
    largest = float(np.finfo(np.float32).max)
    assert check_rewards([largest, -largest], [0, 0])[0].tolist() == [largest, -largest]
    with pytest.raises(UserError, match="sample 0"):
        check_rewards([2 * largest], [0])


# Four sequences of 3, 2, 1 and 3 tokens. VERL: verl 0.9.1, verl/trainer/ppo/core_algos.py, called
# on them (padded to 3 tokens there) and its results typed in.
REWARDS, GROUPS, LENGTHS = [1.0, 0.0, 0.5, 2.0], [0, 0, 1, 1], [3, 2, 1, 3]
VALUES = [[0.5, 0.25, 0.75], [0.1, 0.2], [0.3], [1.0, 0.5, 1.5]]
DIGITS = 1.5e-7  # half a digit of theirs, and a float32 rounding near 2


def step(penalties=None, values=None):
    zeros = [np.zeros(n) for n in LENGTHS]
    return StepRewards(np.array(REWARDS), np.array(GROUPS), penalties or zeros, values)


def same_everywhere(*values):
    return [[value] * n for value, n in zip(values, LENGTHS, strict=True)]


def close(got, expected, tolerance=DIGITS):
    assert [len(part) for part in got] == LENGTHS
    assert all(part.dtype == np.float32 for part in got)
    np.testing.assert_allclose(
        np.concatenate(got), np.concatenate(expected), atol=tolerance, rtol=0
    )


@pytest.mark.parametrize(
    "name, options, verl",
    [
        ("group", {}, (0.7071058, -0.7071058, -0.7071062, 0.7071062)),
        ("group", {"normalize_std": False}, (0.5, -0.5, -0.75, 0.75)),
        ("leave_one_out", {}, (1.0, -1.0, -1.5, 1.5)),
        ("global", {}, (-0.0687614, -1.3064669, -0.6876142, 1.168944)),
        ("group_global", {}, (0.4494666, -1.1686131, -1.573133, 0.8539865)),
    ],
)
def test_estimators_against_verl(name, options, verl):
    close(ESTIMATORS[name](step(), **options).advantages, same_everywhere(*verl))


def test_gae_against_verl():
    values = [np.float32(v) for v in VALUES]
    found = ESTIMATORS["gae"](step(values=values), gamma=0.9, gae_lambda=0.8)
    verl = [[-0.4132251, 0.6617942, -0.1969632], [-0.9565403, -1.2855291], [-0.317915]]
    verl += [[-0.0247281, 2.1253107, 0.4077956]]
    close(found.advantages, verl, 5e-7)  # they round every step to float32
    returns = [[0.6606, 0.855, 1.0], [0.036, 0.0], [0.5], [1.3212, 1.71, 2.0]]
    close(found.returns, returns, 3e-7)


def test_the_smallest_buffer_and_the_smallest_step_count():
    assert overlong_penalties(np.array([3, 4]), max_tokens=4, buffer=1).tolist() == [0.0, 1.0]
    two = StepRewards(np.array([0.0, 1.0]), np.array([0, 1]), [np.zeros(1)] * 2)
    low, high = ESTIMATORS["global"](two).advantages
    assert low[0] == -high[0] < 0


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[0.1] * 3, [np.nan] * 3])
def test_a_step_that_compares_nothing_gives_exact_zero(name, rewards):
    # Normalized over tokens, the rounding error of a mean would be divided by 1e-4.
    values = [np.zeros(1, np.float32)] * 3
    step = StepRewards(np.array(rewards), np.zeros(3, int), [np.zeros(1)] * 3, values)
    for advantage in ESTIMATORS[name](step).advantages:
        np.testing.assert_array_equal(advantage, [0.0])


@pytest.mark.parametrize("name", ["group", "leave_one_out", "global", "group_global", "gae"])
def test_a_sample_without_a_reward_is_in_no_statistic_and_has_advantage_0(name):
    """TRL 1.16 takes a NaN-aware mean and deviation, and gives 0 to a sample without reward."""
    rewards, groups = [1.0, None, 0.0, 0.5, None, 2.0, 5.0], [0, 0, 0, 0, 1, 1, 1]
    lengths = [2, 3, 1, 2, 2, 1, 3]

    def estimated(chosen):
        reward_S, group_S = check_rewards([rewards[i] for i in chosen], [groups[i] for i in chosen])
        zeros = [np.zeros(lengths[i]) for i in chosen]
        values = [np.full(lengths[i], 0.25, np.float32) for i in chosen]
        return ESTIMATORS[name](StepRewards(reward_S, group_S, zeros, values))

    every, judged = range(7), [i for i in range(7) if rewards[i] is not None]
    found, expected = estimated(every), estimated(judged)
    for i, advantage in zip(judged, expected.advantages, strict=True):
        np.testing.assert_array_equal(found.advantages[i], advantage)
    for i in {*every} - {*judged}:
        np.testing.assert_array_equal(found.advantages[i], np.zeros(lengths[i]))
        if found.returns is not None:  # the critic learns nothing from it
            np.testing.assert_array_equal(found.returns[i], 0.25)
    if name == "group":
        trl = (1.0 - 0.5) / 0.5  # nanmean and nanstd with Bessel's correction
        assert found.advantages[0][0] == pytest.approx(trl, rel=1e-4)
