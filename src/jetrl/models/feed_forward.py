"""The feed-forward block of a decoder layer: today SwiGLU between two dense linear layers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from jetrl.models.families import ModelConfig
from jetrl.models.layer import norm_mlp
from jetrl.models.trace import Trace, tell
from jetrl.models.weights import Weights
from jetrl.precision.plan import LinearFormat, Side


class FeedForward(nn.Module):
    """The second half of a decoder layer: a norm and what stands behind it.

    A decoder layer makes this block, calls it, and knows nothing of its weights.
    """

    def __init__(
        self, name: str, config: ModelConfig, weights: Weights, formats: Mapping[Side, LinearFormat]
    ) -> None:
        super().__init__()
        self.norm = weights.norm(f"{name}.post_norm", config.rms_norm_eps)
        self.gate_up = weights.linear(f"{name}.gate_up", formats)
        self.down = weights.linear(f"{name}.down", formats)

    def forward(
        self, x: Tensor, delta: Tensor, side: Side, trace: Trace | None
    ) -> tuple[Tensor, Tensor]:
        """Return x + delta and what the block adds to that sum, both [T, D].

        Args:
            x: The residual stream [T, D].
            delta: What attention adds to the stream, [T, D].
            trace: A function that sees the outputs of operations, or None.
        """
        x, delta = norm_mlp(x, delta, self.norm, self.gate_up, self.down, side, trace)
        tell(trace, "down", delta)
        return x, delta
