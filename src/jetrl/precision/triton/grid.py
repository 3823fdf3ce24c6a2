"""Sums of float32 values as integers: the grid of `precision.exact.align` in plain Triton.

`grid_integers` puts values on the grid, as int32 with 30 bits or fewer. Sums of such integers have
no order, so tiles and warps change no bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import triton
import triton.language as tl

from jetrl.precision.exact import SUM_BITS

INFINITY_BITS = tl.constexpr(0x7F800000)
SIGN = tl.constexpr(-(2**31))
SUM_GRID = tl.constexpr(SUM_BITS)


@triton.jit
def float_bits(x):
    """Return the bits of float32 x as int32, which order like x if it is not negative."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def of_bits(bits):
    """Return the float32 numbers with int32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def wide(places, mask):
    """Load numbers as float32, zero outside of mask."""
    return tl.load(places, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def exponent_above(amax_bits):
    """Return e with 2**(e - 1) <= max |x| < 2**e, from the bits of a finite float32 max |x|."""
    amax = of_bits(amax_bits)
    small = float_bits(amax * 4294967296.0)  # 2**32, which makes subnormal numbers normal
    of_small = (small >> 23) - 158
    of_large = (amax_bits >> 23) - 126
    return tl.where(amax < 1.0, of_small, of_large)


@triton.jit
def grid_factors(exponent, bits):
    """Return two powers of two with the product 2**(bits - exponent), which float32 may exceed."""
    half = (bits - exponent) >> 1
    rest = bits - exponent - half
    first = of_bits((half + 127) << 23)
    second = of_bits((rest + 127) << 23)
    return first, second


@triton.jit
def grid_integers(x, first_factor, second_factor):
    """Return x times both factors, at most 2**30, rounded to nearest even, as int32."""
    scaled = x * first_factor * second_factor
    size = tl.abs(scaled)
    # Adding 2**23 rounds to an integer. A float32 above that is an integer.
    rounded = (size + 8388608.0) - 8388608.0
    size = tl.where(size < 8388608.0, rounded, size)
    whole = size.to(tl.int32)
    return tl.where(scaled < 0.0, -whole, whole)


@triton.jit
def grid_unit(exponent, bits):
    """Return 2**(exponent - bits), float64."""
    field = (exponent - bits + 1023).to(tl.int64)
    return (field << 52).to(tl.float64, bitcast=True)


@triton.jit
def mean_on_grid(total, exponent, largest_bits, lowest_bits, D: tl.constexpr):
    """Return float32(sum / D), for the int64 sum of D values on a grid of 30 bits.

    largest_bits and lowest_bits are the maxima of the bits of x and of -x, for Inf and NaN.
    """
    mean = total.to(tl.float64) * grid_unit(exponent, SUM_GRID)
    # A division takes dozens of instructions; by a power of two a product is the same.
    if D & (D - 1) == 0:
        mean = mean * (1.0 / D)
    else:
        mean = mean / D
    up = largest_bits >= INFINITY_BITS
    down = lowest_bits >= INFINITY_BITS
    either = tl.maximum(largest_bits, lowest_bits)
    bad = (up & down) | (either > INFINITY_BITS)
    special = tl.where(up, float("inf"), float("-inf"))
    special = tl.where(bad, float("nan"), special)
    mean = mean.to(tl.float32)
    return tl.where(up | down, special, mean)


@triton.jit
def sum_on_grid(x):
    """Return float32(`precision.exact.exact_sum`) of the vector x, up to 2**23 float32 values."""
    bits = float_bits(x)
    largest = tl.max(bits, 0)
    lowest = tl.max(bits ^ SIGN, 0)
    exponent = exponent_above(tl.maximum(largest, lowest))
    first, second = grid_factors(exponent, SUM_GRID)
    total = tl.sum(grid_integers(x, first, second).to(tl.int64), 0)
    return mean_on_grid(total, exponent, largest, lowest, 1)
