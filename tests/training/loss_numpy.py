"""The definitions of `precision.exact` and `training.loss_math` once more, in NumPy and integers.

Written from their docstrings, to compare bits: float32 operations one at a time, and sums of Python
integers. No function here calls jetrl.
"""

from __future__ import annotations

import math

import numpy as np

F32 = np.float32
_TERMS = (
    *(1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3),
    *(4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
)


def reduced(x):
    n = np.rint(x * F32(1.4426950408889634))
    r = (x - n * F32(0.693359375)) - n * F32(-2.12194440e-4)
    y = np.full_like(r, F32(_TERMS[0]))
    for term in _TERMS[1:]:
        y = y * r + F32(term)
    return n, y * r * r + r


def exp(x):
    n, y = reduced(np.clip(x, F32(-88), F32(89)))
    with np.errstate(over="ignore"):
        grown = np.ldexp(y + F32(1), n.astype(np.int32)).astype(np.float32)
    return np.where(x < F32(-87), F32(0), grown)


def expm1(x):
    n, y = reduced(np.clip(x, F32(-88), F32(89)))
    return np.where(n == 0, y, exp(x) - F32(1))


def log64(x):
    """The logarithm of float64 numbers, by 2 atanh((m - 1) / (m + 1))."""
    m, e = np.frexp(x)
    low = m < math.sqrt(0.5)
    m, e = np.where(low, m * 2, m), np.where(low, e - 1, e)
    s = (m - 1) / (m + 1)
    series = np.full_like(s, 1 / 25)
    for odd in range(23, 0, -2):
        series = series * (s * s) + 1 / odd
    return e * 0.6931471805599453 + 2 * s * series


def sigmoid(x):
    t = exp(-np.abs(x))
    return np.where(x >= 0, F32(1), t) / (F32(1) + t)


def exact_sum(x):
    """The sum of integers on a grid of 30 bits below the largest |x|, as a float64."""
    x = np.asarray(x, np.float64)
    if not x.size:
        return 0.0
    _, exponent = math.frexp(np.abs(x).max())
    step = math.ldexp(1.0, int(exponent) - 30)
    return sum(int(n) for n in np.rint(x / step)) * step


def over_sequences(x, lengths, mean):
    ends = np.cumsum(lengths)
    parts = np.split(x, ends[:-1])
    sums = np.array([exact_sum(part) for part in parts], np.float32)
    if mean:
        sums = sums / np.asarray(lengths, np.float32)
    return np.repeat(sums, lengths)


def softmax_parts(logits, temperature):
    """z - m, exp(z - m) and its sum on the grid of 2**-30, per row."""
    z = logits / F32(temperature)
    shifted = z - z.max(-1, keepdims=True)
    mass = exp(shifted)
    return shifted, mass, grid_sum(mass)


def grid_sum(x):
    units = np.rint(x.astype(np.float64) * 2.0**30).astype(np.int64)
    return units.sum(-1, keepdims=True).astype(np.float64) / 2.0**30


def chosen_logprobs(logits, chosen, temperature):
    """Log-probs, entropy and variance of rows."""
    shifted, mass, total = softmax_parts(logits, temperature)
    lse, rows = log64(total), np.arange(len(logits))
    weighted = mass * np.maximum(shifted, F32(-1e30))
    mean = grid_sum(weighted) / total
    square = grid_sum(weighted * np.maximum(shifted, F32(-1e30))) / total
    logprobs = shifted[rows, chosen] - lse[:, 0].astype(np.float32)
    variance = np.maximum(square - mean * mean, 0.0)
    return logprobs, (lse - mean)[:, 0].astype(np.float32), variance[:, 0].astype(np.float32)


def logits_gradient(logits, chosen, temperature, grad):
    _, mass, total = softmax_parts(logits, temperature)
    gradient = -(mass / total.astype(np.float32))
    gradient[np.arange(len(logits)), chosen] += F32(1)
    return gradient * (grad[:, None] / F32(temperature))
