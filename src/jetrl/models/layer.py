"""The operations of a decoder that a GPU fuses: their references, and the choice between the two.

    norm_linear   total = x + delta;  y = linear(norm(total))
    norm_mlp      total = x + delta;  y = down(swiglu(gate_up(norm(total))))
    add_norm      norm(x + delta)

Each function's body is the reference and the specification. BF16 tensors on a GPU go to the fused
form (`models.layer_hopper`, with adapters `models.layer_adapter_hopper`), which has the same bits
in the forward. `delta` is what the operation
before adds to the residual stream x, handed on so that the addition can be part of the next norm.

Legend: T tokens, D hidden size, N output features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.swiglu import swiglu
from jetrl.models.norm import RMSNorm
from jetrl.models.normed_linears import NormedLinears
from jetrl.models.trace import Trace, tell
from jetrl.precision.linear import Linear
from jetrl.precision.plan import Side


def _fuses(x: Tensor) -> bool:
    """Return whether the fused forms take x: BF16 on a GPU."""
    return x.is_cuda and x.dtype == torch.bfloat16


def norm_linear(
    x: Tensor, delta: Tensor | None, norm: RMSNorm, linear: Linear, side: Side, trace: Trace | None
) -> tuple[Tensor, Tensor]:
    """Return x + delta [T, D] and linear(norm(x + delta)) [T, N]: how attention is entered.

    Args:
        x: The residual stream [T, D].
        delta: What is added to the stream first, [T, D] or None.
        trace: A function that sees the norm's output, or None.
    """
    if _fuses(x) and linear.adapter is not None:
        from jetrl.models.layer_adapter_hopper import norm_linear_adapted

        return norm_linear_adapted(x, delta, NormedLinears(norm, (linear,), side, trace))
    if _fuses(x):
        from jetrl.models.layer_hopper import norm_linear_hopper

        return norm_linear_hopper(x, delta, NormedLinears(norm, (linear,), side, trace))
    x = x if delta is None else x + delta
    normed = norm(x)
    tell(trace, "input_norm", normed)
    return x, linear(normed, side)


def norm_mlp(
    x: Tensor,
    delta: Tensor,
    norm: RMSNorm,
    gate_up: Linear,
    down: Linear,
    side: Side,
    trace: Trace | None,
) -> tuple[Tensor, Tensor]:
    """Return x + delta and down(swiglu(gate_up(norm(x + delta)))), both [T, D].

    Args:
        x: The residual stream [T, D].
        delta: What is added to the stream first, [T, D].
        trace: A function that sees the output of each operation but the last, or None.
    """
    if _fuses(x) and not (gate_up.adapter is None and down.adapter is None):
        from jetrl.models.layer_adapter_hopper import norm_mlp_adapted

        return norm_mlp_adapted(x, delta, NormedLinears(norm, (gate_up, down), side, trace))
    if _fuses(x):
        from jetrl.models.layer_hopper import norm_mlp_hopper

        return norm_mlp_hopper(x, delta, NormedLinears(norm, (gate_up, down), side, trace))
    x = x + delta
    normed = norm(x)
    tell(trace, "post_norm", normed)
    gates = gate_up(normed, side)
    tell(trace, "gate_up", gates)
    gated = swiglu(gates)
    tell(trace, "swiglu", gated)
    return x, down(gated, side)


def add_norm(x: Tensor, delta: Tensor, norm: RMSNorm) -> Tensor:
    """Return norm(x + delta) [T, D]: how the last layer is left.

    Args:
        x: The residual stream [T, D].
        delta: What the last layer adds to the stream, [T, D].
    """
    if _fuses(x):
        from jetrl.models.layer_hopper import add_norm_hopper

        return add_norm_hopper(x, delta, norm)
    normed: Tensor = norm(x + delta)
    return normed
