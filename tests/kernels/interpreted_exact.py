"""Compare the functions of portable/exact.py with `precision.exact`, by Triton's interpreter.

TRITON_INTERPRET=1 python tests/kernels/interpreted_exact.py

It prints the number of values that differ, by function.
"""

from __future__ import annotations

import json
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.portable import exact as portable
from jetrl.precision import exact

_exp, _log, _sigmoid = portable.exp_nonpositive, portable.log_positive, portable.sigmoid


@triton.jit
def _kernel(x_ptr, out_ptr, size, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    """Write a function of x: 0 exp, 1 log, 2 sigmoid."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < size, other=0.0)
    if FUNCTION == 0:
        y = _exp(x)
    elif FUNCTION == 1:
        y = _log(x)
    else:
        y = _sigmoid(x)
    tl.store(out_ptr + places, y, mask=places < size)


def inputs(device: str) -> dict[str, Tensor]:
    """Values of the range of each function, and those at which it changes."""
    g = torch.Generator().manual_seed(3)
    normal = torch.randn(20000, generator=g)
    edges = torch.tensor([0.0, -0.0, 1e-40, 1e-30, 87.0, 87.00001, 86.9, 88.0, 200.0, math.inf])
    wide = 2.0 ** (normal.double() * 300)
    wide = torch.cat((wide, 1 + normal.double().abs() * 1e-9, 1 + normal.double().abs() * 1e5))
    special = [
        1.0,
        0.0,
        math.inf,
        math.nan,
        math.sqrt(0.5),
        0.70710677,
        5e-324,
        2.0**-1022,
        1.7e308,
        0.75,
    ]
    exponents = torch.cat((normal.abs() * 30, normal.abs() * 1e-4, edges))
    return {
        "exp": torch.cat((-exponents, torch.tensor([math.nan]))).to(device),
        "log": torch.cat((wide, torch.tensor(special, dtype=torch.float64))).to(device),
        "sigmoid": torch.cat((exponents, -exponents, torch.tensor([math.nan]))).to(device),
    }


def differences(device: str) -> dict[str, int]:
    """The number of values whose bits differ, by function; all NaN are equal."""
    references = (exact.exp_nonpositive, exact.log_positive, exact.sigmoid)
    found = {}
    for index, (name, x) in enumerate(inputs(device).items()):
        ours, theirs = torch.full_like(x, 7.0), references[index](x)
        grid = (triton.cdiv(len(x), 1024),)
        _kernel[grid](x, ours, len(x), index, 1024, num_warps=4, enable_fp_fusion=False)
        integers = torch.int64 if x.dtype == torch.float64 else torch.int32
        both_nan = ours.isnan() & theirs.isnan()
        found[name] = int(((ours.view(integers) != theirs.view(integers)) & ~both_nan).sum())
    return found


if __name__ == "__main__":
    import exact_interpreter  # noqa: F401

    torch.set_num_threads(1)
    print(json.dumps(differences("cpu")))
