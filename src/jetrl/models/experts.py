"""The block of experts: `models.experts_shape.ExpertsShape` as a module.

The router's weight is in the format `rest` of the plan, BF16 but for the fp32 plan, on both sides.
A token's experts and weights depend only on the token, so both sides route alike if their hidden
states have the same bits.

Legend: T tokens, R rows (T * k), D hidden size, F expert width, k experts per token (slots).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jetrl.kernels.routing import route
from jetrl.kernels.routing_rule import RoutingRule
from jetrl.kernels.swiglu import swiglu
from jetrl.models.experts_fused import fuses_experts, gated_rows_fused, tell_slots
from jetrl.models.experts_shape import ExpertsShape
from jetrl.models.layer import RMSNorm, Trace, tell
from jetrl.models.weights import Weights
from jetrl.precision.adapter_experts import adapted_grouped_linear
from jetrl.precision.experts import add_shared, combine, group_rows
from jetrl.precision.formats import Format
from jetrl.precision.groups import Groups
from jetrl.precision.linear import Linear
from jetrl.precision.plan import Side
from jetrl.precision.router import router_logits


@dataclass(frozen=True)
class Routes:
    """A layer's router logits [T, E] and chosen experts int64 [T, k] of T tokens."""

    logits: Tensor
    chosen: Tensor
    rule: RoutingRule


class ExpertsBlock(nn.Module):
    """The second half of a decoder layer: a norm, a router, and the experts that it chooses.

    `choose` has the arguments and results of `kernels.routing.route`, and only a study replaces it.
    """

    self_checks: Mapping[str, Callable[[Tensor], Tensor]] = {
        "routing": lambda logits: route(logits, RoutingRule(8))[1]
    }

    def __init__(
        self,
        index: int,
        shape: ExpertsShape,
        eps: float,
        weights: Weights,
        formats: Mapping[Side, Format],
    ) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.shape = shape
        self.observer: Callable[[Routes], None] | None = None
        self.choose: Callable[..., tuple[Tensor, Tensor]] = route
        self.norm = RMSNorm(weights, f"{name}.post_norm", eps)
        for format in formats.values():
            shape.check_formats(len(self.norm.weight), format)
        self.router = weights.linear(f"{name}.router", weights.rest)
        if shape.rule.wide:
            self.router.out_dtype = torch.float32
        self.choice_bias: nn.Parameter | None = None
        if shape.choice_bias:
            self.choice_bias = weights.master(f"{name}.{shape.buffers[0]}")
        self.gate_up = weights.linear(f"{name}.gate_up", formats)
        self.down = weights.linear(f"{name}.down", formats)
        self.shared_gate: Linear | None = None
        if shape.shared_gate:
            self.shared_gate = weights.linear(f"{name}.shared_gate", weights.rest)
        if shape.shared_width:
            self.shared_gate_up = weights.linear(f"{name}.shared_gate_up", formats)
            self.shared_down = weights.linear(f"{name}.shared_down", formats)

    def forward(
        self, x: Tensor, delta: Tensor, side: Side, trace: Trace | None
    ) -> tuple[Tensor, Tensor]:
        """Return x + delta and the block's output for that sum, both [T, D]."""
        x = x + delta
        normed = self.norm(x)
        tell(trace, "post_norm", normed)
        logits = router_logits(normed, self.router, side)
        tell(trace, "router", logits)
        chosen, shares = self.choose(logits, self.shape.rule, self.choice_bias)
        if self.observer is not None:
            self.observer(Routes(logits, chosen, self.shape.rule))
        tell(trace, "experts", chosen)
        tell(trace, "shares", shares)
        groups = group_rows(chosen, self.shape.num_experts)
        outputs = self._outputs(normed, groups, side, trace)
        tell_slots(trace, "down", outputs, groups)
        delta = combine(outputs, shares, groups)
        gate = None
        if self.shared_gate is not None:
            gate = router_logits(normed, self.shared_gate, side)
            tell(trace, "shared_gate", gate)
        if self.shape.shared_width:
            shared = self.shared_down(swiglu(self.shared_gate_up(normed, side)), side)
            tell(trace, "shared_down", shared)
            delta = delta + shared if gate is None else add_shared(delta, shared, gate)
        tell(trace, "combined", delta)
        return x, delta

    def _outputs(self, normed: Tensor, groups: Groups, side: Side, trace: Trace | None) -> Tensor:
        """Return the outputs of experts [R, D]; fused on a GPU for weights in codes."""
        linears = (self.gate_up, self.down)
        if fuses_experts(normed, linears, side):
            return gated_rows_fused(normed, linears, groups, side, trace)
        gates = adapted_grouped_linear(normed, self.gate_up, groups, side, by_token=True)
        tell_slots(trace, "gate_up", gates, groups)
        gated = swiglu(gates)
        tell_slots(trace, "swiglu", gated, groups)
        return adapted_grouped_linear(gated, self.down, groups, side)


def blocks_of(decoder: nn.Module) -> list[ExpertsBlock]:
    """Return the blocks of experts, in order."""
    return [module for module in decoder.modules() if isinstance(module, ExpertsBlock)]


@contextlib.contextmanager
def observed_routes(decoder: nn.Module) -> Iterator[list[Routes]]:
    """Collect the routes of each layer with experts, in order, of the forwards in the block."""
    found: list[Routes] = []
    blocks = blocks_of(decoder)
    for block in blocks:
        block.observer = found.append
    try:
        yield found
    finally:
        for block in blocks:
            block.observer = None
