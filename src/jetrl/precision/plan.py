"""The precision plan: one frozen object that says what is FP8, for both sides of the flow.

A format is chosen by the role of an operand (a linear layer of the rollout, a key, a gradient),
never by a module's name. The sampler and the trainer are handed the same plan; where the plan
gives both the same formats it promises that they agree bit for bit (`exact`), and a run that does
not is stopped.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from jetrl.errors import UserError
from jetrl.settings import PrecisionSettings

Format = Literal["fp32", "bf16", "fp8"]
Side = Literal["rollout", "train"]
GradFormat = Literal["e4m3", "e5m2", "bf16"]
ScaleRule = Literal["fp32", "pow2"]

FP8_BLOCK = 128


@dataclass(frozen=True)
class PrecisionPlan:
    """Formats by role.

    rollout_linear, train_linear: the decoder layers' linears, sampling and training side.
    kv: keys and values, on both sides. rest: embeddings, norms and the residual stream.
    lm_head: the output projection, both sides. grad_output: dY as DGrad and WGrad read it when
    train_linear is fp8. scales: float32 scales, or rounded up to powers of two.
    first_layers_bf16, last_layers_bf16: decoder layers whose linears stay BF16 on both sides.
    """

    name: str
    rollout_linear: Format
    train_linear: Format
    kv: Format
    rest: Format
    lm_head: Format
    grad_output: GradFormat = "e4m3"
    scales: ScaleRule = "fp32"
    first_layers_bf16: int = 0
    last_layers_bf16: int = 0

    @staticmethod
    def preset(name: str) -> PrecisionPlan:
        """One of fp32, bf16, mixed, jet, unified; UserError for any other name."""
        if name not in _PRESETS:
            raise UserError(f"precision preset {name!r}: use one of {', '.join(_PRESETS)}")
        return PrecisionPlan(name, *_PRESETS[name])

    @staticmethod
    def from_settings(settings: PrecisionSettings) -> PrecisionPlan:
        """The preset with the options that the settings set."""
        options = settings.model_dump(exclude={"preset"}, exclude_none=True)
        return PrecisionPlan.preset(settings.preset).replace(**options)

    def replace(self, **options: Any) -> PrecisionPlan:
        """A plan with some fields changed; UserError for a field that does not exist."""
        known = {field.name for field in dataclasses.fields(self)}
        for key in options.keys() - known:
            raise UserError(f"precision plan has no option {key!r}: {', '.join(sorted(known))}")
        plan = dataclasses.replace(self, **options)
        if plan.name == "fp32" and (options.keys() - {"name"}):
            changed = {k: v for k, v in options.items() if v != getattr(self, k)}
            if changed:
                raise UserError(f"the fp32 preset takes no options, but {changed} were given")
        return plan

    @property
    def exact(self) -> bool:
        """Whether sampler and trainer promise equal bits (`jet`, `unified`): FP8 on both sides."""
        return self.rollout_linear == self.train_linear == "fp8"

    def linear_format(self, side: Side, layer: int, num_layers: int) -> Format:
        """The format of decoder layer `layer`'s linears on one side."""
        chosen = self.rollout_linear if side == "rollout" else self.train_linear
        return "bf16" if chosen == "fp8" and self.keeps_bf16(layer, num_layers) else chosen

    def linear_formats(self, layer: int, num_layers: int) -> dict[Side, Format]:
        """Return the format of decoder layer `layer`'s linears on each side."""
        sides: tuple[Side, Side] = ("rollout", "train")
        return {side: self.linear_format(side, layer, num_layers) for side in sides}

    def keeps_bf16(self, layer: int, num_layers: int) -> bool:
        """Whether decoder layer `layer` is one of those whose linears are never FP8."""
        return layer < self.first_layers_bf16 or layer >= num_layers - self.last_layers_bf16

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> PrecisionPlan:
        return PrecisionPlan(**fields)

    def describe(self) -> list[tuple[str, str]]:
        """Rows (role, format) for people: printed before a run."""
        fp8 = f"FP8 e4m3, {self.scales} scales"
        names = {"fp8": fp8, "bf16": "BF16", "fp32": "FP32"}
        gradient = "BF16" if self.grad_output == "bf16" else f"FP8 {self.grad_output}"
        training = names[self.train_linear]
        if self.train_linear == "fp8":
            training += f" (FProp, DGrad, WGrad; output gradients {gradient})"
        rows = [
            ("rollout linears", names[self.rollout_linear]),
            ("training linears", training),
            ("keys and values, both sides", names[self.kv]),
            ("embeddings, norms, residual", names[self.rest]),
            ("lm_head, both sides", names[self.lm_head]),
            ("master weights", "FP32"),
        ]
        if self.first_layers_bf16 or self.last_layers_bf16:
            kept = f"first {self.first_layers_bf16}, last {self.last_layers_bf16}"
            rows.insert(2, ("layers kept in BF16, both sides", kept))
        promise = (
            "bit for bit equal (checked every step)" if self.exact else "not promised (measured)"
        )
        return [*rows, ("sampler and trainer log-probs", promise)]


#                 rollout_linear, train_linear, kv, rest, lm_head
_PRESETS: dict[str, tuple[Format, Format, Format, Format, Format]] = {
    "fp32": ("fp32", "fp32", "fp32", "fp32", "fp32"),
    "bf16": ("bf16", "bf16", "bf16", "bf16", "bf16"),
    "mixed": ("fp8", "bf16", "bf16", "bf16", "bf16"),
    "jet": ("fp8", "fp8", "bf16", "bf16", "bf16"),
    "unified": ("fp8", "fp8", "fp8", "bf16", "bf16"),
}
