"""The inverse root of the QK norm has the same float32 bits from any guess of 2**-19.

It begins with `rsqrt.approx.ftz.f64`, whose bits may differ between GPUs. ptxas takes the same
first step from the same instruction for IEEE square roots on sm_80 to sm_120, so the guess is near
enough everywhere. Outside the cases below, the error before the last rounding (2**-103 of the root,
2**-103 of its inverse) is smaller than the distance of the exact result from the middle of two
float64. What remains are roots near a middle and inverses near a middle: all of them are here.
"""

from __future__ import annotations

import math
import random
import types
from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton", reason="it is there on Linux alone")

DRAWS = random.Random(0)
NEAREST = 128  # of 2**106 to 2**108: the error of a root is below 2**-103
NEAREST_INVERSE = 12  # of 2**106


def fma(a: float, b: float, c: float) -> float:
    """Return a * b + c, rounded once."""
    return float(Fraction(a) * Fraction(b) + Fraction(c))


def inverse_root(x: float, guess: float) -> tuple[float, float]:
    """Run the kernel's own operations on a number; return the root and its inverse."""
    from jetrl.kernels.rotary_triton import _inverse_root

    roots = []

    def traced_fma(a: float, b: float, c: float) -> float:
        roots.append(fma(a, b, c))
        return roots[-1]

    language = SimpleNamespace(
        fma=traced_fma,
        full_like=lambda _, value: value,
        inline_asm_elementwise=lambda *_, **__: guess,
        float64=None,
    )
    result = types.FunctionType(_inverse_root.fn.__code__, {"gl": language})(x)
    return roots[4], result  # error, series, guess, residual, root


def guesses(x: float) -> Iterator[float]:
    """Yield guesses at the limits of the error, within them, and with 20 bits as the hardware's."""
    exact = 1.0 / math.sqrt(x)
    for error in (-1.0, 1.0, 0.0, DRAWS.uniform(-1, 1)):
        guess = exact * (1.0 + error * 2.0**-19)
        yield guess
        if abs(error) < 1:
            yield float((np.float64(guess).view(np.int64) >> 32 << 32).view(np.float64))


def square_roots_modulo(a: int, bits: int) -> set[int]:
    """Return all s with s * s = a modulo 2**bits, for a = 1 modulo 8."""
    found = {1, 3, 5, 7}
    for k in range(4, bits + 1):
        near = {s + (high << (k - 2)) for s in found for high in range(4)}
        found = {s % (1 << k) for s in near if (s * s - a) % (1 << k) == 0}
    return found


def roots_near_a_middle() -> Iterator[float]:
    """Yield each x in [1, 4) whose root is a middle of two float64, but for a tiny distance."""
    for bits in (54, 55):  # x in [1, 2), in [2, 4)
        for distance in range(-NEAREST + 7, NEAREST, 8):
            for low in square_roots_modulo(-distance % 2**bits, bits):
                for middle in range(low, 2**54, 2**bits):
                    x = (middle * middle + distance) >> bits
                    if middle > 2**53 and 2**52 <= x < 2**53:
                        yield math.ldexp(x, bits - 106)


def inverses_near_a_middle() -> Iterator[float]:
    """Yield x in [1, 4) whose root has an inverse near the middle of two float64."""
    from sympy import divisors

    for distance in range(-NEAREST_INVERSE, NEAREST_INVERSE + 1):
        for root in divisors(2**106 - distance) if distance else ():
            if 2**52 <= root < 2**53 and (2**106 - distance) // root % 2:
                yield math.ldexp(root, -52) ** 2


def same_bits(x: float) -> None:
    root = math.sqrt(x)
    inverse = np.float32(1.0 / root)
    for guess in guesses(x):
        got, result = inverse_root(x, guess)
        assert got == root, (x.hex(), guess.hex())
        assert np.float32(result) == inverse, (x.hex(), guess.hex())
        assert abs(result - 1.0 / root) <= math.ulp(result)


def test_roots_near_a_middle() -> None:
    hard = list(roots_near_a_middle())
    assert len(hard) > 40
    for x in hard:
        same_bits(x)


def test_inverses_near_a_middle() -> None:
    hard = list(inverses_near_a_middle())
    assert len(hard) > 40
    for x in hard:
        same_bits(x)
        # The inverse may be the neighbor, and no neighbor is near the middle of two float32.
        low = np.float64(1.0 / math.sqrt(x)).view(np.int64) % 2**29
        assert abs(low - 2**28) > 2


def test_other_numbers() -> None:
    for exponent in (-40, -21, -20, 0, 1, 200, 255):  # eps is 1e-6 or so, squares below 2**256
        for _ in range(100):
            same_bits(math.ldexp(DRAWS.uniform(1, 2), exponent))
        below = math.ldexp(1, exponent)
        for _ in range(8):
            below = math.nextafter(below, 0)
            same_bits(below)
