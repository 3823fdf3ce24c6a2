"""`kernels.swiglu` in plain Triton, forward and backward, with the bits of its references.

A program computes a part of one row. The operations are those of the references, in their order,
each rounded to float32; sigmoid is `precision.exact.sigmoid`:

    y     = (gate * sigmoid(gate)) * up                                    rounded to bfloat16
    dgate = ((dy * up) * sigmoid(gate)) * (1 + gate * (1 - sigmoid(gate)))
    dup   = (dy * gate) * sigmoid(gate)
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.portable.exact import sigmoid
from jetrl.precision.quantize import QTensor
from jetrl.precision.triton.grid import wide
from jetrl.precision.triton.int8 import int8_rows
from jetrl.precision.triton.layout import cdiv

_COLUMNS, _WARPS = 1024, 4  # of y per program: eight values per thread; changes no bits


@triton.jit
def _forward_kernel(x_ptr, y_ptr, F: tl.constexpr, COLUMNS: tl.constexpr):
    """Write COLUMNS values of a row of y, bfloat16 [T, F], from gate and up, bfloat16 [T, 2F]."""
    PARTS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < F
    first = row.to(tl.int64) * F
    gate = wide(x_ptr + 2 * first + columns, mask)
    up = wide(x_ptr + 2 * first + F + columns, mask)
    y = gate * sigmoid(gate) * up
    y = y.to(tl.bfloat16)
    tl.store(y_ptr + first + columns, y, mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, dx_ptr, y_ptr, WRITE_Y: tl.constexpr, F: tl.constexpr, COLUMNS: tl.constexpr
):
    """Write COLUMNS values of the gradients of gate and of up in a row, and y if WRITE_Y."""
    PARTS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < F
    first = row.to(tl.int64) * F
    dy = wide(dy_ptr + first + columns, mask)
    gate = wide(x_ptr + 2 * first + columns, mask)
    up = wide(x_ptr + 2 * first + F + columns, mask)
    gated = sigmoid(gate)
    slope = 1.0 + gate * (1.0 - gated)
    dgate = dy * up * gated * slope
    dgate = dgate.to(tl.bfloat16)
    dup = dy * gate * gated
    dup = dup.to(tl.bfloat16)
    tl.store(dx_ptr + 2 * first + columns, dgate, mask=mask)
    tl.store(dx_ptr + 2 * first + F + columns, dup, mask=mask)
    if WRITE_Y:
        # y may be dy, which all threads have read by now.
        tl.debug_barrier()
        y = gate * gated * up
        y = y.to(tl.bfloat16)
        tl.store(y_ptr + first + columns, y, mask=mask)


def swiglu_forward(gate_up: Tensor) -> Tensor:
    """Return `swiglu_ref` of contiguous bfloat16 gate_up [T, 2F], bfloat16 [T, F]."""
    rows, features = _checked(gate_up)
    y = torch.empty(rows, features, dtype=torch.bfloat16, device=gate_up.device)
    if y.numel():
        _forward_kernel[(rows * cdiv(features, _COLUMNS),)](
            gate_up, y, features, _COLUMNS, num_warps=_WARPS, enable_fp_fusion=False
        )
    return y


def swiglu_quantize(gate_up: Tensor, scales: str | None) -> QTensor:
    """Return `swiglu_forward(gate_up)` as INT8 rows [T, F]; scales must be None, their format."""
    assert scales is None, f"scales {scales}"
    return int8_rows(swiglu_forward(gate_up))


def swiglu_backward(dy: Tensor, gate_up: Tensor, y: Tensor | None = None) -> Tensor:
    """Return the gradient of gate_up, bfloat16 [T, 2F].

    Args:
        dy: bfloat16 [T, F], contiguous.
        gate_up: bfloat16 [T, 2F], contiguous.
        y: [T, F], if the result of the forward is written too; may be dy itself.
    """
    rows, features = _checked(gate_up)
    for tensor in (dy, dy if y is None else y):
        assert (tensor.dtype, tensor.shape) == (torch.bfloat16, (rows, features)), f"{tensor.shape}"
        assert tensor.is_contiguous(), f"strides {tensor.stride()}"
    dx = torch.empty_like(gate_up)
    if dy.numel():
        _backward_kernel[(rows * cdiv(features, _COLUMNS),)](
            dy, gate_up, dx, dy if y is None else y, y is not None, features, _COLUMNS,
            num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return dx


def _checked(gate_up: Tensor) -> tuple[int, int]:
    """Return T and F of gate_up after checking its layout."""
    assert (gate_up.dtype, gate_up.ndim) == (torch.bfloat16, 2), f"{gate_up.dtype} {gate_up.shape}"
    assert gate_up.is_contiguous(), f"strides {gate_up.stride()}"
    assert gate_up.shape[1] % 2 == 0, f"{gate_up.shape[1]} columns"
    return gate_up.shape[0], gate_up.shape[1] // 2
