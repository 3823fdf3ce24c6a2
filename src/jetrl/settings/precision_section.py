"""The sections `[precision]` and `[sampler_deviation]`: the formats of both sides, and of one."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from jetrl.settings import presets
from jetrl.settings.section import LayerCount, Section

# The GPU's attention reads 64 keys at a time.
WholeBlocks = Annotated[int, Field(ge=64, lt=2**53, multiple_of=64)]
Noise = Annotated[float, Field(ge=0, le=1e6)]


class PrecisionSettings(Section):
    """The section `[precision]`: a preset, and changes to it."""

    preset: presets.Preset = presets.DEFAULT_PRESET
    """what is FP8 or INT8, on which side (docs/plans.md); unset with base = nvfp4: unified"""
    grad_output: presets.GradFormat | None = None
    """output gradients in DGrad and WGrad; unset: the preset's"""
    scales: Literal["fp32", "pow2"] | None = None
    """unset: the preset's (fp32)"""
    first_layers_bf16: LayerCount = 0
    """decoder layers at the start kept in BF16"""
    last_layers_bf16: LayerCount = 0
    """decoder layers at the end kept in BF16"""
    kv: presets.KVSetting | None = None
    """keys and values, or keys + values apart; unset: the preset's"""
    key_smoothing: bool | None = None
    """fixed factors per channel and a Hadamard rotation for INT8 keys (docs/precision.md); unset:
    true if preset is int8 or unified"""
    lm_head: Literal["bf16", "fp8"] | None = None
    """output projection; unset: the preset's (bf16)"""
    base: presets.BaseFormat | None = None
    """linear layers of a frozen base under an adapter: nvfp4 has 4.5 bits per weight and BF16
    activations (docs/precision.md); unset: fp8"""
    wgrad_input: Literal["128x128", "1x128"] | None = None
    """block of values of X in WGrad with one scale; 1x128: along tokens; unset: 128x128"""
    pinned_sums: bool | None = None
    """sum in one order for any batch, so that bf16 promises equal bits too; unset: only if both
    sides are FP8, or both INT8"""
    bf16_rounding: presets.BF16Rounding | None = None
    """master weights to BF16; dithered: stochastic rounding, so that small updates show at once
    (docs/precision.md); unset: dithered if preset is bf16 or mixed, else nearest"""

    @model_validator(mode="after")
    def _fp8_beside_nvfp4(self) -> Self:
        if self.base == "nvfp4" and "preset" not in self.model_fields_set:
            object.__setattr__(self, "preset", "unified")
        return self


class SamplerDeviationSettings(Section):
    """The section `[sampler_deviation]`: differences of the sampler, for comparisons."""

    linears: Literal["fp8", "int8", "fp8_weights", "fp8_activations", "bf16"] | None = None
    """the sampler's linear layers; fp8_weights: BF16 activations, fp8_activations: BF16 weights;
    unset: the preset's"""
    weights_through_bf16: bool | None = None
    """round master weights to BF16 before the sampler quantizes them to FP8; unset: the preset's"""
    bf16_layers: tuple[LayerCount, ...] | None = None
    """decoder layers, counted from 0, whose linears only the sampler has in BF16"""
    scales: Literal["fp32", "pow2"] | None = None
    """the sampler's FP8 and INT8 scales; unset: the trainer's"""
    kv: presets.KVSetting | None = None
    """the sampler's keys and values; unset: the trainer's"""
    attention_split: WholeBlocks | None = None
    """keys per sum of the sampler's attention, a multiple of 64; unset: the preset's, else the
    trainer's sums"""
    lm_head: Literal["bf16", "fp8"] | None = None
    """the sampler's output projection; unset: the trainer's"""
    logit_noise: Noise | None = None
    """standard deviation of Gaussian noise on the sampler's logits, before the temperature; unset:
    0"""
