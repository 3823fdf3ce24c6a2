"""Sums, means, exp and log of numbers on the host, with the same bits on every machine.

NumPy and the C library promise neither the order of a sum nor the last bit of exp and log. Here
sums are rounded once (`math.fsum`), and the functions are IEEE float64 operations in a written
order. Does not import torch.

    exact_sum(x)   the exact sum, rounded once
    mean(x)        exact_sum(x) / n
    variance(x)    exact_sum(d * d) / (n - ddof), d = x - mean(x)

    exp(x)         n = rint(x * log2(e)),  r = (x - n * ln2_high) - n * ln2_low
                   (1 + (r + (r * r) * P(r))) * 2**n
    expm1(x)       r + (r * r) * P(r) if n = 0, else exp(x) - 1
    cos(x)         1 - x**2 / 2! + ... + x**24 / 24! by Horner's rule in x * x, for x <= pi / 2
    log(x)         x = m * 2**e with sqrt(0.5) <= m < sqrt(2),  s = (m - 1) / (m + 1)
                   e * ln2 + (2 * s) * (1 + s**2 / 3 + ... + s**24 / 25), by Horner's rule

P is the Taylor series of (exp(r) - 1 - r) / r**2, with terms 1 / k! for k = 2 to 14, by Horner's
rule. Errors are within 2 ulp (exp) and 5 ulp (expm1, log).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

_LOG2_E = 1.4426950408889634
_LN2 = 0.6931471805599453
_LN2_HIGH = 6.93147180369123816490e-01  # 33 bits, so that n * _LN2_HIGH is exact
_LN2_LOW = 1.90821492927058770002e-10
_TERMS = tuple(1.0 / math.factorial(k) for k in range(14, 1, -1))
_LEAST, _MOST = -746.0, 710.0  # exp is 0 below and infinite above


def exact_sum(values: np.ndarray | Iterable[float]) -> float:
    """Return the sum, rounded once; infinite or NaN if a value is."""
    numbers = _float64(values)
    try:
        return math.fsum(numbers.ravel().tolist())
    except (OverflowError, ValueError):  # too large, or infinities of both signs
        with np.errstate(over="ignore", invalid="ignore"):
            return float(numbers.sum())


def mean(values: np.ndarray | Iterable[float]) -> float:
    """Return the mean of at least one value."""
    numbers = _float64(values)
    return exact_sum(numbers) / numbers.size


def variance(values: np.ndarray | Iterable[float], ddof: int = 0) -> float:
    """Return the variance of more than `ddof` values."""
    numbers = _float64(values)
    centered = numbers - mean(numbers)
    return exact_sum(centered * centered) / (numbers.size - ddof)


def exp(x: np.ndarray) -> np.ndarray:
    """Return exp(x), float64."""
    x = np.asarray(x, np.float64)
    n, y = _reduced_expm1(x)
    # ldexp is exact; it rounds once below the smallest normal number.
    with np.errstate(over="ignore", under="ignore"):
        return np.where(np.isnan(x), np.nan, np.ldexp(1.0 + y, n))


def expm1(x: np.ndarray) -> np.ndarray:
    """Return exp(x) - 1, float64."""
    n, y = _reduced_expm1(np.asarray(x, np.float64))
    return np.where((n == 0) & ~np.isnan(x), y, exp(x) - 1.0)


def log(x: float) -> float:
    """Return log(x) for finite x > 0."""
    # x = m * 2**e with m around 1; log(m) = 2 atanh(s), by its series.
    m, e = math.frexp(x)
    if m < math.sqrt(0.5):
        m, e = m * 2.0, e - 1
    s = (m - 1.0) / (m + 1.0)
    series = 1.0 / 25.0
    for odd in range(23, 0, -2):
        series = series * (s * s) + 1.0 / odd
    return e * _LN2 + 2.0 * s * series


def cos_of_half_turns(turns: float) -> float:
    """Return cos(pi * turns) for 0 <= turns <= 1, exactly 1 and -1 at the ends."""
    if turns > 0.5:
        return -cos_of_half_turns(1.0 - turns)
    square = (math.pi * turns) * (math.pi * turns)
    series = 0.0
    for even in range(24, -1, -2):
        sign = 1.0 if even % 4 == 0 else -1.0
        series = series * square + sign / math.factorial(even)
    return series


def _float64(values: np.ndarray | Iterable[float]) -> np.ndarray:
    return np.asarray(values if isinstance(values, np.ndarray) else list(values), np.float64)


def _reduced_expm1(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return n, int32, and exp(r) - 1, with x = n * ln 2 + r; NaN as 0."""
    # Infinite and NaN values would have no integer n.
    x = np.clip(np.nan_to_num(x, posinf=_MOST, neginf=_LEAST), _LEAST, _MOST)
    n = np.rint(x * _LOG2_E)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    # Taylor series, by Horner's rule.
    y = np.full_like(r, _TERMS[0])
    for term in _TERMS[1:]:
        y = y * r + term
    return n.astype(np.int32), r + (r * r) * y
