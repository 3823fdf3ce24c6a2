"""The noise of `kernels.logit_noise` on Hopper: one pass over the logits, in place.

The random words are the reference's, bit for bit; logarithm and cosine are the device's own, so the
noise agrees to float32's precision.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, float32, int64

from jetrl.precision.hopper.checks import check_matrix, check_tensor

_BLOCK = 1024


@triton.jit
def _noise_kernel(
    logits_ptr, bits_ptr, num_columns, scale, COUNTER: tl.constexpr, BLOCK: tl.constexpr
):
    """Add noise to BLOCK logits of a row.

    Args:
        logits_ptr: float32 [R, num_columns], written over.
        bits_ptr: int64 [R], the random bits of each row's draw.
    """
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], tl.uint32)
    words = tl.philox(tl.load(bits_ptr + row), columns.to(tl.uint32), zeros, zeros, zeros + COUNTER)
    u0 = ((words[0].to(tl.uint32, bitcast=True) >> 8).to(tl.float32) + 0.5) * (2.0**-24)
    u1 = ((words[1].to(tl.uint32, bitcast=True) >> 8).to(tl.float32) + 0.5) * (2.0**-24)
    noise = tl.sqrt(-2.0 * tl.log(u0)) * tl.cos(6.283185307179586 * u1)
    places = logits_ptr + row.to(tl.int64) * num_columns + columns
    inside = columns < num_columns
    tl.store(places, tl.load(places, mask=inside) + scale * noise, mask=inside)


def add_noise_(logits: Tensor, bits: Tensor, scale: float, counter: int) -> Tensor:
    """Add `scale` times the noise of `logit_noise.normal_noise` to the logits, and return these.

    Args:
        logits: float32 [R, V] contiguous, written over.
        bits: int64 [R].
    """
    check_matrix("add_noise_", logits, (float32,))
    rows, columns = logits.shape
    check_tensor("add_noise_", "logits", logits, float32, [rows, columns])
    check_tensor("add_noise_", "bits", bits, int64, [rows])
    if rows:
        grid = (rows, triton.cdiv(columns, _BLOCK))
        _noise_kernel[grid](logits, bits, columns, scale, counter, _BLOCK, num_warps=4)
    return logits
