"""Gaussian noise on the sampler's logits: a known mismatch.

With words w of Philox 4x32-10 (`jetrl.kernels.sampling`), keyed by the random bits of the row's
draw and counted by (token id, 0, 0, 1):

    u0, u1 = ((w0 >> 8) + 1/2) / 2**24, ((w1 >> 8) + 1/2) / 2**24
    noise  = sqrt(-2 log u0) cos(2 pi u1)                             (Box and Muller, 1958)

On a GPU the random words are the same, but logarithm and cosine are the device's own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jetrl.kernels.backend import kernels_of
from jetrl.precision.exact import log_positive

NOISE_COUNTER = 1  # The fourth word of the counter, which no other use of these keys has.
_LOW_WORD = 0xFFFFFFFF
_ROUNDS = 10


def with_noise(logits: Tensor, bits: Tensor, scale: float) -> Tensor:
    """Return the logits plus `scale` times normal noise; the logits themselves if scale is 0.

    Args:
        logits: float32 [R, V], which may be overwritten.
        bits: int64 [R], the random bits of each row's draw (`random_bits`).
    """
    if scale == 0.0:
        return logits
    if kernels_of(logits) is None:
        return logits.add_(normal_noise(bits, logits.shape[1]).mul_(scale))
    from benchmarks.study.logit_noise_triton import add_noise_

    return add_noise_(logits, bits, scale, NOISE_COUNTER)


def normal_noise(bits: Tensor, count: int) -> Tensor:
    """Return standard normal noise, float32 [R, count], keyed by bits, int64 [R]: the reference."""
    first, second = philox_words(bits, torch.arange(count, device=bits.device))
    u0, u1 = (((word >> 8).double() + 0.5) * 2.0**-24 for word in (first, second))
    return ((-2.0 * log_positive(u0)).sqrt() * _cosine_of_turns(u1)).float()


def _cosine_of_turns(turns: Tensor) -> Tensor:
    """Return cos(2 pi x) of float64 x in [0, 1], by only IEEE operations (`precision.exact`)."""
    quarters = (4.0 * turns).round()
    angle = (4.0 * turns - quarters) * (math.pi / 2)  # at most pi / 4 from the nearest quarter
    square = angle * angle
    cosine, sine = torch.ones_like(angle), torch.ones_like(angle)
    for n in range(8, 0, -1):  # Taylor's series, from its last term
        cosine = 1.0 - cosine * square / (2 * n * (2 * n - 1))
        sine = 1.0 - sine * square / (2 * n * (2 * n + 1))
    quarter = quarters.long() % 4
    value = torch.where(quarter % 2 == 0, cosine, angle * sine)
    return torch.where((quarter == 1) | (quarter == 2), -value, value)


def philox_words(keys: Tensor, counters: Tensor) -> tuple[Tensor, Tensor]:
    """Return two words of Philox 4x32-10, int64 [R, C] below 2**32 each."""
    key0, key1 = (keys & _LOW_WORD)[:, None], ((keys >> 32) & _LOW_WORD)[:, None]
    c0 = counters.expand(len(keys), -1)
    c1, c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0), torch.full_like(c0, NOISE_COUNTER)
    for _ in range(_ROUNDS):
        # An int64 product wraps around, and its bits are those of the unsigned one.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        high0, high1 = (product0 >> 32) & _LOW_WORD, (product1 >> 32) & _LOW_WORD
        c0, c1 = high1 ^ c1 ^ key0, product1 & _LOW_WORD
        c2, c3 = high0 ^ c3 ^ key1, product0 & _LOW_WORD
        key0, key1 = (key0 + 0x9E3779B9) & _LOW_WORD, (key1 + 0xBB67AE85) & _LOW_WORD
    return c0, c1
