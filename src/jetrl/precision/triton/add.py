"""Accumulation of GEMM results into an FP32 gradient, in one pass over memory.

torch's mixed-dtype kernels (`add_` of BF16 to FP32) do not reach memory bandwidth.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.precision.triton.layout import cdiv

_BLOCK = 4096  # elements per program: 16 per thread


@triton.jit
def _add_kernel(
    products_ptr, total_ptr, size, ADD: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the sum of the products, in order, for BLOCK elements; if ADD, add it to total."""
    # Start from the end: what the GEMM wrote last is still in L2.
    block = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    places = block * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    total = tl.load(products_ptr + places, mask=mask).to(tl.float32)
    if ADD:
        total += tl.load(total_ptr + places, mask=mask)
    for piece in tl.static_range(1, COUNT):
        first = tl.full((), piece, tl.int64) * size
        total += tl.load(products_ptr + first + places, mask=mask).to(tl.float32)
    tl.store(total_ptr + places, total, mask=mask)


def add_products(products: Tensor, total: Tensor | None, begun: bool = True) -> Tensor:
    """Return total + products[0] + products[1] + ..., in place, rounding each sum to float32.

    Args:
        products: bfloat16 or float32 [P, N, K] contiguous.
        total: float32 [N, K] contiguous; None allocates a new tensor.
        begun: whether total is initialized; if not, the sum starts from products[0].
    """
    add = begun and total is not None
    if total is None:
        total = torch.empty_like(products[0], dtype=torch.float32)
    assert products.is_contiguous()
    assert (total.shape, total.is_contiguous()) == (products.shape[1:], True)
    size = total.numel()
    if size:
        _add_kernel[(cdiv(size, _BLOCK),)](
            products, total, size, add, len(products), _BLOCK, num_warps=8
        )
    return total
