"""AdamW on Hopper: one pass over master, gradient and moments; 18 bytes a parameter are moved.

The bits of the reference: roots and quotients are IEEE's, and multiply-adds are not fused. Elements
are independent, so a program takes a flat piece of the tensor.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.adamw_scalars import (
    CODES,
    ELEMENT_STRIDE,
    ROOT_BIAS,
    ROOT_MAX,
    ROOT_SHIFT,
    AdamWScalars,
)

_BLOCK, _WARPS = 1024, 8  # four elements a thread: each access is one vector
_CONSTANTS = {
    "SHIFT": ROOT_SHIFT,
    "BIAS": ROOT_BIAS,
    "MAX": ROOT_MAX,
    "STRIDE": ELEMENT_STRIDE,
    "CODES": CODES,
}


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
    SHIFT: tl.constexpr,
    BIAS: tl.constexpr,
    MAX: tl.constexpr,
    STRIDE: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_elements
    clip = tl.load(clip_ptr)
    g = tl.load(grad_ptr + places, mask=inside, other=0.0) * clip
    word = tl.load(root_ptr + places, mask=inside, other=0).to(tl.int32)
    codes = tl.load(ratio_ptr + places, mask=inside, other=0).to(tl.float32)
    master = tl.load(master_ptr + places, mask=inside, other=0.0)

    old_root = (((word & MAX) << SHIFT) + BIAS).to(tl.float32, bitcast=True)
    m = beta1 * _decode_ratio(codes, word < 0, before, old_root) + rest1 * g
    v = beta2 * (old_root * old_root) + rest2 * (g * g)
    exact_root = tl.math.sqrt_rn(v)

    dither = (places.to(tl.uint32) * STRIDE + salt.to(tl.uint32)) >> (32 - SHIFT)
    bits = exact_root.to(tl.int32, bitcast=True) - BIAS + dither.to(tl.int32)
    code = tl.minimum(tl.maximum(bits >> SHIFT, 0), MAX)
    new_root = ((code << SHIFT) + BIAS).to(tl.float32, bitcast=True)
    negative = m < 0
    share = tl.math.sqrt_rn(tl.math.div_rn(tl.abs(m), new_root) * encode) + 0.5
    new_codes = tl.minimum(share, CODES).to(tl.int32)
    kept = _decode_ratio(new_codes.to(tl.float32), negative, now, new_root)
    update = tl.math.div_rn(rate * m - carry * (kept - m), exact_root * unbias + eps)

    tl.store(master_ptr + places, master * decay - update, mask=inside)
    tl.store(ratio_ptr + places, new_codes.to(tl.uint8), mask=inside)
    tl.store(root_ptr + places, (code - (negative.to(tl.int32) << 15)).to(tl.int16), mask=inside)


def adamw_(
    master: Tensor, grad: Tensor, ratio: Tensor, root: Tensor, clip: Tensor, scalars: AdamWScalars
) -> None:
    """`kernels.adamw.adamw_` on Hopper.

    Raises:
        ValueError: a tensor of another shape or type, or not contiguous.
    """
    named = {"master": master, "grad": grad, "ratio": ratio, "root": root}
    types = dict(zip(named, ("float32", "float32", "uint8", "int16"), strict=True))
    for name, tensor in named.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        fits = tensor.is_cuda and tensor.shape == master.shape and dtype == types[name]
        if not fits or not tensor.is_contiguous():
            raise ValueError(
                f"adamw_: {name} is {types[name]} {list(master.shape)}, contiguous and on the GPU, "
                f"not {dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on "
                f"{tensor.device}"
            )
    if not master.numel():
        return
    _adamw_kernel[(triton.cdiv(master.numel(), _BLOCK),)](
        master,
        grad,
        ratio,
        root,
        clip,
        master.numel(),
        *scalars[:-1],
        scalars.salt - (scalars.salt >> 31 << 32),  # as an int32
        **_CONSTANTS,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
