"""The statistics of a study: intervals, paired tests and equivalence.

Most come from scipy. Written here are the signed-rank test (in scipy exact only without ties), the
Hodges-Lehmann estimate, and Holm's method.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median, stdev
from types import ModuleType

from jetrl.errors import UserError


def _stats() -> ModuleType:
    """Return scipy.stats, which only reports need."""
    try:
        from scipy import stats
    except ModuleNotFoundError:
        raise UserError(
            "the statistics of a study need scipy: pip install -e '.[dev]' installs it"
        ) from None
    return stats


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval.

    Attributes:
        low: The lower end; NaN for fewer than two values.
    """

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Comparison:
    """Paired differences between two arms.

    Attributes:
        median: The median difference, which one outlier does not move.
        t_p: The two-sided p-value of the paired t test; NaN for fewer than two pairs.
        rank_p: The two-sided p-value of the signed-rank test, which one outlier does not decide;
            NaN for fewer than two pairs.
        equivalence_p: The p-value of two one-sided t tests that the difference is within the
            margin; NaN for fewer than two pairs.
    """

    difference: Interval
    median: float
    t_p: float
    rank_p: float
    equivalence_p: float


def mean_interval(values: Sequence[float], level: float) -> Interval:
    """Return the mean of values with its t interval."""
    n, mean = len(values), fmean(values)
    if n < 2:
        return Interval(mean, math.nan, math.nan, n)
    half = float(_stats().t.ppf(0.5 + level / 2, n - 1)) * stdev(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


@functools.cache
def share_interval(count: int, n: int, level: float) -> Interval:
    """Return a share with its exact interval (Clopper and Pearson, 1934)."""
    found = _stats().binomtest(count, n).proportion_ci(level, method="exact")
    return Interval(count / n, float(found.low), float(found.high), n)


def compare(differences: Sequence[float], margin: float, level: float) -> Comparison:
    """Return the comparison of two arms from their differences, pair by pair."""
    above = _one_sided(differences, -margin)
    below = _one_sided([-difference for difference in differences], -margin)
    return Comparison(
        difference=mean_interval(differences, level),
        median=median(differences),
        t_p=t_test(differences),
        rank_p=signed_rank_test(differences),
        equivalence_p=max(above, below),
    )


def t_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the t test that the mean difference is 0."""
    if len(differences) < 2:
        return math.nan
    if stdev(differences) == 0.0:
        return 0.0 if any(differences) else 1.0
    return float(_stats().ttest_1samp(differences, 0.0).pvalue)


def signed_rank_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Wilcoxon's signed-rank test (1945), exact for any number.

    Differences of 0 are left out, and equal ones have the mean of their ranks. It is the
    permutation test that flips signs, of ranks in place of differences.
    """
    if len(differences) < 2:
        return math.nan
    differences = [round(d, 12) for d in differences]  # equal ones may differ in last bits
    sizes = sorted(abs(d) for d in differences if d)
    # Twice the mean rank of each size, a whole number: of the ranks first + 1 to last.
    ranks = {size: bisect_left(sizes, size) + 1 + bisect_right(sizes, size) for size in set(sizes)}
    # The number of ways to choose the signs, by the sum of the ranks of positive differences.
    ways = [1]
    for size in sizes:
        rank = ranks[size]
        longer = ways + [0] * rank
        for total, count in enumerate(ways):
            longer[total + rank] += count
        ways = longer
    own = sum(ranks[d] for d in differences if d > 0)
    smaller = min(sum(ways[: own + 1]), sum(ways[own:]))
    return min(1.0, 2 * smaller / 2 ** len(sizes))


def rank_estimate(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the Hodges-Lehmann estimate and its exact 95% interval, infinite for few pairs."""
    n = len(differences)
    averages = sorted((a + b) / 2 for i, a in enumerate(differences) for b in differences[i:])
    sets = [1] + [0] * len(averages)  # of ranks with each sum
    for rank in range(1, n + 1):
        for total in range(len(averages), rank - 1, -1):
            sets[total] += sets[total - rank]
    outside = next(k for k, below in enumerate(accumulate(sets)) if 40 * below > 2**n)
    if not outside:
        return median(averages), -math.inf, math.inf
    return median(averages), averages[outside - 1], averages[-outside]


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number by Holm's method (1979); NaN stays NaN."""
    order = sorted(
        (i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i]
    )
    result, highest = [math.nan] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p_values[index]))
        result[index] = highest
    return result


def _one_sided(differences: Sequence[float], bound: float) -> float:
    """Return the p-value of the t test that the mean difference is not above a bound."""
    n = len(differences)
    if n < 2:
        return math.nan
    distance = fmean(differences) - bound
    if stdev(differences) == 0.0:
        return 0.0 if distance > 0 else 1.0 if distance < 0 else 0.5
    return float(_stats().ttest_1samp(differences, bound, alternative="greater").pvalue)


def fisher_p(count: int, n: int, other_count: int, other_n: int) -> float:
    """Return the two-sided p-value of Fisher's exact test that two shares are equal.

    It is the probability of all tables with the same margins that are no more probable than the
    one that was seen.
    """
    table = [[count, n - count], [other_count, other_n - other_count]]
    return float(_stats().fisher_exact(table).pvalue)


def least_fisher_p(count: int, n: int, other_n: int) -> float:
    """Return the least p-value of `fisher_p` if both groups together have `count` cases."""
    first = range(max(0, count - other_n), min(n, count) + 1)
    return min(fisher_p(k, n, count - k, other_n) for k in first)
