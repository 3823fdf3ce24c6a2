"""A sampler that differs from the trainer in a known way, for studies of the mismatch.

A `DeviatingPlan` changes the sampler's formats, scales, KV cache, sums or logits. It joins the
package at `PrecisionPlan`: code for one side asks `plan.on(side)`, the sampler draws from
`plan.before_draw(logits, bits)`, and the trainer's forwards run in `plan.training_forward(...)`.
Nothing else in jetrl knows about it. In Python, pass such a plan to a `Policy`; run a command with
one as

    python -m benchmarks.study.deviation '{"logit_noise": 0.1}' train recipe.toml

which is how `jetrl study` runs an arm with a table `sampler_deviation`. The plan is written to
plan.json and to checkpoints, so a run can only be resumed with the same deviation.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from benchmarks.study.logit_noise import with_noise
from benchmarks.study.replay import replayed_routes
from pydantic import Field, TypeAdapter
from torch import Tensor, nn

from jetrl.cli.main import main as jetrl_main
from jetrl.errors import UserError
from jetrl.files import checked
from jetrl.precision.formats import BF16, FP8, Format, GEMMInput, Rounding, StoredWeight
from jetrl.precision.gemm import bf16_matmul
from jetrl.precision.plan import PrecisionPlan, Side, amended_plans
from jetrl.precision.quantize import dequantize
from jetrl.settings import presets
from jetrl.settings.section import LayerCount, Section

SECTION = "sampler_deviation"
# GPU attention reads keys in blocks of 64.
WholeBlocks = Annotated[int, Field(ge=64, lt=2**53, multiple_of=64)]
Noise = Annotated[float, Field(ge=0, le=1e6)]


class SamplerDeviation(Section):
    """The differences of the sampler from the trainer; by default none.

    `precision.weights_through_bf16` is a setting of all runs, and not among these.
    """

    linears: Literal["fp8", "int8", "fp8_weights", "fp8_activations", "bf16"] | None = None
    """format of the linear layers; fp8_weights: BF16 activations; fp8_activations: BF16 weights"""
    bf16_layers: tuple[LayerCount, ...] = ()
    """decoder layer indices (from 0) whose linear layers run in BF16"""
    scales: presets.ScaleRule | None = None
    """format of FP8 and INT8 scales"""
    kv: presets.KVSetting | None = None
    """format of the KV cache"""
    attention_split: WholeBlocks | None = None
    """keys per partial sum of attention; on a CPU float32 sums, while the trainer's are exact"""
    lm_head: Literal["bf16", "fp8"] | None = None
    """format of the output projection"""
    logit_noise: Noise = 0.0
    """std of Gaussian noise on the logits, before the temperature; log-probs are of noisy logits"""
    replayed_routes: bool = False
    """the trainer computes with the sampler's experts (`benchmarks.study.replay`)"""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are not at their defaults, as JSON has them."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def words(self) -> list[str]:
        """Return the words before those of a command that runs with this deviation."""
        own = self.to_dict()
        return [SECTION, json.dumps(own)] if own else []

    def plan_of(self, plan: PrecisionPlan) -> PrecisionPlan:
        """Return a plan with this deviation of its sampler."""
        if not self.to_dict():
            return plan
        if plan.reads_masters:
            raise UserError(f"the fp32 preset takes no {SECTION}")
        fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(PrecisionPlan)}
        return DeviatingPlan(**fields, deviation=self)


NO_DEVIATION = SamplerDeviation()
_SCHEMA = TypeAdapter(SamplerDeviation)


def deviation_of(table: Mapping[str, Any], where: str) -> SamplerDeviation:
    """Return the deviation in a table from TOML or JSON; raise UserError if it is invalid."""
    return checked(_SCHEMA, dict(table), f"{where}: {SECTION}")


class _FP8Weights(Format):
    """Weights rounded to FP8 and stored as BF16, with BF16 activations."""

    has_rule = True

    def round(
        self, weight: Tensor, scales: presets.ScaleRule, into: StoredWeight | None
    ) -> StoredWeight:
        return super().round(dequantize(FP8.round(weight, scales, None)), scales, into)


