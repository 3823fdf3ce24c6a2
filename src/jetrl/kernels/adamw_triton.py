"""`kernels.adamw` in Triton, bitwise equal to the reference; moves 18 bytes per parameter."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels import adamw_scalars
from jetrl.kernels.adamw_scalars import AdamWScalars

_BLOCK, _WARPS = 1024, 8  # four elements per thread, so each access is one vector
# The constants of `adamw_scalars` as constexprs.
SHIFT, BIAS = tl.constexpr(adamw_scalars.ROOT_SHIFT), tl.constexpr(adamw_scalars.ROOT_BIAS)
MAX, CODES = tl.constexpr(adamw_scalars.ROOT_MAX), tl.constexpr(adamw_scalars.CODES)
STRIDE = tl.constexpr(adamw_scalars.ELEMENT_STRIDE)


@triton.jit
def _decode_ratio(codes, negative, unit, root):
    size = codes * codes * unit * root
    return tl.where(negative, -size, size)


@triton.jit(do_not_specialize=["salt"])
def _adamw_kernel(
    master_ptr,
    grad_ptr,
    ratio_ptr,
    root_ptr,
    clip_ptr,
    num_elements,
    beta1,
    rest1,
    beta2,
    rest2,
    rate,
    unbias,
    eps,
    decay,
    carry,
    before,
    now,
    encode,
    salt,
    BLOCK: tl.constexpr,
):
    """Apply one AdamW step to BLOCK elements, in the operation order of `adamw_ref_`."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_elements
    clip = tl.load(clip_ptr)  # on the device, so the host does not wait for the norm
    g = tl.load(grad_ptr + places, mask=inside, other=0.0) * clip
    word = tl.load(root_ptr + places, mask=inside, other=0).to(tl.int32)
    codes = tl.load(ratio_ptr + places, mask=inside, other=0).to(tl.float32)
    master = tl.load(master_ptr + places, mask=inside, other=0.0)

    # Decode the previous moments (a root is the exponent and upper mantissa of a float32, with the
    # sign of the first moment in the top bit of the word), then update them.
    old_root = (((word & MAX) << SHIFT) + BIAS).to(tl.float32, bitcast=True)
    m = beta1 * _decode_ratio(codes, word < 0, before, old_root) + rest1 * g
    v = beta2 * (old_root * old_root) + rest2 * (g * g)
    exact_root = tl.math.sqrt_rn(v)

    # Encode the root with stochastic rounding: dither in [0, 1) of the last bit depends on element
    # and step, so drifts smaller than one bit are followed on average.
    dither = (places.to(tl.uint32) * STRIDE + salt.to(tl.uint32)) >> (32 - SHIFT)
    bits = exact_root.to(tl.int32, bitcast=True) - BIAS + dither.to(tl.int32)
    code = tl.minimum(tl.maximum(bits >> SHIFT, 0), MAX)
    new_root = ((code << SHIFT) + BIAS).to(tl.float32, bitcast=True)

    # Encode the first moment: the square root of |m| relative to its bound for the new root.
    negative = m < 0
    share = tl.math.sqrt_rn(tl.math.div_rn(tl.abs(m), new_root) * encode) + 0.5
    new_codes = tl.minimum(share, CODES).to(tl.int32)

    # Update by the unrounded moments, minus what the rounding of m will add to later updates.
    kept = _decode_ratio(new_codes.to(tl.float32), negative, now, new_root)
    update = tl.math.div_rn(rate * m - carry * (kept - m), exact_root * unbias + eps)

    tl.store(master_ptr + places, master * decay - update, mask=inside)
    tl.store(ratio_ptr + places, new_codes.to(tl.uint8), mask=inside)
    tl.store(root_ptr + places, (code - (negative.to(tl.int32) << 15)).to(tl.int16), mask=inside)


def adamw_(
    master: Tensor, grad: Tensor, ratio: Tensor, root: Tensor, clip: Tensor, scalars: AdamWScalars
) -> None:
    """`kernels.adamw.adamw_` in Triton."""
    dtypes = torch.float32, torch.float32, torch.uint8, torch.int16
    for x, dtype in zip((master, grad, ratio, root), dtypes, strict=True):
        assert (x.dtype, x.shape, x.is_contiguous()) == (dtype, master.shape, True)
    if not master.numel():
        return
    s = scalars
    _adamw_kernel[(triton.cdiv(master.numel(), _BLOCK),)](
        master,
        grad,
        ratio,
        root,
        clip,
        master.numel(),
        s.beta1,
        s.rest1,
        s.beta2,
        s.rest2,
        s.rate,
        s.unbias,
        s.eps,
        s.decay,
        s.carry,
        s.before,
        s.now,
        s.encode,
        s.salt - (s.salt >> 31 << 32),  # the salt as an int32
        _BLOCK,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
