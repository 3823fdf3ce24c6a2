"""Exact tests of counts: whether one arm loses more of its runs than another."""

from __future__ import annotations

import functools
import math

MOST_RUNS = 200  # a number of runs an arm beyond it is not named
_NEGLIGIBLE = 1e-9


def fisher_p(count: int, n: int, other_count: int, other_n: int) -> float:
    """Return the two-sided p-value of Fisher's exact test that two shares are equal.

    It is the probability of all tables with the same margins that are no more probable than the
    one that was seen.

    Args:
        count: The cases of the first group that have a property.
        n: The cases of the first group.
        other_count: The cases of the second group that have it.
        other_n: The cases of the second group.
    """
    total, having = n + other_n, count + other_count
    first = range(max(0, having - other_n), min(n, having) + 1)
    weights = {k: math.comb(n, k) * math.comb(other_n, having - k) for k in first}
    return sum(w for w in weights.values() if w <= weights[count]) / math.comb(total, having)


@functools.cache
def least_shown(n: int, other_count: int, other_n: int, level: float) -> int | None:
    """Return the least count of a group with which Fisher's test shows it above another group.

    Args:
        n: The cases of the group.
        other_count: The cases of the other group that have the property.
        other_n: The cases of the other group.
        level: The confidence, such as 0.95.

    Returns:
        The count; None where not even all cases would do.
    """
    low, high = other_count * n // other_n + 1, n  # from the first larger share on p falls
    if high < low or fisher_p(n, n, other_count, other_n) >= 1 - level:
        return None
    while low < high:
        middle = (low + high) // 2
        if fisher_p(middle, n, other_count, other_n) < 1 - level:
            high = middle
        else:
            low = middle + 1
    return low


def runs_needed(share: float, other: float, level: float, power: float = 0.8) -> int | None:
    """Return how many runs an arm would show that two true shares differ, with a probability.

    Args:
        share: The true share of the one arm, the higher one.
        other: The true share of the other arm.
        level: The confidence of Fisher's exact test.
        power: The probability.

    Returns:
        The number of runs of each arm; None for shares that do not differ so, or above `MOST_RUNS`.
    """
    if share <= other:
        return None
    low, high = 1, MOST_RUNS
    if _power(high, share, other, level) < power:
        return None
    while low < high:  # the power rises with the number of runs, but for small steps down
        middle = (low + high) // 2
        if _power(middle, share, other, level) >= power:
            high = middle
        else:
            low = middle + 1
    return low


def _power(n: int, share: float, other: float, level: float) -> float:
    """Return the probability that n runs of each arm show the one share above the other."""
    power = 0.0
    for count, chance in enumerate(_binomial(n, other)):
        if chance > _NEGLIGIBLE:
            least = least_shown(n, count, n, level)
            if least is not None:
                power += chance * sum(_binomial(n, share)[least:])
    return power


@functools.cache
def _binomial(n: int, share: float) -> tuple[float, ...]:
    """Return the probability of each count of n cases."""
    return tuple(math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(n + 1))
