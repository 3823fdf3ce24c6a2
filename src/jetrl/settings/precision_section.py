"""The section `[precision]`: number formats of sampler and trainer."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from jetrl.settings import presets
from jetrl.settings.section import LayerCount, Section


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
    weights_through_bf16: bool | None = None
    """round master weights to BF16 before the sampler quantizes them to FP8, as if BF16 weights
    were sent to an FP8 sampler (docs/precision.md). Default: true for preset alike, else false"""

    @model_validator(mode="after")
    def _fp8_beside_nvfp4(self) -> Self:
        if self.base == "nvfp4" and "preset" not in self.model_fields_set:
            object.__setattr__(self, "preset", "unified")
        return self
