"""Arithmetic whose result does not depend on the order, the batch or the machine.

The CPU references have to give a row the same bits whatever else is in the batch. Libraries do not
promise that: a GEMM sums in another order for another shape, and a vectorised exp treats the last
few elements of an array with other code. Two devices give it by construction:

* **Sums.** Values are rounded to a common power-of-two grid chosen from the row's own maximum, with
  few enough bits that every product and every partial sum is an integer below 2**53 in units of the
  grid. float64 then adds them without rounding, in any order: a matmul of any shape gives the same
  bits. FP8 codes lie on such a grid as they are (18 bits); BF16 values are put on one with 18 or
  more bits below the row's maximum, ten more than BF16 itself has.
* **Elementwise functions.** Only IEEE operations, each rounded once: + - * / sqrt, and exp and log
  built from them. The same bits on every machine, at every position of an array.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
_LN2 = 0.6931471805599453
# Minimax polynomial of (exp(r) - 1 - r) / r**2 on [-ln2/2, ln2/2] (Cephes, expf): 1 ulp of float32.
_EXP_TERMS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_EXP_UNDERFLOW = -87.0
_SQUARES_BITS = 19


def align(x: Tensor, dim: int, bits: int) -> Tensor:
    """Return x rounded to a grid that depends on its maximum along one dimension only.

    The grid has `bits` bits below the maximum of |x|, float32 or narrower, along dim. The result is
    float64 like x: each value is an integer times g, at most 2**bits in units of g, with g a power
    of two. Non-finite values stay non-finite.
    """
    wide = x.double()
    exponent = torch.frexp(wide.abs().amax(dim, keepdim=True)).exponent
    # Adding 1.5 * 2**52 grid units leaves no room for a fraction of one: rounds to nearest even.
    magic = torch.ldexp(torch.full_like(exponent, 1.5, dtype=torch.float64), exponent + (52 - bits))
    return (wide + magic) - magic


def exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product a [..., M, K] @ b [..., K, N] of BF16 or FP32 values as float64.

    Each row of a and each column of b is put on a grid first; the product is then exact, so a row's
    result depends on that row and on b only. The relative error against the true product is about
    2**-bits of the largest term, bits = 23 for K = 128 and 20 for K = 8192.
    """
    bits = _factor_bits(a.shape[-1])
    return align(a, -1, bits) @ align(b, -2, bits)


def sum_of_squares(x: Tensor) -> Tensor:
    """Return the sum of x**2 along the last dimension, float64 [..., 1], added without rounding.

    x is put on the grid of `exact_matmul` first; bfloat16 on one of at most 19 bits, whose integers
    a GPU adds (`kernels.norm_triton`).
    """
    bits = _factor_bits(x.shape[-1])
    if x.dtype == torch.bfloat16:
        bits = min(bits, _SQUARES_BITS)
    return align(x, -1, bits).square().sum(-1, keepdim=True)


def _factor_bits(terms: int) -> int:
    """Return the bits of a factor so that a sum of so many products stays below 2**53 units."""
    return (53 - math.ceil(math.log2(max(terms, 2)))) // 2


def exp_nonpositive(x: Tensor) -> Tensor:
    """Return exp(x) for float32 x <= 0, within 1 ulp: 0 below -87, exactly 1 at 0, NaN for NaN."""
    # x = n * ln 2 + r, with ln 2 in two parts so that r keeps its low bits; exp(r) by polynomial,
    # times 2**n, which is built from its exponent bits.
    clamped = x.clamp(min=_EXP_UNDERFLOW - 1)
    n = (clamped * LOG2_E).round_()
    r = (clamped - n * _LN2_HIGH).sub_(n * _LN2_LOW)
    y = torch.full_like(r, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        y = y.mul_(r).add_(term)
    y = y.mul_(r).mul_(r).add_(r).add_(1.0)
    power = n.to(torch.int32).add_(127).bitwise_left_shift_(23).view(torch.float32)
    return torch.where(clamped < _EXP_UNDERFLOW, 0.0, y.mul_(power))


def log_positive(x: Tensor) -> Tensor:
    """Return log(x) for finite float64 x > 0, within 4 ulp of float64; NaN stays NaN."""
    # x = m * 2**e with m around 1; log(m) = 2 atanh(s) with s = (m - 1) / (m + 1), by its series.
    mantissa, exponent = torch.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    exponent = torch.where(low, exponent - 1, exponent).double()
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = torch.full_like(s, 1.0 / 25.0)
    for odd in range(23, 0, -2):
        series = series * square + 1.0 / odd
    return exponent * _LN2 + 2.0 * s * series


def square_root(x: Tensor) -> Tensor:
    """Return sqrt(x) of float32 x, rounded to nearest.

    torch's own in float32 is off by a unit of the last place for one value in six (2.13, x86). The
    root of a float32 is never so near to the middle of two that float64's error of a unit decides.
    """
    return x.double().sqrt().float()


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) for float32 x, without overflow."""
    t = exp_nonpositive(-x.abs())
    return torch.where(x >= 0, 1.0, t) / (1.0 + t)
