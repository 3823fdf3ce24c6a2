"""The dense block of a decoder layer: `models.block.DenseShape` as a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn.functional import linear, silu

from jetrl.kernels.swiglu import swiglu
from jetrl.models.block import DenseShape
from jetrl.models.dense_fused import norm_mlp_fused
from jetrl.models.layer import RMSNorm, Trace, fuses, tell
from jetrl.models.weights import Weights
from jetrl.precision.formats import Format
from jetrl.precision.plan import Side
from jetrl.precision.saved import gradient_at_codes, saves_codes


class DenseBlock(nn.Module):
    """The second half of a decoder layer: a norm, `gate_up`, SwiGLU and `down`."""

    self_checks: Mapping[str, Callable[[Tensor], Tensor]] = {"SwiGLU": swiglu}
    """Operations [T, 2F] -> [T, F] whose rows must not depend on the batch, for `jetrl parity`."""

    def __init__(
        self,
        index: int,
        shape: DenseShape,
        eps: float,
        weights: Weights,
        formats: Mapping[Side, Format],
    ) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.norm = RMSNorm(weights, f"{name}.post_norm", eps)
        self.gate_up = weights.linear(f"{name}.gate_up", formats)
        self.down = weights.linear(f"{name}.down", formats)

    def forward(
        self, x: Tensor, delta: Tensor, side: Side, trace: Trace | None
    ) -> tuple[Tensor, Tensor]:
        """Return x + delta and the block's output for that sum, both [T, D]; fused on a GPU."""
        if fuses(x):
            x, delta = norm_mlp_fused(x, delta, self.norm, (self.gate_up, self.down), side, trace)
        else:
            x = x + delta
            normed = self.norm(x)
            tell(trace, "post_norm", normed)
            gates = self.gate_up(normed, side)
            tell(trace, "gate_up", gates)
            delta = self._gated(gates, side, trace)
            if saves_codes(self.down.plan):
                delta = gradient_at_codes(lambda x: self._gated(x, side, None), gates, delta)
        tell(trace, "down", delta)
        return x, delta

    def _gated(self, gates: Tensor, side: Side, trace: Trace | None) -> Tensor:
        """Return down(swiglu(gates)) [T, D]."""
        gated = swiglu(gates)
        tell(trace, "swiglu", gated)
        return self.down(gated, side)


def dense_mlp(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return down(silu(gate) * up) of x [B, D] in plain torch; names are as in `DenseBlock`."""
    gate, up = linear(x, weights["gate_up.weight"]).chunk(2, dim=1)
    return linear(silu(gate) * up, weights["down.weight"])
