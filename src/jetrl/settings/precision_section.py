"""The sections `[precision]` and `[sampler_deviation]`: number formats of sampler and trainer."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from jetrl.settings import presets
from jetrl.settings.section import LayerCount, Section

# GPU attention reads keys in blocks of 64.
WholeBlocks = Annotated[int, Field(ge=64, lt=2**53, multiple_of=64)]
Noise = Annotated[float, Field(ge=0, le=1e6)]


class PrecisionSettings(Section):
    """The section `[precision]`: a preset and its overrides."""

    preset: presets.Preset = presets.DEFAULT_PRESET
    """which tensors are FP8 or INT8, on which side (docs/plans.md). Default with base = nvfp4:
    unified"""
    grad_output: presets.GradFormat | None = None
    """format of output gradients in DGrad and WGrad. Default: from the preset"""
    scales: Literal["fp32", "pow2"] | None = None
    """FP8 scale format; pow2: powers of two. Default: from the preset (fp32)"""
    first_layers_bf16: LayerCount = 0
    """number of leading decoder layers in BF16"""
    last_layers_bf16: LayerCount = 0
    """number of trailing decoder layers in BF16"""
    kv: presets.KVSetting | None = None
    """KV-cache dtype; `int8+fp8` sets keys and values separately. Default: from the preset"""
    key_smoothing: bool | None = None
    """smooth INT8 keys with fixed per-channel factors and a Hadamard rotation (docs/precision.md).
    Default: true for presets int8 and unified"""
    lm_head: Literal["bf16", "fp8"] | None = None
    """format of the output projection. Default: from the preset (bf16)"""
    base: presets.BaseFormat | None = None
    """format of the frozen base's linear layers under an adapter; nvfp4 takes 4.5 bits per weight,
    with BF16 activations (docs/precision.md). Default: fp8"""
    wgrad_input: Literal["128x128", "1x128"] | None = None
    """scale-block shape of X in WGrad; 1x128 runs along tokens. Default: 128x128"""
    pinned_sums: bool | None = None
    """fixed reduction order (batch-invariant kernels), so that bf16 is bitwise consistent too.
    Default: only if both sides are FP8 or both are INT8"""
    bf16_rounding: presets.BF16Rounding | None = None
    """rounding of master weights to BF16; dithered: stochastic rounding, so that small updates
    are not rounded away (docs/precision.md). Default: dithered for presets bf16 and mixed, else
    nearest"""

    @model_validator(mode="after")
    def _fp8_beside_nvfp4(self) -> Self:
        if self.base == "nvfp4" and "preset" not in self.model_fields_set:
            object.__setattr__(self, "preset", "unified")
        return self


class SamplerDeviationSettings(Section):
    """The section `[sampler_deviation]`: deliberate differences of the sampler, for ablations."""

    linears: Literal["fp8", "int8", "fp8_weights", "fp8_activations", "bf16"] | None = None
    """format of the sampler's linear layers; fp8_weights: BF16 activations; fp8_activations: BF16
    weights. Default: from the preset"""
    weights_through_bf16: bool | None = None
    """round master weights to BF16 before the sampler quantizes them to FP8. Default: from the
    preset"""
    bf16_layers: tuple[LayerCount, ...] | None = None
    """decoder layer indices (from 0) whose linear layers run in BF16 in the sampler only"""
    scales: Literal["fp32", "pow2"] | None = None
    """format of the sampler's FP8 and INT8 scales. Default: as in the trainer"""
    kv: presets.KVSetting | None = None
    """format of the sampler's KV cache. Default: as in the trainer"""
    attention_split: WholeBlocks | None = None
    """keys per partial sum in the sampler's attention, a multiple of 64. Default: from the preset,
    else as in the trainer"""
    lm_head: Literal["bf16", "fp8"] | None = None
    """format of the sampler's output projection. Default: as in the trainer"""
    logit_noise: Noise | None = None
    """std of Gaussian noise on the sampler's logits, before the temperature. Default: 0"""
