"""The block of a decoder layer, the half after attention: its shape, names and costs.

A block kind is a record here and a module (`models.dense`). The record owns weight names and
shapes, config.json keys, Hugging Face tensor names, and activation bytes for the memory plan; the
module owns the forward of each side and the self-checks. Nothing else names a weight of a block.
`DenseShape` is the only kind today. No torch.

Legend: T tokens, D hidden size, F inner size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jetrl.models.config_schema import HfConfig


@dataclass(frozen=True)
class DenseShape:
    """SwiGLU between two dense linear layers: y = down(silu(gate) * up), gate, up = gate_up(x).

    `gate_up` stacks the gate and up projections for one GEMM. `inner` is F.
    """

    inner: int

    hf_sizes: ClassVar[Mapping[str, tuple[int, str]]] = {
        "intermediate_size": (384, "channels of the MLP")
    }
    """Required keys of config.json: the value of a tiny model, and the meaning."""
    linears: ClassVar[tuple[str, ...]] = ("gate_up", "down")
    """The linear layers in the order of the forward pass; the last writes the residual stream."""

    @staticmethod
    def from_hf(config: HfConfig) -> DenseShape:
        return DenseShape(config.intermediate_size)

    def to_hf(self) -> dict[str, Any]:
        """Return the block's keys of config.json."""
        return {"intermediate_size": self.inner}

    def linear_shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return [out, in] of each linear layer by name."""
        return {"gate_up": (2 * self.inner, hidden), "down": (hidden, self.inner)}

    def parameter_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter by its name in a layer, in forward order."""
        linears = {f"{name}.weight": shape for name, shape in self.linear_shapes(hidden).items()}
        return {"post_norm.weight": (hidden,), **linears}

    @staticmethod
    def stored_names(fused: bool) -> dict[str, tuple[str, ...]]:
        """Return the modules that each weight stacks, in equal rows; Phi-3 stores them `fused`."""
        return {
            "post_norm": ("post_attention_layernorm",),
            "gate_up": ("mlp.gate_up_proj",) if fused else ("mlp.gate_proj", "mlp.up_proj"),
            "down": ("mlp.down_proj",),
        }

    def kept_values(self, inputs: bool) -> int:
        """Return the values per token saved for backward, without the norm's output (the caller's).

        `inputs`: the inputs of the linear layers are saved too; FP8 and adapters recompute them.
        """
        return 2 * self.inner + (self.inner if inputs else 0)

    def forward_values(self, hidden: int, adapted: bool) -> int:
        """Return the maximum number of values per token held by a forward without gradients."""
        return 7 * hidden + 3 * self.inner + (self.inner // 2 if adapted else 0)

    def backward_bytes(self, hidden: int, tokens: int, fp8: bool, first: bool, group: int) -> int:
        """Return the maximum bytes that backward holds on top of the saved activations.

        `first`: backward allocates gradients; later ones add in place. `group`: tokens per dY
        scale.
        """
        gradient = 4 * 2 * self.inner * hidden if first else 0
        if not fp8:
            return (6 * hidden + 6 * self.inner) * tokens + gradient
        # While dY of gate_up is made: dY of down as codes, dY of SwiGLU, the codes of its output.
        gated = (2 * hidden + 3 * self.inner) * tokens
        # While dW of gate_up is made: dX, the codes of X, and the product in bfloat16.
        wgrad = 3 * hidden * tokens + 2 * 2 * self.inner * hidden + gradient
        groups = -(-tokens // group)  # codes and scales along tokens
        codes = 2 * self.inner * groups * (group + 4)
        return 2 * hidden * tokens + 2 * codes + max(gated, wgrad)

    def adapted_backward_bytes(self, hidden: int, tokens: int, fp8: bool, weight: int) -> int:
        """Return `backward_bytes` of a frozen block with adapters.

        `weight` is the bytes of a weight in 16 bits, which NVFP4 needs; 0 for other formats.
        """
        weight = weight or (2 * self.inner * hidden if fp8 else 0)
        held = (6 * hidden + 6 * self.inner) * tokens + weight
        if fp8:  # SwiGLU's dY, then Y in its place, and dX twice
            held = max(held, (4 * hidden + 8 * self.inner) * tokens)
        return held
