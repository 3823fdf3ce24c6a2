"""Functions of `precision.exact` for Triton kernels, with the same bits.

They are IEEE operations, each rounded once, in the order of the references. Kernels that call them
must be launched with `enable_fp_fusion=False`, or a product and a sum become one operation.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import math

import triton
import triton.language as tl

from jetrl.precision import exact

LOG2_E, LN2 = tl.constexpr(exact.LOG2_E), tl.constexpr(exact.LN2)
LN2_HIGH, LN2_LOW = tl.constexpr(exact.LN2_HIGH), tl.constexpr(exact.LN2_LOW)
P0, P1, P2, P3, P4, P5 = (tl.constexpr(term) for term in exact.EXP_TERMS)
UNDERFLOW = tl.constexpr(exact.EXP_UNDERFLOW)
# Adding 1.5 * 2**23 to |x| < 2**22 rounds x to an integer, which the lowest bits of the sum hold.
MAGIC = tl.constexpr(1.5 * 2.0**23)
MAGIC_BITS = tl.constexpr(0x4B400000)
ROOT_HALF = tl.constexpr(math.sqrt(0.5))
SMALLEST_NORMAL = tl.constexpr(2.0**-1022)


@triton.jit
def exp_nonpositive(x):
    """Return `precision.exact.exp_nonpositive` of float32 x <= 0: 0 below -87, NaN for NaN."""
    clamped = tl.where(x < UNDERFLOW - 1.0, UNDERFLOW - 1.0, x)
    rounded = clamped * LOG2_E + MAGIC
    n = rounded - MAGIC
    r = (clamped - n * LN2_HIGH) - n * LN2_LOW
    y = ((((P0 * r + P1) * r + P2) * r + P3) * r + P4) * r + P5
    y = y * r * r + r
    # n is -127 at the lowest, whose power is 0: below the underflow.
    exponent = rounded.to(tl.int32, bitcast=True) - (MAGIC_BITS - 127)
    power = (exponent << 23).to(tl.float32, bitcast=True)
    return tl.where(clamped < UNDERFLOW, 0.0, (y + 1.0) * power)


@triton.jit
def log_positive(x):
    """Return `precision.exact.log_positive` of float64 x; NaN for Inf and NaN."""
    # frexp: x = mantissa * 2**exponent with a mantissa in [1/2, 1); zero has the exponent 0.
    tiny = tl.abs(x) < SMALLEST_NORMAL
    bits = tl.where(tiny, x * 2.0**54, x).to(tl.int64, bitcast=True)
    field = ((bits >> 52) & 0x7FF).to(tl.int32)
    exponent = field - tl.where(tiny, 1022 + 54, 1022)
    bits = (bits & ~(0x7FF << 52)) | (1022 << 52)
    special = (x == 0.0) | (field == 0x7FF)
    mantissa = tl.where(special, x, bits.to(tl.float64, bitcast=True))
    exponent = tl.where(special, 0, exponent)

    # A comparison would round a constant to float32.
    low = mantissa < tl.full(mantissa.shape, ROOT_HALF, tl.float64)
    mantissa = tl.where(low, mantissa * 2.0, mantissa)
    exponent = tl.where(low, exponent - 1, exponent).to(tl.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = tl.zeros_like(s) + 1.0 / 25.0
    for i in tl.static_range(12):
        series = series * square + 1.0 / (23 - 2 * i)
    return exponent * LN2 + 2.0 * s * series


@triton.jit
def sigmoid(x):
    """Return `precision.exact.sigmoid` of float32 x: 1 / (1 + exp(-x)) without overflow."""
    t = exp_nonpositive(-tl.abs(x))
    return tl.math.div_rn(tl.where(x >= 0.0, 1.0, t), 1.0 + t)
