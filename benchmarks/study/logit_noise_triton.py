"""`benchmarks.study.logit_noise` on a GPU."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, float32, int64

_BLOCK = 1024


@triton.jit
def _noise_kernel(
    logits_ptr, bits_ptr, num_columns, scale, COUNTER: tl.constexpr, BLOCK: tl.constexpr
):
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
    """Add `scale` times the noise of `normal_noise` to the logits, and return them."""
    rows, columns = logits.shape
    assert (logits.dtype, logits.is_contiguous()) == (float32, True)
    assert (bits.dtype, bits.shape) == (int64, (rows,))
    if rows:
        grid = (rows, triton.cdiv(columns, _BLOCK))
        _noise_kernel[grid](logits, bits, columns, scale, counter, _BLOCK, num_warps=4)
    return logits
