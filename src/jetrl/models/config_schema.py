"""The schema of a model directory's config.json, as far as this decoder reads it.

The bounds are far above those of any model, and low enough that a file of a few bytes cannot ask
for years of work: sizes are compared with the tensors before anything of that size is allocated.
Settings that this decoder does not compute are refused here or in `families`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from jetrl.files import Stored
from jetrl.settings.section import MOST_LAYERS

Name = Annotated[str, Field(max_length=200)]
Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Heads = Annotated[int, Field(ge=1, le=2**14)]
Width = Annotated[int, Field(ge=1, le=2**20)]
Vocabulary = Annotated[int, Field(ge=1, le=2**24)]
Positions = Annotated[int, Field(ge=1, le=2**40)]
Positive = Annotated[float, Field(gt=0, le=1e30)]
NotNegative = Annotated[float, Field(ge=0, le=1e30)]
Share = Annotated[float, Field(ge=0, le=1)]
Theta = Annotated[float, Field(gt=1, le=1e30)]
LayerTypes = Annotated[list[Name], Field(max_length=MOST_LAYERS)]
OneGroup = Literal[1, None]  # of experts, in routers that choose groups first
Off = Literal[False, None]  # a switch whose other state this decoder does not compute


class Rope(Stored):
    """The contents of `rope_scaling` or `rope_parameters`, whose keys `models.rope` explains."""

    rope_type: Name | None = None
    type: Name | None = None
    rope_theta: Theta | None = None
    partial_rotary_factor: Share | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Positions | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    attention_factor: Positive | None = None
    mscale: NotNegative | None = None
    mscale_all_dim: NotNegative | None = None
    truncate: bool | None = None


class Named(Stored):
    """The keys of config.json that name a model's family."""

    architectures: Annotated[list[Name], Field(max_length=16)] | None = None
    model_type: Name | None = None


class HfConfig(Named):
    """The contents of config.json that all families share, with a family's defaults filled in.

    `rope_scaling` is the rotary rule of transformers 4, `rope_parameters` that of 5;
    `original_max_position_embeddings` is llama3's original context. SmolLM3 has `no_rope_layers`, 0
    for each layer without rotary positions, or `no_rope_layer_interval`, their distance.
    """

    vocab_size: Vocabulary
    hidden_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: Heads | None = None
    max_position_embeddings: Positions
    original_max_position_embeddings: Positions | None = None
    rms_norm_eps: Positive
    initializer_range: Positive | None = None
    rope_theta: Theta
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    partial_rotary_factor: Share | None = None
    tie_word_embeddings: bool | None = None
    use_sliding_window: Off = None
    sliding_window: int | None = None
    no_rope_layers: Annotated[list[Literal[0, 1]], Field(max_length=MOST_LAYERS)] | None = None
    no_rope_layer_interval: Positions = 4
    attention_bias: bool | None = None
    use_qk_norm: bool | None = None
    mlp_bias: Off = None
    clip_qkv: Off = None
    expert_capacity: Off = None
    capacity_factor: Off = None
    moe_capacity_factor: Off = None
    expert_capacity_factor: Off = None
    moe_expert_capacity_factor: Off = None
    drop_tokens: Off = None
    token_drop: Off = None
    moe_token_drop_policy: Off = None
    router_jitter_noise: Annotated[float, Field(ge=0, le=0)] | None = None
    n_group: OneGroup = None
    topk_group: OneGroup = None
    hidden_act: Literal["silu", "swish"]  # two names of one function
    layer_types: LayerTypes | None = None
    num_labels: int | None = None
    id2label: dict[Any, Any] | None = None


NAMED, HF_CONFIG = TypeAdapter(Named), TypeAdapter(HfConfig)
