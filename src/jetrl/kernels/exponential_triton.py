"""Exponential functions for Triton kernels: exp(x) = exp2(x * LOG2_E), by the hardware exp2."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon

from jetrl.precision import exact

LOG2_E = tl.constexpr(exact.LOG2_E)


@triton.jit
def sigmoid(gate):
    """Return 1 / (1 + exp(-gate)) by the hardware exp2 and reciprocal; 0 if exp overflows."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;",
        "=r,r",
        [1.0 + tl.math.exp2(gate * -LOG2_E)],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


gluon_sigmoid = gluon.jit(sigmoid.fn)  # see `gluon_wait_for_previous` in `precision.triton.launch`
