"""Group advantages, worked by hand."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from jetrl.errors import UserError
from jetrl.training.advantages import STD_EPS, group_advantages


def test_without_std_is_reward_minus_group_mean():
    got = group_advantages([1, 0, 0, 1, 0.5, 0.5], [0, 0, 0, 0, 1, 1], normalize_std=False)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.float32([0.5, -0.5, -0.5, 0.5, 0, 0]))


def test_with_std_by_hand():
    # Rewards 1, 0, 0, 0: mean 1/4, sample variance (9 + 1 + 1 + 1)/16/3 = 1/4, deviation 1/2.
    got = group_advantages([1, 0, 0, 0], [5, 5, 5, 5])
    expected = np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + STD_EPS)
    np.testing.assert_array_equal(got, expected.astype(np.float32))


def test_members_of_a_group_need_not_be_neighbours():
    got = group_advantages([1, 10, 3, 20], [0, 1, 0, 1], normalize_std=False)
    np.testing.assert_array_equal(got, np.float32([-1, -5, 1, 5]))


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e9 + 0.1])
def test_equal_rewards_give_exact_zero(reward, normalize_std):
    # The float64 mean of seven times 0.1 is not 0.1: without care this is 1e-17 / 1e-6.
    assert not group_advantages([reward] * 7, [0] * 7, normalize_std).any()


def test_group_of_one_is_zero():
    assert group_advantages([3.0, 1.0], [0, 1]).tolist() == [0, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_reward_that_is_not_finite_is_named(bad):
    with pytest.raises(UserError, match=r"sample 2 \(group 9\)"):
        group_advantages([0, 1, bad], [9, 9, 9])


def test_lengths_must_agree():
    with pytest.raises(ValueError):
        group_advantages([1.0], [0, 0])


def test_imports_without_torch():
    code = (
        "import sys, jetrl.training.advantages, jetrl.training.packing, jetrl.training.mismatch;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
