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

_LOG2_E = tl.constexpr(exact.LOG2_E)
_LN2 = tl.constexpr(exact.LN2)
_LN2_HIGH = tl.constexpr(exact.LN2_HIGH)
_LN2_LOW = tl.constexpr(exact.LN2_LOW)
_P0, _P1, _P2, _P3, _P4, _P5 = (tl.constexpr(term) for term in exact.EXP_TERMS)
_UNDERFLOW = tl.constexpr(exact.EXP_UNDERFLOW)
# Adding 1.5 * 2**23 to |x| < 2**22 rounds x to an integer, which the lowest bits of the sum hold.
_MAGIC = tl.constexpr(1.5 * 2.0**23)
_MAGIC_BITS = tl.constexpr(0x4B400000)
_ROOT_HALF = tl.constexpr(math.sqrt(0.5))
_SMALLEST_NORMAL = tl.constexpr(2.0**-1022)


@triton.jit
def exp_nonpositive(x):
    """Return `precision.exact.exp_nonpositive` of float32 x <= 0: 0 below -87, NaN for NaN."""
    lowest = _UNDERFLOW - 1.0
    clamped = tl.where(x < lowest, lowest, x)
    rounded = clamped * _LOG2_E
    rounded = rounded + _MAGIC
    n = rounded - _MAGIC
    r = clamped - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    y = _P0 * r + _P1
    y = y * r + _P2
    y = y * r + _P3
    y = y * r + _P4
    y = y * r + _P5
    y = y * r
    y = y * r + r
    y = y + 1.0
    # n is -127 at the lowest, whose power is 0: below the underflow.
    exponent = rounded.to(tl.int32, bitcast=True) - (_MAGIC_BITS - 127)
    power = exponent << 23
    power = power.to(tl.float32, bitcast=True)
    return tl.where(clamped < _UNDERFLOW, 0.0, y * power)


@triton.jit
def log_positive(x):
    """Return `precision.exact.log_positive` of float64 x; NaN for Inf and NaN."""
    # frexp: x = mantissa * 2**exponent with a mantissa in [1/2, 1); zero has the exponent 0.
    tiny = tl.abs(x) < _SMALLEST_NORMAL
    bits = tl.where(tiny, x * 2.0**54, x).to(tl.int64, bitcast=True)
    field = ((bits >> 52) & 0x7FF).to(tl.int32)
    exponent = field - tl.where(tiny, 1022 + 54, 1022)
    bits = (bits & ~(0x7FF << 52)) | (1022 << 52)
    special = (x == 0.0) | (field == 0x7FF)
    mantissa = tl.where(special, x, bits.to(tl.float64, bitcast=True))
    exponent = tl.where(special, 0, exponent)

    # A comparison would round a constant to float32.
    low = mantissa < tl.full(mantissa.shape, _ROOT_HALF, tl.float64)
    mantissa = tl.where(low, mantissa * 2.0, mantissa)
    exponent = tl.where(low, exponent - 1, exponent).to(tl.float64)
    s = mantissa - 1.0
    s = s / (mantissa + 1.0)
    square = s * s
    series = tl.zeros_like(s) + 1.0 / 25.0
    for i in tl.static_range(12):
        series = series * square + 1.0 / (23 - 2 * i)
    series = 2.0 * s * series
    return exponent * _LN2 + series


@triton.jit
def sigmoid(x):
    """Return `precision.exact.sigmoid` of float32 x: 1 / (1 + exp(-x)) without overflow."""
    t = exp_nonpositive(-tl.abs(x))
    numerator = tl.where(x >= 0.0, 1.0, t)
    return tl.math.div_rn(numerator, 1.0 + t)
