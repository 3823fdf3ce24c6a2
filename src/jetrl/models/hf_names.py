"""The Hugging Face tensors that each of our parameters is made of.

Our Q, K and V projections are one matrix and so are gate and up: one GEMM each. A checkpoint keeps
them apart, so a parameter is the concatenation, along dimension 0, of one or more stored tensors:

    layers.0.qkv.weight [(Hq + 2 Hkv) Dh, D]  =  model.layers.0.self_attn.{q,k,v}_proj.weight
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jetrl.models.families import FAMILIES, ModelConfig, parameter_shapes

FP8_BLOCK = (128, 128)  # of weights, in checkpoints as in the policy
SCALE_SUFFIX = (
    "_scale_inv"  # of the tensor of scales beside an FP8 weight; a scale, not its inverse
)

_WHOLE = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    "score.weight": "score.weight",
}
_IN_LAYER = {
    "input_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "o": ("self_attn.o_proj",),
    "post_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_FUSED = {"qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)}  # Phi-3 and Phi-4
_LINEARS = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, which may be a part of one of our parameters.

    Attributes:
        shape: The tensor's shape, as the config has it.
        layer: The decoder layer that the tensor belongs to; None outside the layers.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    linear_weight: bool

    @property
    def num_elements(self) -> int:
        """The number of the tensor's elements."""
        return math.prod(self.shape)


def stored_tensors(config: ModelConfig) -> dict[str, tuple[StoredTensor, ...]]:
    """Return the parts of each parameter in a checkpoint, in stacking order, by internal name."""
    return {name: _parts(config, name, shape) for name, shape in parameter_shapes(config).items()}


def _parts(config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
    if name in _WHOLE:
        return (StoredTensor(_WHOLE[name], shape, None, False),)
    _, number, module, kind = name.split(".")
    fused = _FUSED if FAMILIES[config.family].fused else {}
    names = fused.get(module, _IN_LAYER[module])
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    stacked = {"qkv": (query, key, key), "gate_up": (config.intermediate_size,) * 2}
    rows = stacked.get(module, ()) if len(names) > 1 else (shape[0],)
    return tuple(
        StoredTensor(
            name=f"model.layers.{number}.{part}.{kind}",
            shape=(num_rows, *shape[1:]),
            layer=int(number),
            linear_weight=kind == "weight" and module in _LINEARS,
        )
        for part, num_rows in zip(names, rows, strict=True)
    )
