"""The statistics of a study against tables, closed forms and cases computed by hand."""

from __future__ import annotations

import itertools
import math
from statistics import stdev

import pytest
from benchmarks.study.statistics import (
    Interval,
    adjusted,
    compare,
    mean_interval,
    signed_rank_test,
    t_test,
)
from benchmarks.study.tables import shown_interval, shown_mean


@pytest.mark.parametrize(
    ("level", "n", "quantile"),
    [(0.95, 3, 4.303), (0.95, 5, 2.776), (0.99, 10, 3.250), (0.95, 31, 2.042)],
)
def test_intervals_have_the_quantiles_of_printed_tables(
    level: float, n: int, quantile: float
) -> None:
    values = [float(i) for i in range(n)]
    interval = mean_interval(values, level)
    half = quantile * stdev(values) / math.sqrt(n)
    assert interval.high - interval.mean == pytest.approx(half, rel=2e-4)
    assert interval.mean - interval.low == pytest.approx(half, rel=2e-4)


def test_a_mean_reward_that_is_not_a_share_is_shown_as_a_number() -> None:
    assert [shown_mean(mean) for mean in (0.776, 1.53, -0.2)] == ["77.6%", "1.53", "-0.2"]
    share, above = Interval(0.5, 0.4, 1.2, 3), Interval(1.53, 0.9, 2.16, 3)
    assert shown_interval(share) == "50.00% [40.00, 100.00]"
    assert (shown_interval(above), shown_interval(above, signed=True)) == ("1.53 [0.9, 2.16]",) * 2
    assert shown_interval(Interval(-0.2, math.nan, math.nan, 1)) == "-0.2"
    assert shown_interval(Interval(-0.2, -0.3, -0.1, 3), signed=True) == "-20.00% [-30.00, -10.00]"


def test_paired_tests_computed_by_hand() -> None:
    """1, 2, 3: t = 2 / (1 / sqrt(3)) = sqrt(12) with 2 degrees of freedom."""
    t = math.sqrt(12)
    by_hand = 2 * (0.5 - t / (2 * math.sqrt(2 + t * t)))
    assert t_test([1, 2, 3]) == pytest.approx(by_hand)
    assert t_test([-1, -2, -3]) == pytest.approx(by_hand)
    assert math.isnan(t_test([1.0]))


def test_signed_ranks_by_hand_and_against_all_signs():
    """Ranks 1 to 3 that are all positive are 1 of 8 ways on each side; zeros are left out."""
    assert signed_rank_test([0.1, 2.0, 3.0]) == 2 / 8
    assert signed_rank_test([0.1, 2.0, 300.0, 0.0]) == 2 / 8
    assert signed_rank_test([1.0, -1.0]) == 1.0
    assert signed_rank_test([0.0, 0.0]) == 1.0
    assert math.isnan(signed_rank_test([1.0]))
    # Differences that are their own ranks, ties among them: the test that flips their signs.
    for ranks in ([1, 2, 3, -4, 5], [1.5, 1.5, -3, 4.5, 4.5], [-2, 2, 2, 4, 5, 6, -7]):
        sums = [
            sum(sign * rank for sign, rank in zip(signs, ranks, strict=True))
            for signs in itertools.product((1, -1), repeat=len(ranks))
        ]
        as_far = sum(abs(one) >= abs(sum(ranks)) for one in sums)
        assert signed_rank_test([r / 10 for r in ranks]) == as_far / len(sums)


def test_equivalence_computed_by_hand() -> None:
    """-1, 0, 1 with a margin of 2: both one-sided tests have t = 2 sqrt(3)."""
    t = 2 * math.sqrt(3)
    result = compare([-1, 0, 1], margin=2, level=0.95)
    assert result.equivalence_p == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)))
    assert result.t_p == 1.0


def test_holm_computed_by_hand() -> None:
    assert adjusted([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert adjusted([0.5, 0.9])[1] == 1.0
    assert math.isnan(adjusted([math.nan, 0.01])[0])
    assert adjusted([math.nan, 0.01])[1] == 0.01
