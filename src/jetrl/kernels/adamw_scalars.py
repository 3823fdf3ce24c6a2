"""Constants of AdamW's compact moments, and the scalars of one step.

Scalars are computed in float64 with + - * / and sqrt only, and rounded once to float32. Powers are
products (`_power`), since a library's differ between machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

CODES = 255  # largest code of a ratio
ROOT_SHIFT = 14  # low mantissa bits of a float32 that a root drops
ROOT_BIAS = (127 - 50) << 23  # float32 bits of the smallest root, 2**-50; the largest is < 2**14
ROOT_MAX = (1 << 15) - 1
# A root's dither is a Weyl sequence. The step stride is the golden ratio, so the dithers of one
# element fill [0, 1) evenly; the element stride is the inverse of the plastic number.
_STEP_STRIDE, ELEMENT_STRIDE = 0x9E3779B9, 0xC13FA9A9
_NEGLIGIBLE = 1e-4  # `_carry` stops its sum at future steps whose weight is below this


class AdamWScalars(NamedTuple):
    """The scalars of one step of `adamw_`, rounded to float32.

    Float32 moments need those up to `decay`.

    Attributes:
        rest1: 1 - beta1; rest2 is 1 - beta2.
        rate: lr / (1 - beta1**t) at step t.
        unbias: 1 / sqrt(1 - beta2**t).
        decay: 1 - lr * weight_decay.
        carry: total that one unit of the first moment adds to rate * m over all later steps.
        before: previous step's ratio unit, bound / 255**2; `now` is this step's.
        encode: 1 / now.
        salt: 32-bit contribution of the step to the dither.
    """

    beta1: float
    rest1: float
    beta2: float
    rest2: float
    rate: float
    unbias: float
    eps: float
    decay: float
    carry: float
    before: float
    now: float
    encode: float
    salt: int


def adamw_scalars(
    step: int,
    lr: Callable[[int], float],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> AdamWScalars:
    """Return the scalars of `step` (counted from 1); lr(k) is the learning rate k steps later."""
    beta1, beta2 = betas
    bound = _bound(step, beta1, beta2)
    return AdamWScalars(
        beta1=_float32(beta1),
        rest1=_float32(1 - beta1),
        beta2=_float32(beta2),
        rest2=_float32(1 - beta2),
        rate=_float32(lr(0) / (1 - _power(beta1, step))),
        unbias=_float32(1 / math.sqrt(1 - _power(beta2, step))),
        eps=_float32(eps),
        decay=_float32(1 - lr(0) * weight_decay),
        carry=_float32(_carry(step, lr, beta1)),
        before=_float32(_bound(step - 1, beta1, beta2) / CODES**2),
        now=_float32(bound / CODES**2),
        encode=_float32(CODES**2 / bound),
        salt=step * _STEP_STRIDE % 2**32,
    )


def from_element(scalars: AdamWScalars, first: int) -> AdamWScalars:
    """Return scalars for a shard that starts at element `first`, so its dither is unchanged."""
    return scalars._replace(salt=(scalars.salt + first * ELEMENT_STRIDE) % 2**32)


def _power(base: float, exponent: int) -> float:
    """Return base**exponent by squaring, from the exponent's lowest bit on.

    With square = base and result = 1, for each bit of the exponent: result *= square if it is set,
    then square *= square. Each product is rounded to float64.
    """
    result, square = 1.0, base
    while exponent:
        if exponent & 1:
            result *= square
        square *= square
        exponent >>= 1
    return result


def _float32(x: float) -> float:
    return float(np.float32(x))


def _bound(step: int, beta1: float, beta2: float) -> float:
    """Return the supremum of |m| / sqrt(v) after `step` optimizer steps, or infinity.

    m = sum_k (1 - beta1) beta1**k g_k and v = sum_k (1 - beta2) beta2**k g_k**2. By Cauchy-Schwarz,
    m**2 <= sum_k (1 - beta1)**2 / (1 - beta2) (beta1**2 / beta2)**k * v.
    """
    q = beta1 * beta1 / beta2
    if q >= 1:  # settings refuse compact moments then
        return math.inf
    return (1 - beta1) * math.sqrt((1 - _power(q, step)) / ((1 - q) * (1 - beta2)))


def _carry(step: int, lr: Callable[[int], float], beta1: float) -> float:
    """Return the sum over k >= 1 of lr(k) beta1**k / (1 - beta1**(step + k))."""
    total, k, weight = 0.0, 1, beta1
    while weight > _NEGLIGIBLE:
        total += lr(k) * weight / (1 - _power(beta1, step + k))
        k, weight = k + 1, weight * beta1
    return total
