"""Arithmetic whose result does not depend on the order, the batch or the machine.

The CPU references have to give a row the same bits whatever else is in the batch. Libraries do not
promise that: a GEMM sums in another order for another shape, and a vectorised exp treats the last
few elements of an array with other code. Two devices give it by construction:

* **Sums.** Values are rounded to a common power-of-two grid chosen from the row's own maximum, with
  few enough bits that every product and every partial sum is an integer below 2**53 in units of the
  grid. float64 then adds them without rounding, in any order: a matmul of any shape gives the same
  bits. FP8 codes lie on such a grid as they are (18 bits); BF16 values are put on one with 18 or
  more bits below the row's maximum, ten more than BF16 itself has. `exact_sum` adds float32
  values with 30 bits, which a GPU adds as integers.
* **Sums over tokens.** `sum_of_rows` adds rows in float32, in a stated order.
* **Elementwise functions.** Only IEEE operations, each rounded once: + - * / sqrt fma, and exp and
  log built from them. The same bits on every machine, at every position of an array.

Operation by operation, float32 unless it says float64, products before sums, nothing fused but fma:

    align(x)         2**e > max |x| >= 2**(e - 1),  g = 2**(e - bits),  rint(x / g) * g    float64
    exact_sum(x)     sum of align(x) with 30 bits                                          float64
    exp(x)           n = rint(x * 1.44269504),  r = (x - n * 0.693359375) - n * -2.12194440e-4
                     q = ((P(r) * r) * r) + r,  (q + 1) * 2**n;  0 for x < -87
    expm1(x)         q if n = 0, else exp(x) - 1
    sigmoid(x)       t = exp(-|x|);  (1 if x >= 0, else t) / (1 + t)
    log(x)           x = m * 2**e, sqrt(1/2) <= m < sqrt(2),  s = (m - 1) / (m + 1)        float64
                     e * ln 2 + (2 * s) * (1 + s**2 / 3 + ... + s**24 / 25)
    log_sigmoid(x)   min(x, 0) - float32(log(1 + exp(-|x|))), the sum in float64
    fma(a, b, c)     a * b + c, rounded once

P and the series of log are by Horner's rule.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
LN2 = 0.6931471805599453
# Minimax polynomial of (exp(r) - 1 - r) / r**2 on [-ln2/2, ln2/2] (Cephes, expf): 1 ulp of float32.
EXP_TERMS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
EXP_UNDERFLOW = -87.0
_EXP_OVERFLOW = 89.0
SUM_BITS = 30  # values fit into int32, and up to 2**23 of them into a float64 sum
# Maximum terms of the gradient of a norm's weight in a GPU's backward: one per T / 512 rows of T,
# rounded up, on any GPU. So rows of zeros that fill up T to a multiple of 512 change no term.
GRADIENT_TERMS = 512
_SQUARES_BITS = 19
_BLOCK_ROWS = 128
# Bits of float64's fraction that float32's lacks, and the middle of two float32 values in them.
_BELOW_FLOAT32, _MIDDLE = 2**29 - 1, 2**28
_TINY_TERM = 2.0**-60


def align(x: Tensor, dim: int, bits: int) -> Tensor:
    """Return x rounded to a grid that depends on its maximum along one dimension only.

    The grid has `bits` bits below the maximum of |x|, float32 or narrower, along dim. The result is
    float64 like x: each value is an integer times g, at most 2**bits in units of g, with g a power
    of two. Non-finite values stay non-finite.
    """
    wide = x.double()
    exponent = torch.frexp(wide.abs().amax(dim, keepdim=True)).exponent
    # Adding 1.5 * 2**52 grid units leaves no room for a fraction of one: rounds to nearest even.
    magic = 1.5 * _wide_power_of_two(exponent + (52 - bits))
    return (wide + magic) - magic


def _wide_power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent of int32 exponents, normal numbers in float64, from its bits."""
    return (exponent.long() + 1023).bitwise_left_shift_(52).view(torch.float64)


def exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product a [..., M, K] @ b [..., K, N] of BF16 or FP32 values as float64.

    Each row of a and each column of b is put on a grid first; the product is then exact, so a row's
    result depends on that row and on b only. The relative error against the true product is about
    2**-bits of the largest term, bits = 23 for K = 128 and 20 for K = 8192.
    """
    bits = factor_bits(a.shape[-1])
    return align(a, -1, bits) @ align(b, -2, bits)


def sum_of_squares(x: Tensor) -> Tensor:
    """Return the sum of x**2 along the last dimension, float64 [..., 1], added without rounding.

    x is put on the grid of `exact_matmul` first; bfloat16 on one of at most 19 bits, whose integers
    a GPU adds (`kernels.norm_triton`).
    """
    bits = factor_bits(x.shape[-1])
    if x.dtype == torch.bfloat16:
        bits = min(bits, _SQUARES_BITS)
    return align(x, -1, bits).square().sum(-1, keepdim=True)


def factor_bits(terms: int) -> int:
    """Return the bits of a factor so that a sum of so many products stays below 2**53 units."""
    return (53 - (max(terms, 2) - 1).bit_length()) // 2


def sum_of_rows(x: Tensor) -> Tensor:
    """Return the sum of the rows of x, float32 [N, D] or narrower, as float32 [D].

    Each addition is rounded to float32. The rows of each block of 128 are added to zeros in order,
    then the sums of the blocks are added in order:

        s[b] = (...((0 + x[128 b]) + x[128 b + 1]) + ...) + x[128 b + 127]
        s    = (...(s[0] + s[1]) + ...) + s[-1]
    """
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % _BLOCK_ROWS))
    blocks = padded.unflatten(0, (-1, _BLOCK_ROWS))
    sums = torch.zeros(blocks[:, 0].shape, dtype=torch.float32, device=x.device)
    for row in range(min(len(x), _BLOCK_ROWS)):
        sums += blocks[:, row]
    total = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
    for block in sums:
        total += block
    return total


def exp_nonpositive(x: Tensor) -> Tensor:
    """Return exp(x) for float32 x <= 0, within 1 ulp: 0 below -87, exactly 1 at 0, NaN for NaN."""
    clamped = x.clamp(min=EXP_UNDERFLOW - 1)
    n, y = _reduced_expm1(clamped)
    power = _power_of_two(n.to(torch.int32))
    return torch.where(clamped < EXP_UNDERFLOW, 0.0, y.add_(1.0).mul_(power))


def exp(x: Tensor) -> Tensor:
    """Return exp(x) for float32 x, within 1 ulp: 0 below -87, infinite above 88.72, NaN for NaN."""
    clamped = x.clamp(EXP_UNDERFLOW - 1, _EXP_OVERFLOW)
    n, y = _reduced_expm1(clamped)
    # 2**n in two factors, since 2**128 is not a float32.
    half = n.to(torch.int32) >> 1
    y = y.add_(1.0).mul_(_power_of_two(half)).mul_(_power_of_two(n.to(torch.int32) - half))
    return torch.where(clamped < EXP_UNDERFLOW, 0.0, y)


def expm1(x: Tensor) -> Tensor:
    """Return exp(x) - 1 for float32 x, within 4 ulp, with the range of `exp`.

    For |x| below about ln(2) / 2 it is the polynomial of `exp` before 1 is added.
    """
    n, y = _reduced_expm1(x.clamp(EXP_UNDERFLOW - 1, _EXP_OVERFLOW))
    return torch.where(n == 0, y, exp(x) - 1.0)


def _reduced_expm1(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return n and exp(r) - 1, float32, with x = n * ln 2 + r and |r| <= ln(2) / 2."""
    # ln 2 is in two parts, so that r keeps its low bits.
    n = (x * LOG2_E).round_()
    r = (x - n * LN2_HIGH).sub_(n * LN2_LOW)
    y = torch.full_like(r, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        y = y.mul_(r).add_(term)
    return n, y.mul_(r).mul_(r).add_(r)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**n, float32, for int32 n from -126 to 127, from its bits."""
    return (exponent + 127).bitwise_left_shift_(23).view(torch.float32)


def exact_sum(x: Tensor) -> Tensor:
    """Return the sum of x along the last dimension, float64 [...], added without rounding.

    x is put on a grid of 30 bits below the maximum of |x| first (`align`), so that up to 2**23
    terms add in any order. Differentiable. The sum of no terms is 0.
    """
    if not x.shape[-1]:
        return x.double().sum(-1)
    return align(x, -1, SUM_BITS).sum(-1)


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
    return exponent * LN2 + 2.0 * s * series


def log_sigmoid(x: Tensor) -> Tensor:
    """Return log(1 / (1 + exp(-x))) for float32 x, without overflow: min(x, 0) - log(1 + t).

    t = exp(-|x|) is float32; 1 + t and its logarithm are float64, rounded to float32 before the
    subtraction.
    """
    t = exp_nonpositive(-x.abs())
    return x.clamp(max=0.0) - log_positive(1.0 + t.double()).float()


def square_root(x: Tensor) -> Tensor:
    """Return sqrt(x) of float32 or float64 x, rounded to nearest.

    On x86, torch's own (2.13) is off by a unit of the last place for one value in 150
    (findings/torch_sqrt.sh); NumPy's is the processor's instruction. The root of a float32 is never
    so near to the middle of two that float64's error of a unit decides.
    """
    if x.dtype == torch.float64:
        return torch.from_numpy(np.asarray(np.sqrt(x.numpy()))) if x.is_cpu else x.sqrt()
    return x.double().sqrt().float()


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of float32 tensors, rounded once to float32, to nearest even.

    IEEE 754's fused multiply-add, which GPUs have as one instruction; torch has none. Inf, NaN and
    subnormal results are IEEE's. Tensors broadcast.
    """
    # The product is exact in float64 (48 bits), the sum is rounded to 53. Rounding that to float32
    # is wrong only if it lies in the middle of two float32 values: its lower 29 bits are 2**28.
    # XOR makes that 0, compared as float64, whose minimum torch finds faster than that of int64.
    total = (a.double() * b.double()).add_(c.double())
    low = total.view(torch.int64).bitwise_and(_BELOW_FLOAT32).bitwise_xor_(_MIDDLE)
    # Subnormal values have other middles. A sum that is one is exact, unless c is tiny: the product
    # is a multiple of 2**-48 of itself.
    tiny = (c != 0) & (c.abs() < _TINY_TERM)
    if low.numel() and (low.view(torch.float64).amin() == 0 or tiny.any()):
        total = _sum_to_odd(a.double() * b.double(), c.double())
    return total.float()


def _sum_to_odd(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y of float64, inexact sums rounded to the neighbor with an odd last bit.

    Rounding the result to float32 then rounds x + y once (Boldo and Melquiond, 2008).
    """
    total = x + y
    # TwoSum (Knuth): x + y = total + error, exactly.
    part = total - x
    error = (x - (total - part)) + (y - part)
    bits = total.view(torch.int64)
    inexact = error.isfinite() & (error != 0) & (bits & 1 == 0)
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact, bits + step, bits).view(torch.float64)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) for float32 x, without overflow."""
    t = exp_nonpositive(-x.abs())
    return torch.where(x >= 0, 1.0, t) / (1.0 + t)
