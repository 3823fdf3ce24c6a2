"""AdamW in one pass, with both moments in 3 bytes per parameter.

    ratio  uint8   c, where m = +-(c / 255)**2 * bound * root  and  bound = sup |m| / sqrt(v)
    root   int16   sqrt(v): 6 exponent bits and 9 mantissa bits; the top bit is the sign of m

|m| is at most bound * sqrt(v) (Cauchy-Schwarz), so each element's root scales its ratio. Two
measures keep rounding of the state from hurting. A rounding error of m affects all later updates
(nine times its own step at beta1 = 0.9); that sum is known, so it is subtracted from the master at
once (`carry`). And sqrt(v) moves by at most half an ulp per step at beta2 = 0.999, so
round-to-nearest would never move it: rounding is stochastic, with dither from element and step.

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
    """Return the bytes of a parameter's moments: 3 per element if compact, else 8."""
    return (3 if is_compact(len(shape), states) else 8) * math.prod(shape)


def is_compact(ndim: int, states: str) -> bool:
    """Return whether moments are compact; only matrices have compact moments, the rest float32."""
    return states == "compact" and ndim >= 2


def adamw_(
    master: Tensor, grad: Tensor, ratio: Tensor, root: Tensor, clip: Tensor, scalars: AdamWScalars
) -> None:
    """Apply one AdamW step (Loshchilov and Hutter, arXiv 1711.05101) in place.

    Args:
        master: float32, contiguous, any shape; grad, ratio and root have the same shape.
        ratio: uint8; ratio and root (int16) are zero before the first step. On a CPU both may be
            float32 moments instead: exp_avg and exp_avg_sq.
        clip: float32 scalar on the device that multiplies the gradient.
    """
    if (kernels := kernels_of(master)) is not None:
        kernels.adamw_(master, grad, ratio, root, clip, scalars)
    elif ratio.dtype == torch.float32:
        _adamw_fp32_(master, grad, exp_avg=ratio, exp_avg_sq=root, clip=clip, s=scalars)
    else:
        adamw_ref_(master, grad, ratio, root, clip, scalars)


def adamw_ref_(
    master: Tensor, grad: Tensor, ratio: Tensor, root: Tensor, clip: Tensor, s: AdamWScalars
) -> None:
    """Apply one AdamW step; specifies the float32 operations and their order for all kernels."""
    # Decode the stored moments and update them.
    g = grad * clip
    old_root = _decode_root(root)
    m = s.beta1 * _decode_ratio(ratio, root < 0, s.before, old_root) + s.rest1 * g
    v = s.beta2 * (old_root * old_root) + s.rest2 * (g * g)
    exact_root = square_root(v)
    # Encode the new moments; the top bit of the root's code holds the sign of the first moment.
    code = _encode_root(exact_root, s.salt)
    negative = m < 0
    new_root = _decode_root(code)
    share = square_root(m.abs() / new_root * s.encode) + 0.5
    new_ratio = share.clamp(max=CODES).to(torch.uint8)
    # Update by the unrounded moments, minus what the rounding of m will add to later updates.
    kept = _decode_ratio(new_ratio, negative, s.now, new_root)
    update = (s.rate * m - s.carry * (kept - m)) / (exact_root * s.unbias + s.eps)
    master.copy_(master * s.decay - update)
    ratio.copy_(new_ratio)
    root.copy_((code - (negative.int() << 15)).to(torch.int16))


_AT_ONCE = 2**16  # elements, so that temporaries stay in a processor's cache


def _adamw_fp32_(
    master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, clip: Tensor, s: AdamWScalars
) -> None:
    """Apply one AdamW step with float32 moments, each operation rounded to float32.

    g      = grad * clip
    m      = beta1 * m + rest1 * g
    v      = beta2 * v + rest2 * (g * g)
    master = master * decay - (rate * m) / (sqrt(v) * unbias + eps)     sqrt to nearest
    """
    flat = (x.view(-1).split(_AT_ONCE) for x in (master, grad, exp_avg, exp_avg_sq))
    for part, gradient, m, v in zip(*flat, strict=True):
        g = gradient * clip
        m.mul_(s.beta1).add_(g * s.rest1)
        v.mul_(s.beta2).add_((g * g).mul_(s.rest2))
        root = square_root(v).mul_(s.unbias).add_(s.eps)
        part.mul_(s.decay).sub_((m * s.rate).div_(root))


def _decode_root(root: Tensor) -> Tensor:
    bits = ((root.int() & ROOT_MAX) << ROOT_SHIFT) + ROOT_BIAS
    return bits.view(torch.float32)


def _encode_root(exact_root: Tensor, salt: int) -> Tensor:
    """Return int32 codes of float32 roots, stochastically rounded with a fixed dither."""
    elements = torch.arange(exact_root.numel(), device=exact_root.device).view(exact_root.shape)
    dither = ((elements * ELEMENT_STRIDE + salt) & 0xFFFFFFFF) >> (32 - ROOT_SHIFT)
    bits = exact_root.view(torch.int32) - ROOT_BIAS + dither.int()
    return (bits >> ROOT_SHIFT).clamp(0, ROOT_MAX)


def _decode_ratio(ratio: Tensor, negative: Tensor, unit: float, root: Tensor) -> Tensor:
    codes = ratio.float()
    size = codes * codes * unit * root
    return torch.where(negative, -size, size)
