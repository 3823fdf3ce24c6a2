"""The precision plan: one frozen object that says what is FP8, for both sides of the flow.

A format is chosen by the role of an operand (a linear layer of the rollout, a key, a gradient),
never by a module's name. The sampler and the trainer get the same plan. If it gives both the same
formats it promises that they agree bit for bit (`exact`), and a run that does not is stopped. A
plan whose `SamplerDeviation` is not empty deviates by a known amount, for comparisons, and promises
no equal bits. The presets are data (`jetrl.settings.presets`); a plan's name is for people.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from jetrl.errors import UserError, named
from jetrl.files import checked, problem_of, shown_value
from jetrl.precision.formats import (
    BF16,
    FP8,
    FP32,
    GRADIENTS,
    INT8,
    Format,
    Gradient,
    Rounding,
    key_and_value_formats,
    number_format,
)
from jetrl.settings import presets
from jetrl.settings.precision_section import PrecisionSettings, SamplerDeviationSettings
from jetrl.settings.section import NonNegative


@functools.cache
def _schemas() -> dict[str, Any]:
    hints = get_type_hints(PrecisionPlan, include_extras=True)
    return {name: TypeAdapter(hint) for name, hint in hints.items()}


@dataclass(frozen=True)
class SamplerDeviation:
    """The settings of only the sampler; by default it computes what the trainer does.

    Attributes:
        linears: The format of the sampler's linear layers; None: the plan's.
        weights_through_bf16: Whether the sampler's FP8 codes are built from master weights
            rounded to BF16, as if weights travel to another engine in BF16.
        bf16_layers: The decoder layers, from 0, whose linears are BF16 on the sampler's side.
        scales: The rule of the sampler's scales, of weights, activations, keys and values; None:
            the plan's.
        kv: The sampler's keys and values; None: the plan's.
        attention_split: The keys after which the sampler's attention begins a new sum; None: the
            sums are the trainer's. On a CPU the sums of a split are float32 sums in the library's
            order, while the trainer's are exact.
        lm_head: The format of the sampler's output projection; None: the plan's.
    """

    linears: presets.LinearFormat | None = None
    weights_through_bf16: bool = False
    bf16_layers: tuple[int, ...] = ()
    scales: presets.ScaleRule | None = None
    kv: presets.KVFormat | None = None
    attention_split: int | None = None
    lm_head: presets.Format | None = None
    logit_noise: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are set, by name, as lists and plain values."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
            if value != getattr(SamplerDeviation, name)
        }


NO_DEVIATION = SamplerDeviation()


Side = Literal["rollout", "train"]
WGradInput = Literal["128x128", "1x128"]

_SETTINGS = TypeAdapter(PrecisionSettings)
_DEVIATION_SETTINGS = TypeAdapter(SamplerDeviationSettings)
# A plan is stored without these fields if they have their defaults, as before there were any.
_STORED_IF_SET = (
    "wgrad_input",
    "pinned_sums",
    "sampler_deviation",
    "base",
    "bf16_rounding",
    "key_smoothing",
)


@dataclass(frozen=True)
class PrecisionPlan:
    """The formats of a run, by the role of an operand.

    Attributes:
        name: The preset that the plan was built from.
        rollout_linear: The decoder layers' linears, sampling side.
        train_linear: The decoder layers' linears, training side.
        kv: Keys and values, on both sides: one format for both, or the keys' + the values'.
        rest: Embeddings, norms and the residual stream.
        lm_head: The output projection, on both sides.
        grad_output: dY as DGrad and WGrad read it if train_linear is fp8 or int8.
        scales: Float32 scales, or scales rounded up to powers of two.
        first_layers_bf16: Decoder layers at the start whose linears stay BF16 on both sides.
        last_layers_bf16: Decoder layers at the end whose linears stay BF16 on both sides.
        wgrad_input: The groups of X in WGrad: squares, or 1 x 128 along tokens.
        pinned_sums: Whether every sum has one order, whatever the batch; None: if the linear
            layers of both sides multiply the same codes. Without, a GPU's library chooses the order
            of BF16 sums.
        sampler_deviation: What the sampler computes otherwise than all of the above say.
        base: What stands for fp8 in the linears of a base that is not trained.
        bf16_rounding: How master weights of matrices become BF16 (`quantize.dithered_bf16`).
        key_smoothing: Whether INT8 keys are smoothed (`models.key_smoothing`); others are not.
    """

    name: str
    rollout_linear: presets.LinearFormat
    train_linear: presets.Format
    kv: presets.KVFormat
    rest: presets.Format
    lm_head: presets.Format
    grad_output: presets.GradFormat = "e4m3"
    scales: presets.ScaleRule = presets.DEFAULT_SCALES
    first_layers_bf16: NonNegative = 0
    last_layers_bf16: NonNegative = 0
    wgrad_input: WGradInput = "128x128"
    pinned_sums: bool | None = None
    sampler_deviation: SamplerDeviation = NO_DEVIATION
    base: presets.BaseFormat = "fp8"
    bf16_rounding: presets.BF16Rounding = "nearest"
    key_smoothing: bool = False

    def __post_init__(self) -> None:
        for name, schema in _schemas().items():
            try:
                schema.validate_python(getattr(self, name), strict=True)
            except ValidationError as error:
                raise UserError(problem_of(error, f"precision.{name}")) from None
        own = self.sampler_deviation
        alike = self.rollout_linear == self.train_linear == FP8.name and own.linears is None
        if self.frozen_base and (own.weights_through_bf16 or not alike):
            raise UserError(
                "precision.base = nvfp4 needs FP8 weights that both sides read alike: use "
                "precision.preset = unified or jet, and leave sampler_deviation's linears and "
                "weights_through_bf16 out"
            )

        if self._trains_int8:
            given = {
                "grad_output": self.grad_output != "e5m2",
                "scales": self.scales == self.on("rollout").scales == presets.DEFAULT_SCALES,
                "wgrad_input": self.wgrad_input == "128x128",
            }
            if wrong := [key for key, fits in given.items() if not fits]:
                raise UserError(
                    f"precision.{wrong[0]} = {getattr(self, wrong[0])} is for FP8: leave it out, "
                    "or use precision.preset = unified or jet"
                )
        elif self.grad_output == INT8.name:
            raise UserError("precision.grad_output = int8 needs precision.preset = int8")

    @staticmethod
    def preset(name: Any) -> PrecisionPlan:
        """Return a preset's plan (`jetrl.settings.presets`), or a plan; else UserError."""
        if isinstance(name, PrecisionPlan):
            return name
        if name not in [*presets.PRESETS]:  # which may be no text
            what = f"precision preset {shown_value(name)}"
            raise UserError(f"{what}: use one of {', '.join(presets.PRESETS)}")
        deviation = SamplerDeviation(**presets.PRESET_DEVIATIONS.get(name, {}))
        return PrecisionPlan(name, **presets.PRESETS[name]._asdict(), sampler_deviation=deviation)

    @staticmethod
    def from_settings(
        settings: PrecisionSettings, deviation: SamplerDeviationSettings | None = None
    ) -> PrecisionPlan:
        """Return a preset's plan with the settings' options; without `deviation` its own holds."""
        options = settings.model_dump(exclude={"preset"}, exclude_none=True)
        plan = PrecisionPlan.preset(settings.preset)
        kv = settings.kv or plan.kv
        if settings.key_smoothing and key_and_value_formats(kv)[0] is not INT8:
            raise UserError(
                f"precision.key_smoothing = true is for INT8 keys, and keys are {kv} here: leave "
                "it out, or set precision.kv=int8"
            )
        changes = {} if deviation is None else deviation.model_dump(exclude_none=True)
        own = dataclasses.replace(plan.sampler_deviation, **changes)
        return plan.replace(**options, sampler_deviation=own)

    def replace(self, **options: Any) -> PrecisionPlan:
        """Return a plan with some fields changed; UserError for a field that does not exist."""
        known = {field.name for field in dataclasses.fields(self)}
        for key in options.keys() - known:
            raise UserError(f"precision plan has no option {key!r}: {', '.join(sorted(known))}")
        plan = dataclasses.replace(self, **options)
        changed = {k: v for k, v in options.items() if v != getattr(self, k)}
        if self.reads_masters and changed.keys() - {"name"}:
            raise UserError(f"the fp32 preset takes no options, but {changed} were given")
        return plan

    @property
    def pinned(self) -> bool:
        """True if all sums are in one order, on which equal bits of the two sides depend."""
        if self.pinned_sums is not None:
            return self.pinned_sums
        return presets.codes_alike(self.rollout_linear, self.train_linear)

    @property
    def widens_wgrad(self) -> bool:
        """True if no GPU's FP8 GEMM takes the operands of WGrad, which become BF16 there."""
        return self.grad_output == "e5m2" or self.wgrad_input == "1x128"

    @property
    def dithered_in_files(self) -> Literal["none", "linears", "matrices"]:
        """The weights to dither in BF16 files: those that a side does not read as BF16 values."""
        if self.bf16_rounding == "dithered" or self.reads_masters:
            return "matrices"
        if self.train_linear != BF16.name:
            return "linears"
        in_bf16 = self.on("rollout").rollout_linear == BF16.name
        return "none" if in_bf16 or self.sampler_deviation.weights_through_bf16 else "linears"

    @property
    def smooths_keys(self) -> bool:
        """True if keys are smoothed: those of both sides, in INT8."""
        return self.key_smoothing and key_and_value_formats(self.kv)[0] is INT8

    @property
    def integer_wgrad(self) -> bool:
        """True if WGrad reads X as INT8: of an `int8` plan whose backward is not in FP8."""
        return self._trains_int8 and self.grad_output != "e4m3"

    @property
    def exact(self) -> bool:
        """True if sampler and trainer promise equal bits."""
        alike = self.rollout_linear == self.train_linear != FP32.name
        return alike and self.pinned and not self._deviates

    @property
    def _deviates(self) -> bool:
        """True if the sampler computes anything otherwise than the trainer's fields say."""
        own = self.sampler_deviation
        others = (own.weights_through_bf16, own.bf16_layers, own.attention_split, own.logit_noise)
        return any(others) or self._of_sampler is not self

    @property
    def deviation(self) -> str:
        """The fields in which the sampler deviates from the trainer, for people; "" for none."""
        fields = self.sampler_deviation.to_dict() if self._deviates else {}
        return ", ".join(
            f"{name} = {' '.join(map(str, value)) if isinstance(value, list) else value}"
            for name, value in fields.items()
        )

    def on(self, side: Side) -> PrecisionPlan:
        """Return the plan as one side reads it: on the sampler's with what it has otherwise.

        This is the one seam of `sampler_deviation`: code that reads a format or a rule of scales
        for one side asks the plan of that side. Without a deviation it is this very plan.
        """
        return self._of_sampler if side == "rollout" else self

    @functools.cached_property
    def _of_sampler(self) -> PrecisionPlan:
        """Return the plan with the formats and scales that its sampler uses."""
        own = self.sampler_deviation
        changes: dict[str, Any] = {name: getattr(own, name) for name in ("scales", "kv", "lm_head")}
        changes["rollout_linear"] = own.linears
        changes = {k: v for k, v in changes.items() if v not in (None, getattr(self, k))}
        return dataclasses.replace(self, **changes) if changes else self

    @property
    def reads_masters(self) -> bool:
        """True if forwards read the master weights: of the fp32 plan."""
        return number_format(self.rest).reads_masters

    @property
    def keys_in_fp32(self) -> bool:
        """True if keys and values are in FP32, which no attention kernel reads."""
        return key_and_value_formats(self.kv)[0] is FP32

    @property
    def frozen_base(self) -> bool:
        """True if the base has a format for weights that are not trained."""
        return number_format(self.base).frozen

    @property
    def gradient(self) -> Gradient:
        """The format of dY next to a weight in codes."""
        return GRADIENTS[self.grad_output]

    @property
    def backward_format(self) -> Format:
        """The format of the products of backward, which SwiGLU's codes are for."""
        fp8 = self._trains_int8 and self.grad_output == "e4m3"
        return FP8 if fp8 else number_format(self.train_linear)

    @property
    def _trains_int8(self) -> bool:
        return self.train_linear == INT8.name

    def linear_format(self, side: Side, layer: int, num_layers: int) -> Format:
        """Return the format of a decoder layer's linears on one side."""
        chosen = self.train_linear if side == "train" else self.on(side).rollout_linear
        kept = self.keeps_bf16(layer, num_layers) or (
            side == "rollout" and layer in self.sampler_deviation.bf16_layers
        )
        if kept and not number_format(chosen).reads_masters:
            return BF16
        return number_format(self.base if chosen == FP8.name else chosen)

    @property
    def without_base(self) -> PrecisionPlan:
        """The plan of a critic and of a reward model, which have no base."""
        return dataclasses.replace(self, base=PrecisionPlan.base)

    def linear_formats(self, layer: int, num_layers: int) -> dict[Side, Format]:
        return {side: self.linear_format(side, layer, num_layers) for side in get_args(Side)}

    def check_layers(self, num_layers: int) -> None:
        """Raise a UserError for a layer of `sampler_deviation` that a decoder does not have."""
        for layer in self.sampler_deviation.bf16_layers:
            if layer >= num_layers:
                raise UserError(
                    f"sampler_deviation.bf16_layers has layer {layer}, and the model has layers 0 "
                    f"to {num_layers - 1}: leave it out"
                )

    def roundings(self, formats: Mapping[Side, Format]) -> dict[Side, Rounding]:
        """Return how each side rounds a weight that it reads in a format."""
        return {side: self.rounding(side, format) for side, format in formats.items()}

    def rounding(self, side: Side, format: Format) -> Rounding:
        """Return how a weight is rounded for a layer that one side reads in a format."""
        stored = format.stored
        if stored is BF16:
            return Rounding(BF16, dithered=self.bf16_rounding == "dithered")
        if not stored.has_rule:
            return Rounding(stored)
        through_bf16 = side == "rollout" and self.sampler_deviation.weights_through_bf16
        return Rounding(stored, self.on(side).scales, through_bf16)

    def keeps_bf16(self, layer: int, num_layers: int) -> bool:
        """Return whether a decoder layer is one of those whose linears are never FP8."""
        return layer < self.first_layers_bf16 or layer >= num_layers - self.last_layers_bf16

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, as a run directory and a checkpoint keep them."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in _STORED_IF_SET:
            if fields[name] == getattr(PrecisionPlan, name):
                del fields[name]
        if "sampler_deviation" in fields or self.name in presets.PRESET_DEVIATIONS:
            fields["sampler_deviation"] = self.sampler_deviation.to_dict()
        return fields

    @staticmethod
    def from_dict(fields: dict[str, Any], where: str = "precision plan") -> PrecisionPlan:
        """Return the plan that `to_dict` described, read from the file `where`.

        Raises UserError if the fields are not those of a preset with its options changed.
        """
        name = fields.get("name")
        with named(where):
            preset = PrecisionPlan.preset(name).to_dict()
        # If not stored, whatever the preset's is: a plan from before these fields has neither.
        fields = {"bf16_rounding": "nearest", "key_smoothing": False, **fields}
        changed = {k: v for k, v in fields.items() if k not in preset or v != preset[k]}
        deviation = changed.pop("sampler_deviation", None)
        plan = PrecisionPlan.from_settings(checked(_SETTINGS, {"preset": name, **changed}, where))
        if deviation is None:
            return plan
        own = checked(_DEVIATION_SETTINGS, deviation, f"{where}: sampler_deviation")
        return plan.replace(sampler_deviation=SamplerDeviation(**own.model_dump(exclude_none=True)))

    def describe(self) -> list[tuple[str, str]]:
        """Return rows of (role, format) for people: what is printed before a run."""
        scales = self.scales
        keys, values = (f.described(scales) for f in key_and_value_formats(self.kv))
        keys = f"{keys}, smoothed" if self.smooths_keys else keys
        trained = number_format(self.train_linear)
        rollout = number_format(self.rollout_linear).described_linear(scales)
        training = trained.described_linear(scales)
        if self.frozen_base:
            rollout = training = number_format(self.base).described_linear(scales)
        elif self.backward_format is not trained:
            training += f" (FProp); {self.gradient.words} (DGrad, WGrad)"
        elif trained.coded:
            training += f" (FProp, DGrad, WGrad; output gradients {self.gradient.words})"
        rows = [
            ("rollout linears", rollout),
            ("training linears", training),
            ("keys and values, both sides", keys if keys == values else f"{keys}; {values}"),
            ("embeddings, norms, residual", number_format(self.rest).described(scales)),
            ("lm_head, both sides", number_format(self.lm_head).described(scales)),
            ("master weights", "FP32"),
        ]
        if self.first_layers_bf16 or self.last_layers_bf16:
            kept = f"first {self.first_layers_bf16}, last {self.last_layers_bf16}"
            rows.insert(2, ("layers kept in BF16, both sides", kept))
        if self.wgrad_input != "128x128":
            rows.append(("X into WGrad", f"{self.wgrad_input} along tokens"))
        if self.pinned_sums is not None:
            order = "one order, whatever the batch" if self.pinned_sums else "the library's order"
            rows.append(("sums", order))
        if self.train_linear == BF16.name or self.bf16_rounding == "dithered":
            how = "by fixed draws" if self.bf16_rounding == "dithered" else "to nearest"
            rows.append(("BF16 weights", f"rounded {how}"))
        if self.deviation:
            rows.append(("sampler only", self.deviation))
        promise = "bit for bit equal (checked every step)"
        promise = promise if self.exact else "not promised (measured)"
        return [*rows, ("sampler and trainer log-probs", promise)]
