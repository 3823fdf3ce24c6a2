"""The precision plan: one frozen object that says what is FP8, for both sides of the flow.

A format is chosen by the role of an operand (a linear layer of the rollout, a key, a gradient),
never by a module's name. The sampler and the trainer are handed the same plan; where the plan
gives both the same formats it promises that they agree bit for bit (`exact`), and a run that does
not is stopped. The presets are data (`settings.presets`), and a plan's name is for people: what a
plan does is decided by its fields.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from jetrl.errors import UserError
from jetrl.files import checked, shown_value
from jetrl.settings import PrecisionSettings
from jetrl.settings.presets import (
    PRESETS,
    Format,
    KVFormat,
    is_exact,
    key_and_value_formats,
)

__all__ = ["FP8_BLOCK", "Format", "GradFormat", "KVFormat", "PrecisionPlan", "ScaleRule", "Side"]

Side = Literal["rollout", "train"]
GradFormat = Literal["e4m3", "e5m2", "bf16"]
ScaleRule = Literal["fp32", "pow2"]

FP8_BLOCK = 128
_SETTINGS = TypeAdapter(PrecisionSettings)


@dataclass(frozen=True)
class PrecisionPlan:
    """The formats of a run, by the role of an operand.

    Attributes:
        name: The preset that the plan was made of.
        rollout_linear: The decoder layers' linears, sampling side.
        train_linear: The decoder layers' linears, training side.
        kv: Keys and values, on both sides: one format for both, or the keys' + the values'.
        rest: Embeddings, norms and the residual stream.
        lm_head: The output projection, on both sides.
        grad_output: dY as DGrad and WGrad read it where train_linear is fp8.
        scales: Float32 scales, or scales rounded up to powers of two.
        first_layers_bf16: Decoder layers at the start whose linears stay BF16 on both sides.
        last_layers_bf16: Decoder layers at the end whose linears stay BF16 on both sides.
    """

    name: str
    rollout_linear: Format
    train_linear: Format
    kv: KVFormat
    rest: Format
    lm_head: Format
    grad_output: GradFormat = "e4m3"
    scales: ScaleRule = "fp32"
    first_layers_bf16: int = 0
    last_layers_bf16: int = 0

    def __post_init__(self) -> None:
        if self.kv not in get_args(KVFormat):
            formats = ", ".join(get_args(KVFormat))
            raise UserError(f"precision.kv = {self.kv!r}: use one of {formats}")

    @staticmethod
    def preset(name: str) -> PrecisionPlan:
        """Return the plan of a preset (`settings.presets`); UserError for any other name."""
        if name not in PRESETS:
            raise UserError(f"precision preset {name!r}: use one of {', '.join(PRESETS)}")
        return PrecisionPlan(name, *PRESETS[name])

    @staticmethod
    def from_settings(settings: PrecisionSettings) -> PrecisionPlan:
        """Return the plan of the preset with the options that the settings set."""
        options = settings.model_dump(exclude={"preset"}, exclude_none=True)
        return PrecisionPlan.preset(settings.preset).replace(**options)

    def replace(self, **options: Any) -> PrecisionPlan:
        """Return a plan with some fields changed; UserError for a field that does not exist."""
        known = {field.name for field in dataclasses.fields(self)}
        for key in options.keys() - known:
            raise UserError(f"precision plan has no option {key!r}: {', '.join(sorted(known))}")
        plan = dataclasses.replace(self, **options)
        changed = {k: v for k, v in options.items() if v != getattr(self, k)}
        if self.rest == "fp32" and changed.keys() - {"name"}:
            raise UserError(f"the fp32 preset takes no options, but {changed} were given")
        return plan

    @property
    def exact(self) -> bool:
        """True where sampler and trainer promise equal bits."""
        return is_exact(self.rollout_linear, self.train_linear)

    def linear_format(self, side: Side, layer: int, num_layers: int) -> Format:
        """Return the format of a decoder layer's linears on one side.

        Args:
            side: The side of the flow.
            layer: The layer's index.
            num_layers: The decoder's number of layers.
        """
        chosen = self.rollout_linear if side == "rollout" else self.train_linear
        return "bf16" if chosen == "fp8" and self.keeps_bf16(layer, num_layers) else chosen

    def linear_formats(self, layer: int, num_layers: int) -> dict[Side, Format]:
        """Return the format of a decoder layer's linears on each side."""
        sides: tuple[Side, Side] = ("rollout", "train")
        return {side: self.linear_format(side, layer, num_layers) for side in sides}

    def keeps_bf16(self, layer: int, num_layers: int) -> bool:
        """Return whether a decoder layer is one of those whose linears are never FP8."""
        return layer < self.first_layers_bf16 or layer >= num_layers - self.last_layers_bf16

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, as a run directory and a checkpoint keep them."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(fields: dict[str, Any], where: str = "precision plan") -> PrecisionPlan:
        """Return the plan that `to_dict` described.

        Args:
            fields: The fields of a preset's plan, by name.
            where: The file of the fields, for messages.

        Raises:
            UserError: The fields are not those of a preset with its options changed.
        """
        name = fields.get("name")
        if not isinstance(name, str) or name not in PRESETS:
            shown = shown_value(name)
            raise UserError(f"{where}: name = {shown}: use one of {', '.join(PRESETS)}")
        preset = PrecisionPlan.preset(name).to_dict()
        changed = {k: v for k, v in fields.items() if k not in preset or v != preset[k]}
        return PrecisionPlan.from_settings(checked(_SETTINGS, {"preset": name, **changed}, where))

    def describe(self) -> list[tuple[str, str]]:
        """Return rows of (role, format) for people: what is printed before a run."""
        fp8 = f"FP8 e4m3, {self.scales} scales"
        int8 = f"INT8, {self.scales} scales"
        names = {"fp8": fp8, "int8": int8, "bf16": "BF16", "fp32": "FP32"}
        keys, values = (names[format] for format in key_and_value_formats(self.kv))
        gradient = "BF16" if self.grad_output == "bf16" else f"FP8 {self.grad_output}"
        training = names[self.train_linear]
        if self.train_linear == "fp8":
            training += f" (FProp, DGrad, WGrad; output gradients {gradient})"
        rows = [
            ("rollout linears", names[self.rollout_linear]),
            ("training linears", training),
            ("keys and values, both sides", keys if keys == values else f"{keys}; {values}"),
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
