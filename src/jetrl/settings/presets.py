"""The precision presets: a name, and the format of the operands of each role.

A new preset is a new line of `PRESETS`. No pydantic and no torch, so that a command's help is fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

Format = Literal["fp32", "bf16", "fp8", "int8"]
# Of a linear layer: FP8 weights next to BF16 activations, and the other way round, are for studies.
# NVFP4 weights are those of a base that is not trained.
LinearFormat = Literal[Format, "fp8_weights", "fp8_activations", "nvfp4"]
GradFormat = Literal["e4m3", "e5m2", "int8", "bf16"]
BaseFormat = Literal["fp8", "nvfp4"]
StoredFormat = Literal["fp32", "bf16", "fp8", "int8"]
KVFormat = Literal[StoredFormat, "int8+fp8", "fp8+int8"]
KVSetting = Literal["fp8", "int8", "int8+fp8", "fp8+int8", "bf16"]  # what a user may ask for
ScaleRule = Literal["fp32", "pow2"]
DEFAULT_SCALES: Final = "fp32"
BF16Rounding = Literal["nearest", "dithered"]


class PresetFormats(NamedTuple):
    """The formats of one preset by role: the fields of `precision.plan.PrecisionPlan`."""

    rollout_linear: LinearFormat
    train_linear: Format
    kv: KVFormat
    rest: Format
    lm_head: Format
    grad_output: GradFormat = "e4m3"
    bf16_rounding: BF16Rounding = "nearest"
    key_smoothing: bool = False


PRESETS = {
    "fp32": PresetFormats("fp32", "fp32", "fp32", "fp32", "fp32"),
    "bf16": PresetFormats("bf16", "bf16", "bf16", "bf16", "bf16", bf16_rounding="dithered"),
    "mixed": PresetFormats("fp8", "bf16", "bf16", "bf16", "bf16", bf16_rounding="dithered"),
    "alike": PresetFormats("fp8", "fp8", "bf16", "bf16", "bf16"),
    "jet": PresetFormats("fp8", "fp8", "bf16", "bf16", "bf16"),
    "unified": PresetFormats("fp8", "fp8", "int8+fp8", "bf16", "bf16", key_smoothing=True),
    "int8": PresetFormats("int8", "int8", "int8", "bf16", "bf16", key_smoothing=True),
}
DEFAULT_PRESET = "int8"
BF16_PRESET = "bf16"

# Differences of a preset's sampler from the trainer, as keys of `[sampler_deviation]`.
PRESET_DEVIATIONS: Mapping[str, Mapping[str, Any]] = {
    "alike": {"weights_through_bf16": True, "attention_split": 256}
}

if TYPE_CHECKING:
    Preset = str
else:
    Preset = Literal[tuple(PRESETS)]


def codes_alike(rollout_linear: str | None, train_linear: str | None) -> bool:
    """Return whether the linear layers of both sides multiply the same codes."""
    return rollout_linear == train_linear and train_linear in ("fp8", "int8")
