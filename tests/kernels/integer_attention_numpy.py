"""Integer attention in NumPy, one query at a time: the definition of the docstrings, word by word.

It shares no code with the package. A fused multiply-add is one of fractions, if float64 could be
wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from tests.precision.test_exact import rounded_once

F = np.float32
Array = NDArray[np.generic]
P = [F(x) for x in (32509.662109375, 22539.30078125, 7887.7734375, 1793.7412109375)]


State = tuple[np.float32, np.float32, Array]


def fma(a: Array, b: Array, c: Array) -> Array:
    a, b, c = (np.atleast_1d(x).astype(float) for x in np.broadcast_arrays(a, b, c))
    # float64's sum is off by half a place at most, which decides only next to a middle of two.
    total = a * b + c
    low = total.view(np.int64) & (2**29 - 1)
    result = total.astype(F)
    for at in zip(*np.nonzero(abs(low - 2**28) <= 1), strict=True):
        exact = [Fraction(x[at]) for x in (a, b, c)]
        result[at] = rounded_once(exact[0] * exact[1] + exact[2])
    return result


@dataclass
class Sequence:
    """Codes, int64, and scales of one sequence: q [T, H, D], k and v [T, D] of one head."""

    q: Array
    sq: Array
    k: Array
    sk: Array
    v: Array
    sv: Array


def exponentials(y: Array, a: np.float32, n: np.float32) -> Array:
    u = np.maximum(fma(y, a, -n), F(-40))
    m = np.rint(u)
    f = u - m
    p = fma(fma(fma(P[3], f, P[2]), f, P[1]), f, P[0])
    return np.ldexp(p, m.astype(np.int64)).astype(F)


def scores(s: Sequence, head: int, i: int, keys: Array) -> tuple[Array, np.float32]:
    """Return y of some keys, and a."""
    a = s.sq[i, head] * F(math.log2(math.e) / math.sqrt(s.k.shape[1]))
    return (s.k[keys] @ s.q[i, head]).astype(F) * s.sk[keys], a


def block(s: Sequence, head: int, i: int, start: int) -> State:
    """Return the state (n, C, fl(O) * r) of the block of keys from `start`, for query i."""
    keys = np.arange(start, min(start + 128, i + 1))
    y, a = scores(s, head, i, keys)
    x = a * y.max()
    n = np.ceil(fma(abs(x), F(2.0**-22), x))[0]
    e = exponentials(y, a, n)
    r = s.sv[keys].max()
    g = s.sv[keys] * (F(1) / r)
    d = np.rint(e.astype(float) * g)  # the product is exact
    assert max(high(d)) <= 127
    return n, F(np.rint(e).sum()), (d @ s.v[keys]).astype(F) * r


def folded(states: Iterable[State]) -> State:
    n, mass, total = F(-np.inf), F(0), np.zeros(1, F)
    for own, own_mass, own_total in states:
        largest = max(n, own)
        z, z2 = (np.ldexp(F(1), int(max(x - largest, -100))) for x in (n, own))
        n, mass, total = largest, mass * z + own_mass * z2, total * z + own_total * z2
    return n, mass, total


def forward(s: Sequence, head: int, i: int) -> State:
    """Return N, L and out, before it is rounded to bfloat16, of query i."""
    n, mass, total = folded(
        folded(block(s, head, i, start) for start in range(first, min(first + 1024, i + 1), 128))
        for first in range(0, i + 1, 1024)
    )
    return n, mass, total * (F(1) / mass)


def planes(x: Array) -> tuple[Array, np.float32]:
    """Return the integers and the scale of one group of numbers."""
    r = max(F(np.abs(x).max(initial=0)) * F(1 + 2.0**-7), F(2.0**-101))
    t = math.frexp(r)[1]
    code = np.rint(np.ldexp(x.astype(float), 15 - t)).astype(np.int64)
    assert np.abs(high(code)).max(initial=0) <= 127
    return code, F(2.0 ** (t - 15))


def high(code: Array) -> Array:
    return (code + 128) // 256


def backward(s: Sequence, out: Array, do: Array, counted: Array) -> tuple[Array, Array, Array]:
    """Return dQ [T, H, D], dK and dV [T, D], without 1 / sqrt(D), from out and dO [T, H, D]."""
    length, heads, _ = s.q.shape
    q, k, v = s.q, s.k, s.v
    dq, (dk, dv) = np.zeros(q.shape, F), np.zeros((2, *k.shape), F)
    for head in range(heads):
        w, ds = np.zeros((2, length, length), F)
        codes = np.zeros_like(k)
        for i in np.flatnonzero(counted):
            n, mass, _ = forward(s, head, i)
            (codes[i], sdo), (o, so) = planes(do[i, head]), planes(out[i, head])
            delta = F(codes[i] @ o) * so
            keys = np.arange(i + 1)
            y, a = scores(s, head, i, keys)
            w[i, keys] = exponentials(y, a, n) * (F(1) / mass * sdo)
            ds[i, keys] = w[i, keys] * fma((v[keys] @ codes[i]).astype(F), s.sv[keys], -delta)
            for start in range(0, i + 1, 128):
                seen = keys[start : start + 128]
                code, scale = planes(ds[i, seen] * s.sk[seen])
                dq[i, head] += (code @ k[seen]).astype(F) * scale
        head_k, head_v = np.zeros((2, *k.shape), F)
        for j in range(length):
            for first in range(j // 64 * 64, length, 64):
                rows = np.arange(max(first, j), min(first + 64, length))
                rows = rows[counted[rows]]
                code, scale = planes(ds[rows, j] * s.sq[rows, head])
                head_k[j] += (code @ q[rows, head]).astype(F) * scale
                code, scale = planes(w[rows, j])
                both, do_high = code @ codes[rows], high(codes[rows])
                low = (code - 256 * high(code)) @ (codes[rows] - 256 * do_high)
                head_v[j] += ((both - low) // 256).astype(F) * F(256 * scale)
        dk, dv = dk + head_k, dv + head_v
    return dq, dk, dv