class _FP8Activations(Format):
    """BF16 weights, with activations rounded to FP8."""

    def operand(self, stored: StoredWeight) -> StoredWeight:
        assert isinstance(stored, Tensor), "only X is coded"
        weight: Any = stored.view_as(stored)
        weight.number_format = self  # else it would be a weight next to BF16 activations
        marked: Tensor = weight
        return marked

    def fprop(
        self,
        x: GEMMInput,
        weight: StoredWeight,
        out_dtype: torch.dtype,
        pinned: bool,
        scales: presets.ScaleRule,
    ) -> Tensor:
        assert isinstance(x, Tensor), "X is coded here"
        assert isinstance(weight, Tensor), "only X is coded"
        values = dequantize(FP8.input(x, scales)).bfloat16()
        return bf16_matmul(values, weight, out_dtype, pinned)

    def dgrad(self, rows: GEMMInput, weight: StoredWeight) -> Tensor:
        raise AssertionError("only the sampler has such a weight")


FP8_WEIGHTS = _FP8Weights("fp8_weights", "FP8", torch.bfloat16, multiple=FP8.multiple)
FP8_ACTIVATIONS = _FP8Activations("fp8_activations", "FP8", torch.bfloat16, multiple=FP8.multiple)
ONE_OPERAND: dict[str | None, Format] = {f.name: f for f in (FP8_WEIGHTS, FP8_ACTIVATIONS)}


@dataclass(frozen=True)
class DeviatingPlan(PrecisionPlan):
    """A plan whose sampler deviates from the trainer."""

    deviation: SamplerDeviation = NO_DEVIATION

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frozen_base and self.deviation.linears:
            raise UserError(f"{SECTION}.linears does not go with precision.base = nvfp4")

    def on(self, side: Side) -> PrecisionPlan:
        return self._of_sampler if side == "rollout" else self

    @functools.cached_property
    def _of_sampler(self) -> PrecisionPlan:
        names = ("scales", "kv", "attention_split", "lm_head")
        changes: dict[str, Any] = {name: getattr(self.deviation, name) for name in names}
        if self.deviation.linears not in ONE_OPERAND:
            changes["rollout_linear"] = self.deviation.linears
        changes = {k: v for k, v in changes.items() if v not in (None, getattr(self, k))}
        return dataclasses.replace(self, **changes) if changes else self

    @property
    def sampler_only(self) -> dict[str, Any]:
        own = self.deviation
        same = self._of_sampler is self and own.linears not in ONE_OPERAND
        if same and not own.bf16_layers and not own.logit_noise and not own.replayed_routes:
            return super().sampler_only
        return super().sampler_only | own.to_dict()

    def linear_format(self, side: Side, layer: int, num_layers: int) -> Format:
        own = self.deviation
        if own.bf16_layers and max(own.bf16_layers) >= num_layers:
            raise UserError(
                f"{SECTION}.bf16_layers has layer {max(own.bf16_layers)}, and the model has layers "
                f"0 to {num_layers - 1}: leave it out"
            )
        format = super().linear_format(side, layer, num_layers)
        if side == "train" or self.keeps_bf16(layer, num_layers):
            return format
        return BF16 if layer in own.bf16_layers else ONE_OPERAND.get(own.linears, format)

    def rounding(self, side: Side, format: Format) -> Rounding:
        # The weights next to FP8 activations are the trainer's.
        return super().rounding(side, BF16 if format is FP8_ACTIVATIONS else format)

    def training_forward(
        self, decoder: nn.Module, sampler_forward: Callable[[], None]
    ) -> AbstractContextManager[None]:
        if not self.deviation.replayed_routes:
            return super().training_forward(decoder, sampler_forward)
        return replayed_routes(decoder, sampler_forward)

    def before_draw(self, logits: Tensor, bits: Tensor) -> Tensor:
        return with_noise(logits, bits, self.deviation.logit_noise)


def main(words: Sequence[str]) -> int:
    """Run a command of `jetrl`; SECTION and a table in JSON before it are its deviation."""
    if not words or words[0] != SECTION:
        return jetrl_main(list(words))
    deviation = deviation_of(json.loads(words[1]), "the command")
    with amended_plans(deviation.plan_of):
        return jetrl_main(list(words[2:]))


if __name__ == "__main__":
    sys.exit(main([SECTION, *sys.argv[1:]]))
