"""The block of a decoder layer, its second half: config keys, weights and memory costs.

A kind of block has a record here and a module, paired in `models.decoder.BLOCKS`; a family names
its record (`models.families`). The fields of a record are its keys in config.json. The record owns
the names and shapes of weights, here and in Hugging Face files, and the activation bytes for the
memory plan. The module has the forward of each side and the self-checks. No other code names a
weight of a block. This file must not import torch.

A weight is a norm or a matrix [out, in]. Experts are stacked along rows: E experts of N outputs
are one matrix [E * N, K] (N a multiple of 128 for FP8), and `stored_names` lists the modules of
each in order: mlp.experts.0.gate_proj, mlp.experts.0.up_proj, mlp.experts.1.gate_proj. So
rounding, gradients, the optimizer, several GPUs and checkpoints do not depend on experts.

Matrices in `linears` are linear layers, whose format depends on plans, exports and adapter targets.
Other matrices, such as a router, are not: their module reads them by `Weights.linear` in the format
`rest` of the plan.

Legend: T tokens, D hidden size, F inner size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AliasChoices, Field

from jetrl.files import Stored

if TYPE_CHECKING:  # torch comes with it, which `jetrl init --help` does not need
    from jetrl.precision.formats import Format


Shapes = dict[str, tuple[int, ...]]
Names = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class SavedCodes:
    """The matrices that half a layer saves as codes under `precision.saved = int8`.

    Attributes:
        widths: The values per token of each matrix.
        replaced: Values per token that are saved without the option, in place of these.
        restored: Values per token that backward makes from codes at a time, in 16 bits.
    """

    widths: tuple[int, ...]
    replaced: int
    restored: int

    @property
    def code_bytes(self) -> int:
        """The bytes per token: a code per value, and a float32 scale per 128 of a matrix."""
        return sum(width + 4 * -(-width // 128) for width in self.widths)


class LayerHalf(Stored, ABC, extra="ignore"):
    """The base class of the records of blocks and of mixers (`models.mixer`).

    A field without a default is required in config.json; its example is the value of a tiny model.
    A field with a default has transformers' default for the family if the key is absent.
    """

    linears: ClassVar[tuple[str, ...]]
    """The linear layers in the order of the forward pass; the last writes the residual stream."""

    by_name: ClassVar[tuple[str, ...]] = ()
    """The linear layers that `adapter.targets` selects only by their names, not as all-linear."""

    buffers: ClassVar[tuple[str, ...]] = ()
    """The parameters that are never trained: vectors in float32, here and in every file."""

    @classmethod
    def tiny(cls) -> dict[str, Any]:
        """Return the required keys of a tiny model."""
        keys = cls.keys()
        return {keys[name]: f.examples[0] for name, f in cls.model_fields.items() if f.examples}

    @classmethod
    def keys(cls) -> dict[str, str]:
        """Return the key of config.json for each field, the first of several."""
        aliases = ((name, field.validation_alias) for name, field in cls.model_fields.items())
        return {n: str(a.choices[0]) if isinstance(a, AliasChoices) else n for n, a in aliases}

    @abstractmethod
    def parameter_shapes(self, hidden: int) -> Shapes:
        """Return the shape of each parameter by its name in a layer, its norm's first."""

    @abstractmethod
    def stored_names(self, fused: bool) -> Names:
        """Return the modules that each weight stacks; Phi-3 stores them `fused`."""

    @property
    def saved_codes(self) -> SavedCodes | None:
        """The matrices saved as codes under `precision.saved = int8`; None: not supported."""
        return None

    @property
    def stored_rows(self) -> Shapes:
        """The rows of the modules that a weight stacks, by its name; if absent, they are equal."""
        return {}


