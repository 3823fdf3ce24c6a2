"""`kernels.adamw` in plain Triton: compact moments by `adamw_triton`, and float32 moments.

The operations for float32 moments are those of the reference, in its order, each rounded once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels import adamw_triton
from jetrl.kernels.adamw_scalars import AdamWScalars
from jetrl.precision.triton.grid import wide
from jetrl.precision.triton.layout import cdiv

_BLOCK, _WARPS = 1024, 8  # four elements per thread, so each access is one vector


@triton.jit
def _fp32_kernel(
    master_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
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
    BLOCK: tl.constexpr,
):
    """Apply one AdamW step to BLOCK elements with float32 moments."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    places = first + tl.arange(0, BLOCK)
    inside = places < num_elements
    clip = tl.load(clip_ptr)  # on the device, so the host does not wait for the norm
    g = wide(grad_ptr + places, inside)
    g = g * clip
    m = wide(exp_avg_ptr + places, inside)
    v = wide(exp_avg_sq_ptr + places, inside)
    master = wide(master_ptr + places, inside)
    m = m * beta1 + g * rest1
    squared = g * g
    v = v * beta2 + squared * rest2
    root = tl.math.sqrt_rn(v)
    root = root * unbias + eps
    update = tl.math.div_rn(m * rate, root)
    master = master * decay - update
    tl.store(master_ptr + places, master, mask=inside)
    tl.store(exp_avg_ptr + places, m, mask=inside)
    tl.store(exp_avg_sq_ptr + places, v, mask=inside)


def adamw_(
    master: Tensor, grad: Tensor, ratio: Tensor, root: Tensor, clip: Tensor, scalars: AdamWScalars
) -> None:
    """`kernels.adamw.adamw_`: moments are uint8 and int16 codes, or both float32 values."""
    if ratio.dtype != torch.float32:
        adamw_triton.adamw_(master, grad, ratio, root, clip, scalars)
        return
    for x in (master, grad, ratio, root):
        assert x.dtype == torch.float32, f"{x.dtype}"
        assert x.shape == master.shape, f"{x.shape}"
        assert x.is_contiguous(), f"strides {x.stride()}"
    size, s = master.numel(), scalars
    if not size:
        return
    _fp32_kernel[(cdiv(size, _BLOCK),)](
        master,
        grad,
        ratio,
        root,
        clip,
        size,
        s.beta1,
        s.rest1,
        s.beta2,
        s.rest2,
        s.rate,
        s.unbias,
        s.eps,
        s.decay,
        _BLOCK,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
