"""The record of a norm and linear layers that the fused operations of a GPU take."""

from __future__ import annotations

from dataclasses import dataclass

from jetrl.models.norm import RMSNorm
from jetrl.models.trace import Trace
from jetrl.precision.linear import Linear
from jetrl.precision.plan import Side


@dataclass(frozen=True)
class NormedLinears:
    """A norm and the linear layers behind it, for one call of `models.layer`.

    Attributes:
        trace: A function that sees the outputs of operations, or None.
    """

    norm: RMSNorm
    linears: tuple[Linear, ...]
    side: Side
    trace: Trace | None
