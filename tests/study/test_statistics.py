"""The statistics of a study against tables, closed forms and cases computed by hand."""

from __future__ import annotations

import math
import random

import pytest
from benchmarks.study.statistics import (
    adjusted,
    beta_cdf,
    compare,
    flip_test,
    mean_interval,
    pairs_needed,
    share_interval,
    signed_rank_test,
    t_cdf,
    t_quantile,
    t_test,
)


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [  # the usual printed tables of Student's t, to three decimals
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 4, 2.776),
        (0.95, 4, 2.132),
        (0.975, 7, 2.365),
        (0.995, 9, 3.250),
        (0.975, 30, 2.042),
        (0.025, 4, -2.776),
        (0.5, 3, 0.0),
    ],
)
def test_t_quantiles_are_those_of_the_tables(
    probability: float, freedom: int, value: float
) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(value, abs=5e-4)


@pytest.mark.parametrize("t", [-30.0, -2.5, -0.1, 0.0, 0.7, 4.0, 1e4])
def test_t_has_a_closed_form_with_one_and_two_degrees_of_freedom(t: float) -> None:
    assert t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)
    assert t_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12)


def test_t_becomes_the_normal_distribution() -> None:
    normal = 0.5 * (1 + math.erf(1.3 / math.sqrt(2)))
    assert t_cdf(1.3, 1e7) == pytest.approx(normal, abs=1e-7)


@pytest.mark.parametrize("x", [0.01, 0.3, 0.5, 0.77, 0.999])
def test_beta_has_a_closed_form_with_whole_parameters(x: float) -> None:
    """I_x(a, b) is the chance of a successes or more in a + b - 1 draws."""
    for a, b in [(1, 1), (2, 3), (5, 1), (4, 7)]:
        n = a + b - 1
        chance = sum(math.comb(n, k) * x**k * (1 - x) ** (n - k) for k in range(a, n + 1))
        assert beta_cdf(x, a, b) == pytest.approx(chance, abs=1e-12)


def test_an_interval_computed_by_hand() -> None:
    """1, 2, 3, 4, 5: mean 3, standard deviation sqrt(2.5), half width 2.776 sqrt(2.5 / 5)."""
    interval = mean_interval([1, 2, 3, 4, 5], 0.95)
    assert (interval.mean, interval.n) == (3, 5)
    assert interval.high - 3 == pytest.approx(2.7764451 * math.sqrt(0.5), rel=1e-7)
    assert 3 - interval.low == pytest.approx(interval.high - 3)
    assert math.isnan(mean_interval([7.0], 0.95).low)


def test_paired_tests_computed_by_hand() -> None:
    """1, 2, 3: t = 2 / (1 / sqrt(3)) = sqrt(12) with 2 degrees of freedom."""
    t = math.sqrt(12)
    by_hand = 2 * (0.5 - t / (2 * math.sqrt(2 + t * t)))
    assert t_test([1, 2, 3]) == pytest.approx(by_hand)
    assert t_test([-1, -2, -3]) == pytest.approx(by_hand)
    assert flip_test([1, 2, 3]) == 2 / 8  # all three signs alike: 2 of 8 ways
    assert flip_test([1, -1]) == 1.0
    assert flip_test([3, -1]) == 1.0  # |2| is reached by 2, -2, 4 and -4
    assert flip_test([0.1, 0.1, 0.1, 0.1, 0.1]) == 2 / 32
    assert math.isnan(t_test([1.0]))
    assert math.isnan(flip_test([1.0]))


def test_signed_ranks_by_hand_and_against_all_signs():
    """Ranks 1 to 3 that are all positive are 1 of 8 ways on each side; zeros are left out."""
    assert signed_rank_test([0.1, 2.0, 3.0]) == 2 / 8
    assert signed_rank_test([0.1, 2.0, 300.0, 0.0]) == 2 / 8
    assert signed_rank_test([1.0, -1.0]) == 1.0
    assert signed_rank_test([0.0, 0.0]) == 1.0
    assert math.isnan(signed_rank_test([1.0]))
    # Differences that are their own ranks, ties among them: the test that flips their signs.
    for ranks in ([1, 2, 3, -4, 5], [1.5, 1.5, -3, 4.5, 4.5], [-2, 2, 2, 4, 5, 6, -7]):
        assert signed_rank_test([r / 10 for r in ranks]) == flip_test(ranks)


