"""The arithmetic of integer attention for one block of keys, shared by the portable kernels.

These functions have the bits of `attention.integer`, whose names they use: y_ij, a_i, n_i, e_ij,
g_ij, d_ij and the state (N, L, A). They take whole tiles: R rows (queries) and K keys. Launch with
`enable_fp_fusion=False`.

Adding 1.5 * 2**23 to a float32 below 2**22 in size rounds it to an integer, to nearest even, and
leaves that integer in the low bits of the sum. `rint`, the exponents of powers of two, c_ij and
d_ij are made like that; the product of d_ij is inside an fma, so it is rounded only once.

Non-finite values: `bad_state` is NaN for a block that must have the state (0, NaN, NaN). A caller
adds it to C, so that L, and the output by 1 / L, are NaN whatever else came out. N of such a row is
not defined.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import math

import triton
import triton.language as tl

from jetrl.precision.exact import LOG2_E
from jetrl.precision.quantize import AMAX_FLOOR, FORMATS, INT8_CODES

BLOCK_KEYS = 128  # keys per block of the definition
SPLIT_KEYS = 1024  # keys per split

_MAGIC = tl.constexpr(1.5 * 2.0**23)
_MAXIMUM = tl.constexpr(FORMATS[INT8_CODES][1])
_FLOOR = tl.constexpr(AMAX_FLOOR)
_MAGIC_BITS = tl.constexpr(0x4B400000)
_MAGIC_EXPONENT = tl.constexpr(1.5 * 2.0**23 + 127.0)
_MAGIC_PLANES = tl.constexpr(1.5 * 2.0**23 + 128.0)
_P0, _P1 = tl.constexpr(32509.662109375), tl.constexpr(22539.30078125)
_P2, _P3 = tl.constexpr(7887.7734375), tl.constexpr(1793.7412109375)
_SMALLEST_SCORE = tl.constexpr(-40.0)
_SMALLEST_POWER = tl.constexpr(-100.0)
_ABOVE_ROUNDING = tl.constexpr(2.0**-22)


def score_factor(head_dim: int) -> float:
    """Return c of the definition: a_i is the scale of query i times c, rounded to float32."""
    return LOG2_E / math.sqrt(head_dim)


@triton.jit
def power_of_two(n):
    """Return 2**max(n, -100), float32, of integers in float32 up to 127."""
    z = tl.maximum(n, _SMALLEST_POWER) + _MAGIC_EXPONENT
    return (z.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)


@triton.jit
def ceiling(x):
    """Return n_i of x_i: the integer, in float32, at or above x + |x| * 2**-22."""
    above = tl.fma(tl.abs(x), _ABOVE_ROUNDING, x)
    # Not tl.ceil, which takes subnormal values for 0. From 2**23 on, values are integers.
    cut = above.to(tl.int32).to(tl.float32)
    return tl.where(tl.abs(above) < 8388608.0, tl.where(cut < above, cut + 1.0, cut), above)


@triton.jit
def bad_state(n, r):
    """Return 0, or NaN if n_i or r_i is not finite."""
    return (n - n) + (r - r)


@triton.jit
def exponentials(y, a, n):
    """Return e_ij, float32 [R, K], of y [R, K], and a and n: [R], or of two dimensions.

    A hidden key may hold anything, so the caller replaces its e by 0.
    """
    if len(a.shape) == 1:
        a = a[:, None]
        n = n[:, None]
    u = tl.maximum(tl.fma(y, a, -n), _SMALLEST_SCORE)
    z = u + _MAGIC  # m in the low bits
    f = u - (z - _MAGIC)
    p = tl.fma(tl.fma(tl.fma(f, _P3, _P2), f, _P1), f, _P0)
    bits = p.to(tl.int32, bitcast=True) + (z.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def rounded_sum(e):
    """Return C, int32 [R]: the sum of rint(e) over the keys of e [R, K]."""
    # Sums modulo 2**32: the high bits of the terms cancel.
    offset: tl.constexpr = (e.shape[1] * _MAGIC_BITS + 2**31) % 2**32 - 2**31
    return tl.sum((e + _MAGIC).to(tl.int32, bitcast=True), axis=1) - offset


@triton.jit
def weight_bits(e, g):
    """Return int32 whose two low bytes have the planes of d = rint(e * g), for `planes`.

    A hidden key may have any g, so the caller replaces its bits by `NO_WEIGHT`.
    """
    return tl.fma(e, g, _MAGIC_PLANES).to(tl.int32, bitcast=True)


NO_WEIGHT = tl.constexpr(0x4B400080)  # weight_bits of d = 0


@triton.jit
def planes(bits):
    """Return the planes of `weight_bits` as int8: hi and lo, d = 256 * hi + lo."""
    return (bits >> 8).to(tl.int8), ((bits & 255) ^ 128).to(tl.int8)


@triton.jit
def fold_weights(first, second):
    """Return N' of two N, and the powers of two that their states are multiplied by."""
    reference = tl.maximum(first, second)
    return reference, power_of_two(first - reference), power_of_two(second - reference)


@triton.jit
def fold(n1, l1, a1, n2, l2, a2):
    """Return the fold of the states (N, L, A), of R or 1 rows: N and L [R], A [R, D].

    The empty state is (-Inf, 0, 0).
    """
    reference, z1, z2 = fold_weights(n1, n2)
    total = (a1 * z1[:, None]) + (a2 * z2[:, None])
    return reference, (l1 * z1) + (l2 * z2), total


@triton.jit
def in_slots(x):
    """Return x [R, K] with keys in the order of slots; it only renames registers."""
    parts = tl.reshape(x, (x.shape[0], x.shape[1] // 16, 2, 4, 2))
    even, odd = tl.split(tl.permute(parts, (0, 1, 3, 2, 4)))
    even_low, even_high = tl.split(even)
    odd_low, odd_high = tl.split(odd)
    # Split and join leave four neighbors of a row in consecutive registers.
    parts = tl.join(tl.join(even_low, even_high), tl.join(odd_low, odd_high))
    return tl.reshape(parts, (x.shape[0], x.shape[1]))


@triton.jit
def query_codes(x):
    """Return rotated queries x [R, D], bfloat16, as int8 codes [R, D] and float32 scales [R].

    With r = max(max |x|, 2**-100), the scale is fl(r / 127) and codes rint(fl(x * fl(127 / r))), as
    of `attention.integer`. A row with NaN or Inf has codes 0 and the scale NaN or Inf, except
    that values next to a single NaN are 0 as well.
    """
    x = x.to(tl.float32)
    # Bits of |x| as integers have the order of |x|, with NaN above Inf, so NaN propagates.
    largest = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1)
    amax = largest.to(tl.float32, bitcast=True)
    amax = tl.where(amax < _FLOOR, _FLOOR, amax)
    # A product is at most 127 and a rounding error, so it rounds to at most 127.
    scaled = x * tl.div_rn(_MAXIMUM, amax)[:, None]
    rounded = (tl.where(scaled == scaled, scaled, 0.0) + _MAGIC).to(tl.int32, bitcast=True)
    return rounded.to(tl.int8), tl.div_rn(amax, _MAXIMUM)
