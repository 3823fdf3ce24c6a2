"""The arithmetic that the references stand on: exact in any order, right to the last bits."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from jetrl.precision.exact import exact_matmul, exp_nonpositive, fma, sigmoid, square_root


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("k", [64, 4096])
def test_matmul_does_not_depend_on_the_order_of_k(k: int) -> None:
    a, b = (torch.randn(s, generator=generator(k)).bfloat16() for s in ((5, k), (k, 7)))
    order = torch.randperm(k, generator=generator(1))
    assert torch.equal(exact_matmul(a, b), exact_matmul(a[:, order], b[order]))


def test_matmul_of_a_row_does_not_depend_on_other_rows() -> None:
    a, b = (torch.randn(s, generator=generator()).bfloat16() for s in ((33, 256), (256, 64)))
    together = exact_matmul(a, b)
    assert all(torch.equal(exact_matmul(a[i : i + 1], b)[0], together[i]) for i in range(33))


def test_exp_is_within_one_ulp() -> None:
    x = -torch.rand(200_000, generator=generator()) * 87
    true = x.double().exp()
    assert ((exp_nonpositive(x).double() - true) / true).abs().max() <= 2.0**-23
    edge = torch.tensor([0.0, -0.0, -1000.0, -torch.inf, torch.nan])
    assert exp_nonpositive(edge)[:4].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert exp_nonpositive(edge)[4].isnan()


def test_sigmoid_is_accurate_on_both_sides() -> None:
    x = torch.linspace(-80, 80, 10_001)
    true = x.double().sigmoid()
    assert ((sigmoid(x).double() - true) / true).abs().max() <= 2.0**-22


@pytest.mark.parametrize("function", [exp_nonpositive, sigmoid], ids=lambda f: f.__name__)
def test_elementwise_results_do_not_depend_on_the_place_in_an_array(function) -> None:
    x = -torch.rand(1003, generator=generator()) * 20
    whole = function(x)
    for start, size in ((0, 1), (1, 7), (500, 33), (17, 986)):
        assert torch.equal(function(x[start : start + size]), whole[start : start + size])


def test_square_root_is_rounded_to_nearest() -> None:
    """NumPy's is the processor's instruction, which IEEE 754 demands to be right."""
    bits = torch.randint(0, 0x7F800001, (200_000,), generator=generator(), dtype=torch.int32)
    x = bits.view(torch.float32)
    assert np.array_equal(square_root(x).numpy(), np.sqrt(x.numpy()))
    assert torch.equal(square_root(x[3:5]), square_root(x)[3:5])


def rounded_once(value: Fraction) -> float:
    """Return an exact value below 2**128 in float32, to nearest even."""
    last = Fraction(2) ** max(math.frexp(value)[1] - 24, -149)
    return float(round(value / last) * last)


def test_fma_rounds_once() -> None:
    """The last factors meet the middle of two float32 values but for less than float64 keeps.

    (1 + x) (1 - x) is less than 1, and (1 + x) (1 - x + x**2) = 1 + x**3 more, times half a place.
    """
    g, ulp = generator(3), 2.0**-23
    random = torch.randn(3, 2000, generator=g) * 2.0 ** torch.randint(-9, 9, (3, 2000), generator=g)
    random[2, ::2] = -(random[0] * random[1])[::2]
    factors = ((1 + ulp, 1 - ulp), (1 + 2.0**-12, 1 - 2.0**-12 + 2.0**-24))
    middles = [
        (sign * a * half, b * half, sign * (one + k * place))
        for (a, b), sign, k in itertools.product(factors, (1, -1), range(4))
        for half, one, place in ((2.0**-12, 1, ulp), (2.0**-75, 2.0**-127, 2.0**-149))
    ]
    alone = [torch.tensor(triple)[:, None] for triple in middles]
    for a, b, c in (random, *alone):
        rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
        exact = [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in rows]
        assert fma(a, b, c).tolist() == [rounded_once(value) for value in exact]


def test_fma_of_infinite_values_is_that_of_ieee() -> None:
    inf, tiny = torch.inf, 2.0**-80  # a term so small makes all go the careful way
    rows = torch.tensor([(inf, 2.0, 1.0), (3.0, 2.0, -inf), (inf, 0.0, 1.0), (0.0, 0.0, tiny)])
    assert str(fma(*rows.T)[:3].tolist()) == str(fma(*rows[:3].T).tolist()) == "[inf, -inf, nan]"
