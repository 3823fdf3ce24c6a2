"""Cosine, sine, powers and logarithms: rounded as they must be, whatever the library."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from tests.models.test_tiny import CONFIG

from jetrl.kernels.rotary import rotary_table
from jetrl.models.rope import frequencies_of
from jetrl.models.tiny import RandomWeights
from jetrl.precision.angles import cos_and_sin, log, power

mpmath = pytest.importorskip("mpmath")


def test_cosines_and_sines_are_within_one_ulp() -> None:
    """Also at the angles that are hardest to reduce, next to multiples of pi / 2."""
    g = np.random.default_rng(0)
    multiples = np.pi / 2 * np.concatenate([np.arange(1, 200), g.integers(1, 2**24, 200)])
    x = np.concatenate([g.uniform(-5e7, 5e7, 500), g.uniform(-1, 1, 300), multiples, [0.0, 1e-30]])
    for found, true in zip(cos_and_sin(x), (mpmath.cos, mpmath.sin), strict=True):
        with mpmath.workprec(200):
            for value, angle in zip(found.tolist(), x.tolist(), strict=True):
                exact = true(mpmath.mpf(angle))
                assert abs(exact - value) <= math.ulp(value) + 2.0**-85


def test_rotary_table_is_rounded_to_nearest() -> None:
    """Each float32 of some positions of a context of a million is the one next to the truth."""
    frequencies = frequencies_of(128, 1e6, None)
    positions = [1, 511, 512, 77_777, 131_071]
    table = rotary_table(frequencies, 131_072).numpy()
    for position in positions:
        for pair, frequency in enumerate(frequencies.tolist()):
            angle = position * frequency
            with mpmath.workprec(200):
                exact = [float(f(mpmath.mpf(angle))) for f in (mpmath.cos, mpmath.sin)]
            assert table[position, :, pair].tolist() == [float(np.float32(x)) for x in exact]


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
def test_frequencies_are_rounded_to_nearest(theta: float) -> None:
    with mpmath.workprec(200):
        powers = [float(mpmath.mpf(theta) ** (mpmath.mpf(2 * i) / 128)) for i in range(64)]
    assert frequencies_of(128, theta, None).tolist() == [1.0 / p for p in powers]


def test_powers_and_logarithms() -> None:
    assert power(10000.0, 0.5) == 100.0
    assert power(3.0, 0.0) == 1.0
    for x in (0.1, 1.0, 4.0, 32768.0, 1e6):
        with mpmath.workprec(200):
            assert log(x) == float(mpmath.log(mpmath.mpf(x)))


def test_random_weights_are_the_written_function_of_uniform_draws() -> None:
    """A matrix whose number of values is no multiple of 16 drops the last draws."""
    weights = RandomWeights(CONFIG, seed=5)
    name = next(iter(weights.names))
    found = weights[name].flatten().numpy()
    generator = torch.Generator().manual_seed(5)
    uniform = torch.empty(-(-found.size // 16) * 16).uniform_(generator=generator).tolist()
    for block in range(0, 160, 16):
        for i in range(8):
            with mpmath.workprec(200):
                radius = mpmath.sqrt(-2 * mpmath.log(1 - mpmath.mpf(uniform[block + i])))
                angle = 2 * mpmath.pi * mpmath.mpf(uniform[block + i + 8])
                pair = [float(radius * f(angle)) * 0.02 for f in (mpmath.cos, mpmath.sin)]
            for place, true in zip((block + i, block + i + 8), pair, strict=True):
                assert abs(Fraction(float(found[place])) - Fraction(true)) <= 2.0**-23 * abs(true)
