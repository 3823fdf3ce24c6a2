"""Cosine, sine, powers and logarithms of float64, with the same bits on every machine.

Tables and constants of a model are made from them. Libraries differ in the last bit. Does not
import torch.

    cos_and_sin(x)   n = rint(x * (2 / pi)),  x - n * pi / 2 = r + e with pi / 2 = P1 + P2 + P3:
                     a = x - n * P1                            exact, as are n * P1 and n * P2
                     b, c = two_sum(a, -(n * P2))              b = a - n * P2 rounded, c its error
                     r, e = two_sum(b, c - n * P3)
                     z = r * r,  h = z / 2,  w = 1 - h
                     sin = r - ((z * (e / 2 - (z * r) * S(z)) - e) - (z * r) * S1)
                     cos = w + (((1 - w) - h) + (z * (z * C(z)) - r * e))
                     then by n mod 4: (cos, sin), (-sin, cos), (-cos, -sin), (sin, -cos)
    power, log       the nearest float64, from 50 decimal digits

S and C are fdlibm's polynomials (Sun Microsystems 1993), here by Horner's rule; errors are below a
unit of the last place plus 2**-85.
"""

from __future__ import annotations

import decimal

import numpy as np

_TWO_OVER_PI = 0.6366197723675814
# pi / 2: two parts of 28 bits, and the rest.
_P1, _P2, _P3 = 1.570796325802803, 9.920935739593517e-10, 5.721188726109832e-18
_MOST_TURNS = 2**25  # quarter turns whose products with a part of 28 bits are exact
_S1 = -1.66666666666666324348e-01
_SINE = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
)
_COSINE = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-09,
    -2.75573143513906633035e-07,
    2.48015872894767294178e-05,
    -1.38888888888741095749e-03,
    4.16666666666666019037e-02,
)
_DIGITS = decimal.Context(prec=50)


def cos_and_sin(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return cos(x) and sin(x) of float64 radians, |x| at most 5e7."""
    n = np.rint(x * _TWO_OVER_PI)
    assert n.size == 0 or np.abs(n).max() <= _MOST_TURNS, "an angle of more than 5e7 radians"
    rest, error = _two_sum(x - n * _P1, -(n * _P2))
    r, e = _two_sum(rest, error - n * _P3)
    z = r * r
    cubed = z * r
    sine = r - ((z * (0.5 * e - cubed * _horner(_SINE, z)) - e) - cubed * _S1)
    half = 0.5 * z
    w = 1.0 - half
    cosine = w + (((1.0 - w) - half) + (z * (z * _horner(_COSINE, z)) - r * e))
    quarter = n.astype(np.int64) & 3
    odd = (quarter & 1).astype(bool)
    first, second = np.where(odd, sine, cosine), np.where(odd, cosine, sine)
    negative = (quarter == 1) | (quarter == 2)
    return np.where(negative, -first, first), np.where(quarter >= 2, -second, second)


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a + b rounded, and its rounding error, exactly (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _horner(terms: tuple[float, ...], z: np.ndarray) -> np.ndarray:
    y = np.full_like(z, terms[0])
    for term in terms[1:]:
        y = y * z + term
    return y


def power(base: float, exponent: float) -> float:
    """Return base**exponent, base > 0, rounded to nearest."""
    return float(_DIGITS.power(decimal.Decimal(base), decimal.Decimal(exponent)))


def log(x: float) -> float:
    """Return log(x), x > 0, rounded to nearest."""
    return float(decimal.Decimal(x).ln(_DIGITS))