class Block(LayerHalf):
    """The base class of the records of blocks."""

    def of_layer(self, index: int) -> Block:
        """Return the record of one layer, which may be of another kind."""
        return self

    @property
    def fused_names(self) -> Mapping[str, tuple[str, int]]:
        """The tensors of files that fuse modules: name and number of modules of each weight."""
        return {}

    @abstractmethod
    def kept_values(self, hidden: int, inputs: bool) -> int:
        """Return the values per token saved for backward, without the norm's output.

        `inputs`: whether the inputs of linear layers are saved; otherwise they are recomputed.
        """

    def adapter_values(self, linear: str, parts: int, width: int) -> int:
        """Return the values per token saved for a linear layer with parts of `width` columns."""
        return parts * width

    @abstractmethod
    def forward_values(self, hidden: int, adapted: bool) -> int:
        """Return the maximum number of values per token held by a forward without gradients."""

    @abstractmethod
    def backward_bytes(
        self, hidden: int, tokens: int, format: Format, first: bool, group: int
    ) -> int:
        """Return the maximum bytes that backward holds on top of the saved activations.

        `first`: whether it allocates the gradients that later ones add to. `group`: tokens per
        scale of dY.
        """

    @abstractmethod
    def adapted_backward_bytes(self, hidden: int, tokens: int, format: Format, weight: int) -> int:
        """Return `backward_bytes` of a frozen block with adapters.

        `weight` is the bytes of a weight in 16 bits, which NVFP4 needs; 0 for other formats.
        """


class DenseShape(Block):
    """SwiGLU between two dense linear layers: y = down(silu(gate) * up), gate, up = gate_up(x).

    `gate_up` stacks the gate and up projections for one GEMM.
    """

    linears = ("gate_up", "down")

    intermediate_size: Annotated[
        int, Field(ge=1, le=2**20, description="channels of the MLP", examples=[384])
    ]

    @staticmethod
    def matrices(hidden: int, inner: int) -> Shapes:
        """Return the shapes of the matrices by name."""
        return {"gate_up.weight": (2 * inner, hidden), "down.weight": (hidden, inner)}

    def parameter_shapes(self, hidden: int) -> Shapes:
        return {"post_norm.weight": (hidden,), **self.matrices(hidden, self.intermediate_size)}

    def stored_names(self, fused: bool) -> Names:
        return {
            "post_norm": ("post_attention_layernorm",),
            "gate_up": ("mlp.gate_up_proj",) if fused else ("mlp.gate_proj", "mlp.up_proj"),
            "down": ("mlp.down_proj",),
        }

    def kept_values(self, hidden: int, inputs: bool) -> int:
        return (3 if inputs else 2) * self.intermediate_size

    @property
    def saved_codes(self) -> SavedCodes:
        gates = 2 * self.intermediate_size
        return SavedCodes(widths=(gates,), replaced=gates, restored=gates)

    def forward_values(self, hidden: int, adapted: bool) -> int:
        return 7 * hidden + (7 if adapted else 6) * self.intermediate_size // 2

    def backward_bytes(
        self, hidden: int, tokens: int, format: Format, first: bool, group: int
    ) -> int:
        inner = self.intermediate_size
        residual = 2 * hidden * tokens  # its gradient, in BF16
        dw = 2 * 2 * inner * hidden  # of gate_up, in BF16
        gradient = 2 * dw if first else 0  # the same in FP32, for later micro-batches to add to
        if not format.coded:
            # dY of SwiGLU and of gate_up; dX and X of gate_up.
            return residual + (2 + 4) * inner * tokens + (2 + 2) * hidden * tokens + gradient
        if not format.grouped or inner % group:
            # Not fused. While dY of gate_up is quantized: dY of SwiGLU and of gate_up in BF16, two
            # codes of each value of the latter, and codes of SwiGLU's output. Also dY of down, in
            # BF16 and two codes.
            quantized = (2 + 4 + 2 * 2 + 1) * inner * tokens + (2 + 2) * hidden * tokens
            # While dW of gate_up is computed: codes of its dY; dX, X in BF16, and codes of X. Also
            # dY of down.
            wgrad = 2 * 2 * inner * tokens + (2 + 2 + 1 + 2) * hidden * tokens + dw + gradient
            return residual + max(quantized, wgrad)
        # While dY of gate_up is computed: two codes of down's dY; dY and output codes of SwiGLU.
        gated = (2 * hidden + 3 * inner) * tokens
        # While dW of gate_up is computed: dX and codes of X.
        wgrad = 3 * hidden * tokens + dw + gradient
        groups = -(-tokens // group)  # codes and scales along tokens
        codes = 2 * inner * groups * (group + 4)
        return residual + 2 * codes + max(gated, wgrad)

    def adapted_backward_bytes(self, hidden: int, tokens: int, format: Format, weight: int) -> int:
        inner = self.intermediate_size
        weight = weight or (2 * inner * hidden if format.coded else 0)
        held = (6 * hidden + 6 * inner) * tokens + weight
        if format.grouped:  # SwiGLU's dY, then Y in its place, and dX twice
            held = max(held, (4 * hidden + 8 * inner) * tokens)
        return held
