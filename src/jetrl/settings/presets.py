"""Precision presets: each name maps to the number formats of its operands by role.

To add a preset, add a line to `PRESETS`. This module imports neither pydantic nor torch, to keep
--help fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

Format = Literal["fp32", "bf16", "fp8", "int8"]
HeadFormat = Literal[Format, "int8x2"]  # lm_head; int8x2: two INT8 planes
EMULATED_NVFP4: Final = "nvfp4-emulated"
EMULATED_FP4: Final = "fp4-emulated"
# Of linear layers. "nvfp4" is for a frozen base; trained four-bit formats are emulated.
TrainedFormat = Literal[Format, "nvfp4-emulated", "fp4-emulated"]
LinearFormat = Literal[TrainedFormat, "nvfp4"]
GradFormat = Literal["e4m3", "e5m2", "int8", "bf16"]
BaseFormat = Literal["fp8", "nvfp4"]
StoredFormat = Literal["fp32", "bf16", "fp8", "int8"]
KVFormat = Literal[StoredFormat, "int8+fp8", "fp8+int8"]
KVSetting = Literal["fp8", "int8", "int8+fp8", "fp8+int8", "bf16"]  # values of precision.kv
ScaleRule = Literal["fp32", "pow2"]
DEFAULT_SCALES: Final = "fp32"
BF16Rounding = Literal["nearest", "dithered"]
QueryFormat = Literal["bf16", "int8"]  # int8: attention multiplies integers only

SavedFormat = Literal["off", "int8"]  # of activations saved for backward; off: as they are
WeightBlock = Literal["16x16", "1x16"]  # values of a trained NVFP4 weight that share a scale


class PresetFormats(NamedTuple):
    """Number formats of a preset by role: fields of `precision.plan.PrecisionPlan`."""

    rollout_linear: LinearFormat
    train_linear: TrainedFormat
    kv: KVFormat
    rest: Format
    lm_head: HeadFormat
    grad_output: GradFormat = "e4m3"
    bf16_rounding: BF16Rounding = "nearest"
    key_smoothing: bool = False
    weights_through_bf16: bool = False
    attention_split: int | None = None
    queries: QueryFormat = "bf16"
    first_layers_bf16: int = 0
    last_layers_bf16: int = 0
    wgrad_hadamard: bool = False
    stochastic_rounding: bool = False
    gradient_estimator: bool = False
    outlier_quantile: float = 1.0
    outlier_compensation: bool = False


# `alike` imitates two engines: weights reach the sampler in BF16, and its attention sums differ.
PRESETS = {
    "fp32": PresetFormats("fp32", "fp32", "fp32", "fp32", "fp32"),
    "bf16": PresetFormats("bf16", "bf16", "bf16", "bf16", "bf16", bf16_rounding="dithered"),
    "mixed": PresetFormats("fp8", "bf16", "bf16", "bf16", "bf16", bf16_rounding="dithered"),
    "alike": PresetFormats(
        "fp8", "fp8", "bf16", "bf16", "bf16", weights_through_bf16=True, attention_split=256
    ),
    "jet": PresetFormats("fp8", "fp8", "bf16", "bf16", "bf16"),
    "unified": PresetFormats("fp8", "fp8", "int8+fp8", "bf16", "bf16", key_smoothing=True),
    "int8": PresetFormats("int8", "int8", "int8", "bf16", "bf16", key_smoothing=True),
    "integer": PresetFormats(
        "int8", "int8", "int8", "bf16", "int8x2", "int8", key_smoothing=True, queries="int8"
    ),
    "nvfp4": PresetFormats(
        EMULATED_NVFP4,
        EMULATED_NVFP4,
        kv="bf16",
        rest="bf16",
        lm_head="bf16",
        first_layers_bf16=1,
        last_layers_bf16=1,
        wgrad_hadamard=True,
        stochastic_rounding=True,
    ),
    "fp4": PresetFormats(
        EMULATED_FP4,
        EMULATED_FP4,
        kv="bf16",
        rest="bf16",
        lm_head="bf16",
        gradient_estimator=True,
        outlier_quantile=0.99,
        outlier_compensation=True,
    ),
}
DEFAULT_PRESET = "int8"
BF16_PRESET = "bf16"

if TYPE_CHECKING:
    Preset = str
else:
    Preset = Literal[tuple(PRESETS)]


def codes_alike(rollout_linear: str | None, train_linear: str | None) -> bool:
    """Return True if the linear layers of both sides use the same 8-bit format."""
    return rollout_linear == train_linear and train_linear in ("fp8", "int8")