def test_signed_ranks_of_many_pairs():
    """n = 30 with a sum of 120 on one side: the tabled critical value for p 0.02 is 120."""
    small = {30, 29, 28, 27, 6}  # ranks that are negative; they add up to 120
    assert sum(small) == 120
    p = signed_rank_test([-r if r in small else r for r in range(1, 31)])
    assert 0.018 < p <= 0.02


def test_equivalence_computed_by_hand() -> None:
    """-1, 0, 1 with a margin of 2: both one-sided tests have t = 2 sqrt(3)."""
    t = 2 * math.sqrt(3)
    result = compare([-1, 0, 1], margin=2, level=0.95)
    assert result.equivalence_p == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)))
    assert result.t_p == 1.0


def test_no_difference_is_not_equivalence() -> None:
    """Two widely spread pairs differ by nothing that a test shows, and are not equivalent."""
    result = compare([-0.3, 0.31], margin=0.01, level=0.95)
    assert result.t_p > 0.9
    assert result.equivalence_p > 0.4


def test_equal_differences_have_no_spread() -> None:
    same, shifted = compare([0.0] * 5, 0.01, 0.95), compare([0.02] * 5, 0.01, 0.95)
    assert (same.t_p, same.equivalence_p, same.difference.high) == (1.0, 0.0, 0.0)
    assert (shifted.t_p, shifted.equivalence_p) == (0.0, 1.0)


def test_equivalence_agrees_with_the_interval() -> None:
    """TOST at 5% is the question if the 90% interval lies within the margin."""
    differences = [0.004, -0.002, 0.001, 0.006, -0.001]
    interval = mean_interval(differences, 0.90)
    widest = max(abs(interval.low), abs(interval.high))
    assert compare(differences, widest * 1.0001, 0.95).equivalence_p < 0.05
    assert compare(differences, widest * 0.9999, 0.95).equivalence_p > 0.05


def test_pairs_needed_for_equivalence() -> None:
    """With a spread of one margin: sqrt(n) >= t(0.95) + t(0.9), by the printed tables of t."""
    differences = [-math.sqrt(0.75), math.sqrt(0.75), -math.sqrt(0.75), math.sqrt(0.75)]
    assert math.sqrt(10) < 1.833 + 1.383  # nine degrees of freedom
    assert math.sqrt(11) > 1.812 + 1.372  # ten
    assert pairs_needed(differences, 1.0, 0.95) == 11
    assert pairs_needed(differences, 0.1, 0.95) is None
    assert pairs_needed([0.0], 0.1, 0.95) is None


def test_so_many_pairs_show_equivalence_four_times_of_five() -> None:
    source = random.Random(0)
    spread = 0.85 * math.sqrt(0.75)
    number = pairs_needed([-spread, spread, -spread, spread], 1.0, 0.95)
    assert number is not None
    draws = [[source.gauss(0, 0.85) for _ in range(number)] for _ in range(400)]
    shown = sum(compare(own, 1.0, 0.95).equivalence_p < 0.05 for own in draws)
    assert 400 * (0.8 - 0.06) < shown < 400 * (0.8 + 0.06)  # three standard deviations


def test_an_exact_interval_of_a_share() -> None:
    """With none of n the upper end is 1 - 0.025**(1 / n) (the rule of three's exact form)."""
    none, every = share_interval(0, 5, 0.95), share_interval(5, 5, 0.95)
    assert (none.low, none.high) == (0.0, pytest.approx(1 - 0.025**0.2))
    assert (every.low, every.high) == (pytest.approx(0.025**0.2), 1.0)
    half = share_interval(5, 10, 0.95)  # printed tables: 0.187 to 0.813
    assert (half.low, half.high) == (pytest.approx(0.187, abs=5e-4), pytest.approx(0.813, abs=5e-4))


def test_holm_computed_by_hand() -> None:
    assert adjusted([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert adjusted([0.5, 0.9])[1] == 1.0
    assert math.isnan(adjusted([math.nan, 0.01])[0])
    assert adjusted([math.nan, 0.01])[1] == 0.01
