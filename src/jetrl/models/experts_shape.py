"""The block of experts: keys of its families in config.json, weights and memory costs.

A router chooses k of E experts per token, each a SwiGLU of its own; their outputs are added with
the router's weights:

    y = sum over slots s of w[s] * down_e(silu(gate) * up),  gate, up = gate_up_e(x),  e = chosen[s]

Families differ in their keys and in the rule of their router (`kernels.routing_rule`). A layer that
the keys make dense has `models.block.DenseShape`. Experts have no capacity and drop no token; keys
that ask for it are refused (`models.config_schema`). This file must not import torch.

Legend: T tokens, D hidden size, E experts, F expert width, k experts per token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field, ValidationInfo, field_validator

from jetrl.errors import UserError
from jetrl.kernels.routing_rule import RoutingRule
from jetrl.models.block import Block, DenseShape, Names, Shapes

if TYPE_CHECKING:  # as in `models.block`
    from jetrl.precision.formats import Format

_Count = Annotated[int, Field(ge=1, le=2**14)]
_Width = Annotated[int, Field(ge=1, le=2**20)]
_Layers = Annotated[
    Annotated[tuple[int, ...], Field(max_length=2**14)] | None,
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]  # a tuple, so that records can be hashed

_CHOICE_BIAS = "router.e_score_correction_bias"  # its name in files too, of the module `mlp.gate`


class ExpertsShape(Block):
    """The base class of the records of experts.

    Attributes:
        num_experts: `num_local_experts` in some files of transformers 5.
        router_aux_loss_coef: The weight of the family's load-balancing loss. Only
            `train.router_aux_loss` sets the one of a run.
    """

    linears: ClassVar[tuple[str, ...]] = ("gate_up", "down")
    by_name = ("gate_up", "down")
    num_experts: Annotated[
        _Count,
        Field(
            description="experts per layer",
            examples=[8],
            validation_alias=AliasChoices("num_experts", "num_local_experts"),
        ),
    ]
    num_experts_per_tok: Annotated[_Count, Field(description="experts per token", examples=[2])]
    shared_expert_intermediate_size: Literal[0, None] = None
    n_shared_experts: Literal[0, None] = None
    scoring_func: Literal["softmax", None] = None
    topk_method: Literal["greedy", None] = None
    moe_layer_freq: Literal[1, None] = None
    norm_topk_prob: bool = False
    router_aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0

    @field_validator("num_experts_per_tok")
    @classmethod
    def _chosen_exist(cls, chosen: int, info: ValidationInfo) -> int:
        """Refuse to choose more experts than there are; a wrong count has an error of its own."""
        count = info.data.get("num_experts", chosen)
        if chosen > count:
            raise ValueError(f"should be at most num_experts = {count}")
        return chosen

    @property
    @abstractmethod
    def width(self) -> int:
        """F, the inner size of an expert."""

    @property
    def shared_width(self) -> int:
        """The inner size of the expert that all tokens share; 0 without one."""
        return 0

    @property
    def shared_gate(self) -> bool:
        """Return whether a gate scales the shared expert's output."""
        return False

    @property
    def choice_bias(self) -> bool:
        """Return whether a bias, a buffer, is added to scores for the choice."""
        return bool(self.buffers)

    @property
    def rule(self) -> RoutingRule:
        """The rule of the router."""
        return RoutingRule(self.num_experts_per_tok, normalized=self.norm_topk_prob)

    def check_formats(self, hidden: int, format: Format) -> None:
        """Raise a UserError if an expert's matrices do not fit the groups of a format."""
        if format.emulated:
            raise UserError(
                f"training in {format.words} is not for experts: use precision.preset=int8, or a "
                "dense model"
            )
        if format.frozen:
            raise UserError(
                f"precision.base = {format.name} is not for experts: leave it out, or use a dense "
                "model"
            )
        if not format.coded:
            return
        of_hidden = 128 if format.grouped else format.multiple
        for key, size, multiple in (
            ("hidden_size", hidden, of_hidden),
            ("the width of experts", self.width, format.multiple),
        ):
            if size % multiple:
                raise UserError(
                    f"config.json: {key} = {size}: experts in {format.words} need a multiple of "
                    f"{multiple}; use precision.preset=bf16"
                )

    def parameter_shapes(self, hidden: int) -> Shapes:
        return {
            "post_norm.weight": (hidden,),
            "router.weight": (self.num_experts, hidden),
            "gate_up.weight": (self.num_experts * 2 * self.width, hidden),
            "down.weight": (self.num_experts * hidden, self.width),
        }

    def stored_names(self, fused: bool) -> Names:
        experts = [f"mlp.experts.{number}" for number in range(self.num_experts)]
        return {
            "post_norm": ("post_attention_layernorm",),
            "router": ("mlp.gate",),
            "gate_up": tuple(f"{e}.{half}_proj" for e in experts for half in ("gate", "up")),
            "down": tuple(f"{e}.down_proj" for e in experts),
        }

    @property
    def fused_names(self) -> Mapping[str, tuple[str, int]]:
        count = self.num_experts
        return {
            "gate_up": ("mlp.experts.gate_up_proj", count),  # [E, 2F, D]
            "down": ("mlp.experts.down_proj", count),  # [E, D, F]
        }

    def kept_values(self, hidden: int, inputs: bool) -> int:
        # Per slot: gate_up's output, SwiGLU's if it is an input, and down's; the norm's output;
        # scores in float32.
        entered = 0 if inputs else hidden
        entered += 3 * self.shared_width + (hidden if self.shared_width else 0)
        slots = self.num_experts_per_tok * ((3 if inputs else 2) * self.width + hidden + 4)
        return slots + entered + 2 * self.num_experts

    def adapter_values(self, linear: str, parts: int, width: int) -> int:
        if linear not in self.by_name:
            return parts * width
        # Per slot: the parts of one expert, and SwiGLU's output for A of `down`.
        entered = self.width if linear == "down" else 0
        return self.num_experts_per_tok * (-(-parts // self.num_experts) * width + entered)

    def forward_values(self, hidden: int, adapted: bool) -> int:
        slots = self.num_experts_per_tok * (3 * self.width + 2 * hidden + 4)
        shared = 3 * self.shared_width + (2 * hidden if self.shared_width else 0)
        return 5 * hidden + slots + shared + 4 * self.num_experts

    def backward_bytes(
        self, hidden: int, tokens: int, format: Format, first: bool, group: int
    ) -> int:
        # dW of gate_up, in BF16 if it is a product of codes and, if it becomes the sum, in FP32.
        wide = (2 if format.coded else 0) + (4 if first else 0)
        product = wide * self.num_experts * 2 * self.width * hidden
        return self._gradient_bytes(hidden, tokens, format) + product

    def adapted_backward_bytes(self, hidden: int, tokens: int, format: Format, weight: int) -> int:
        turned = self.num_experts * 2 * self.width * hidden if format.coded else 0  # in codes
        return self._gradient_bytes(hidden, tokens, format) + turned + weight

    def _gradient_bytes(self, hidden: int, tokens: int, format: Format) -> int:
        """Return the bytes of gradients per slot in BF16, and of their codes."""
        codes = self.width * 2 + hidden if format.coded else 0
        per_slot = 2 * (2 * hidden + 3 * self.width) + codes
        shared = 6 * self.shared_width + (4 * hidden if self.shared_width else 0)
        return tokens * (self.num_experts_per_tok * per_slot + 8 * hidden + shared)


class Qwen3Experts(ExpertsShape):
    """Experts of qwen3_moe. Some layers may be dense: `mlp_only_layers`, `decoder_sparse_step`."""

    moe_intermediate_size: Annotated[
        _Width, Field(description="inner channels of an expert", examples=[128])
    ]
    intermediate_size: _Width = 6144
    decoder_sparse_step: Annotated[int, Field(ge=1)] = 1
    mlp_only_layers: _Layers = None

    @property
    def width(self) -> int:
        return self.moe_intermediate_size

    def of_layer(self, index: int) -> Block:
        dense = index in (self.mlp_only_layers or ())
        if dense or (index + 1) % self.decoder_sparse_step:
            return DenseShape(intermediate_size=self.intermediate_size)
        return self


class Qwen2Experts(Qwen3Experts):
    """Experts of qwen2_moe: in addition, one that all tokens share, scaled by a sigmoid gate."""

    linears = ("gate_up", "down", "shared_gate_up", "shared_down")

    shared_expert_intermediate_size: Annotated[  # type: ignore[assignment]  # a size here
        _Width, Field(description="inner channels of the shared expert", examples=[128])
    ]

    @property
    def shared_width(self) -> int:
        return int(self.shared_expert_intermediate_size)

    @property
    def shared_gate(self) -> bool:
        return True

    def parameter_shapes(self, hidden: int) -> Shapes:
        shared = _shared_shapes(hidden, self.shared_width)
        return super().parameter_shapes(hidden) | {"shared_gate.weight": (1, hidden)} | shared

    def stored_names(self, fused: bool) -> Names:
        gate = {"shared_gate": ("mlp.shared_expert_gate",)}
        return super().stored_names(fused) | gate | _shared_names("mlp.shared_expert")


class Glm4Experts(ExpertsShape):
    """Experts of glm4_moe, behind DeepSeek-V3's router (arXiv 2412.19437, sec. 2.1.2).

    Scores are sigmoids of float32 logits. `e_score_correction_bias` is added for the choice only;
    its rule of adjusting it by loads is not trained here, so it stays as it is. The shared expert
    has no gate, and the first layers are dense.

    Attributes:
        routed_scaling_factor: By which the weights of chosen experts are multiplied.
    """

    linears = ("gate_up", "down", "shared_gate_up", "shared_down")
    buffers = (_CHOICE_BIAS,)

    num_experts: Annotated[
        _Count,
        Field(
            description="experts per layer",
            examples=[8],
            validation_alias=AliasChoices("n_routed_experts", "num_local_experts"),
        ),
    ]
    moe_intermediate_size: Annotated[
        _Width, Field(description="inner channels of an expert", examples=[128])
    ]
    intermediate_size: Annotated[
        _Width, Field(description="inner channels of dense layers", examples=[384])
    ]
    n_shared_experts: Annotated[int, Field(ge=0, le=2**14)] = 1  # type: ignore[assignment]
    scoring_func: Literal["sigmoid", None] = None  # type: ignore[assignment]
    topk_method: Literal["noaux_tc", None] = None  # type: ignore[assignment]  # with the bias
    first_k_dense_replace: Annotated[int, Field(ge=0)] = 1
    routed_scaling_factor: Annotated[float, Field(gt=0, le=1e30)] = 1.0
    norm_topk_prob: bool = True

    @property
    def width(self) -> int:
        return self.moe_intermediate_size

    @property
    def shared_width(self) -> int:
        return self.moe_intermediate_size * self.n_shared_experts

    @property
    def rule(self) -> RoutingRule:
        return RoutingRule(
            num_chosen=self.num_experts_per_tok,
            scores="sigmoid",
            normalized=self.norm_topk_prob,
            floor=1e-20,
            scale=self.routed_scaling_factor,
            wide=True,
        )

    def of_layer(self, index: int) -> Block:
        if index < self.first_k_dense_replace:
            return DenseShape(intermediate_size=self.intermediate_size)
        return self

    def parameter_shapes(self, hidden: int) -> Shapes:
        shapes = super().parameter_shapes(hidden) | {_CHOICE_BIAS: (self.num_experts,)}
        return shapes | (_shared_shapes(hidden, self.shared_width) if self.shared_width else {})

    def stored_names(self, fused: bool) -> Names:
        return super().stored_names(fused) | _shared_names("mlp.shared_experts")


def _shared_shapes(hidden: int, width: int) -> Shapes:
    return {"shared_gate_up.weight": (2 * width, hidden), "shared_down.weight": (hidden, width)}


def _shared_names(module: str) -> Names:
    return {
        "shared_gate_up": (f"{module}.gate_proj", f"{module}.up_proj"),
        "shared_down": (f"{module}.down_proj",),
    }


class OlmoeExperts(ExpertsShape):
    """Experts of olmoe, whose `intermediate_size` is the width of an expert."""

    intermediate_size: Annotated[
        _Width, Field(description="inner channels of an expert", examples=[128])
    ]

    @property
    def width(self) -> int:
        return self.intermediate_size
