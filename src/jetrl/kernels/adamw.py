"""AdamW in one pass, with both moments in three bytes per parameter.

    ratio  uint8   c: the first moment is  +-(c / 255)**2 * bound * root,  bound = sup |m| / sqrt(v)
    root   int16   sqrt(v): 6 bits of exponent, 9 of mantissa, and in the highest bit the sign of m

Since m is bounded by sqrt(v) (Cauchy-Schwarz), each element's root scales its ratio. Two measures
keep the rounding of states harmless. The future effect of a rounding error of m, nine times its own
step at beta1 = 0.9, is known and removed from the master at once (`carry`). And sqrt(v) moves by at
most half a unit of its last place per step at beta2 = 0.999, so rounded to nearest it would stand
still: a dither, a function of element and step, is added before its last bits are cut.

docs/optimizer.md compares other formats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from jetrl.kernels.adamw_scalars import (
    CODES,
    ELEMENT_STRIDE,
    ROOT_BIAS,
    ROOT_MAX,
    ROOT_SHIFT,
    AdamWScalars,
)
from jetrl.kernels.backend import kernels_of
from jetrl.precision.exact import square_root


def state_bytes(shape: Sequence[int], states: str) -> int:
    """Return the bytes of a parameter's moments: 3 per element if they are compact, else 8."""
    return (3 if is_compact(len(shape), states) else 8) * math.prod(shape)


def is_compact(ndim: int, states: str) -> bool:
    """Return whether moments are compact: only those of matrices; the few others keep float32."""
    return states == "compact" and ndim >= 2


def adamw_(
    master: Tensor, grad: Tensor, ratio: Tensor, root: Tensor, clip: Tensor, scalars: AdamWScalars
) -> None:
    """Do one step of AdamW (Loshchilov and Hutter, arXiv 1711.05101) in place.

    Args:
        master: float32, contiguous, any shape; the other tensors but clip have the same shape.
        ratio: uint8, zeros before the first step, like root, int16.
        clip: float32 scalar on the device, a factor of the gradient.
    """
    if (kernels := kernels_of(master)) is not None:
        kernels.adamw_(master, grad, ratio, root, clip, scalars)
    else:
        adamw_ref_(master, grad, ratio, root, clip, scalars)


def adamw_ref_(
    master: Tensor, grad: Tensor, ratio: Tensor, root: Tensor, clip: Tensor, s: AdamWScalars
) -> None:
    """Do one step of AdamW, the specification: float32, each operation rounded in this order."""
    # This step's moments from those of the step before, as they were stored.
    g = grad * clip
    old_root = _decode_root(root)
    m = s.beta1 * _decode_ratio(ratio, root < 0, s.before, old_root) + s.rest1 * g
    v = s.beta2 * (old_root * old_root) + s.rest2 * (g * g)
    exact_root = square_root(v)
    # Their codes; the sign of the first moment is kept in the highest bit of the root's.
    code = _encode_root(exact_root, s.salt)
    negative = m < 0
    new_root = _decode_root(code)
    share = square_root(m.abs() / new_root * s.encode) + 0.5
    new_ratio = share.clamp(max=CODES).to(torch.uint8)
    # The exact moments move the master, less what the rounding of m will add to later updates.
    kept = _decode_ratio(new_ratio, negative, s.now, new_root)
    update = (s.rate * m - s.carry * (kept - m)) / (exact_root * s.unbias + s.eps)
    master.copy_(master * s.decay - update)
    ratio.copy_(new_ratio)
    root.copy_((code - (negative.int() << 15)).to(torch.int16))


def _decode_root(root: Tensor) -> Tensor:
    bits = ((root.int() & ROOT_MAX) << ROOT_SHIFT) + ROOT_BIAS
    return bits.view(torch.float32)


def _encode_root(exact_root: Tensor, salt: int) -> Tensor:
    """Return int32 codes of float32 roots, with a dither added before the low bits are cut."""
    elements = torch.arange(exact_root.numel(), device=exact_root.device).view(exact_root.shape)
    dither = ((elements * ELEMENT_STRIDE + salt) & 0xFFFFFFFF) >> (32 - ROOT_SHIFT)
    bits = exact_root.view(torch.int32) - ROOT_BIAS + dither.int()
    return (bits >> ROOT_SHIFT).clamp(0, ROOT_MAX)


def _decode_ratio(ratio: Tensor, negative: Tensor, unit: float, root: Tensor) -> Tensor:
    codes = ratio.float()
    size = codes * codes * unit * root
    return torch.where(negative, -size, size)
