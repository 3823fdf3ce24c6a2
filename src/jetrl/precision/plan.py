"""The precision plan: one frozen object that says what is FP8, for both sides of the flow.

A format is chosen by the role of an operand (a linear layer of the rollout, a key, a gradient),
never by a module's name. The sampler and the trainer get the same plan. If it gives both the same
formats it promises that they agree bit for bit (`exact`), and a run that does not is stopped. The
presets are data (`jetrl.settings.presets`); a plan's name is for people.

Studies of known mismatches give the sampler a plan of its own: a subclass that overrides `on` and
`before_draw`, put in the place of the settings' plan by `amended_plans`
(benchmarks/study/deviation.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

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
from jetrl.settings.precision_section import PrecisionSettings
from jetrl.settings.section import NonNegative


@functools.cache
def _schemas() -> dict[str, Any]:
    hints = get_type_hints(PrecisionPlan, include_extras=True)
    return {name: TypeAdapter(hint) for name, hint in hints.items()}


Side = Literal["rollout", "train"]
WGradInput = Literal["128x128", "1x128"]

_SETTINGS = TypeAdapter(PrecisionSettings)
# A plan is stored without these fields if they have their defaults, as before there were any.
_STORED_IF_SET = ("wgrad_input", "pinned_sums", "base", "bf16_rounding", "key_smoothing")
# The sampler's own fields are stored in a table of this name, as before they were fields.
_SAMPLER_FIELDS = ("weights_through_bf16", "attention_split")
_SAMPLER_TABLE = "sampler_deviation"


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
        base: What stands for fp8 in the linears of a base that is not trained.
        bf16_rounding: How master weights of matrices become BF16 (`quantize.dithered_bf16`).
        key_smoothing: Whether INT8 keys are smoothed (`models.key_smoothing`); others are not.
        weights_through_bf16: Whether the sampler's FP8 codes are built from master weights rounded
            to BF16, as if weights traveled to another engine in BF16.
        attention_split: The keys after which the sampler's attention begins a new sum; None: the
            sums are the trainer's. On a CPU the sums of a split are float32 sums in the library's
            order, while the trainer's are exact.
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
    base: presets.BaseFormat = "fp8"
    bf16_rounding: presets.BF16Rounding = "nearest"
    key_smoothing: bool = False
    weights_through_bf16: bool = False
    attention_split: int | None = None

    def __post_init__(self) -> None:
        for name, schema in _schemas().items():
            try:
                schema.validate_python(getattr(self, name), strict=True)
            except ValidationError as error:
                raise UserError(problem_of(error, f"precision.{name}")) from None
        sampler = self.on("rollout")
        alike = sampler.rollout_linear == self.train_linear == FP8.name
        if self.frozen_base and (self.weights_through_bf16 or not alike):
            raise UserError(
                "precision.base = nvfp4 needs FP8 weights that both sides read alike: use "
                "precision.preset = unified or jet, and leave precision.weights_through_bf16 out"
            )

        if self._trains_int8:
            given = {
                "grad_output": self.grad_output != "e5m2",
                "scales": self.scales == sampler.scales == presets.DEFAULT_SCALES,
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
        return PrecisionPlan(name, **presets.PRESETS[name]._asdict())

    @staticmethod
    def from_settings(settings: PrecisionSettings) -> PrecisionPlan:
        """Return a preset's plan with the settings' options (see `amended_plans`)."""
        plan = PrecisionPlan._from_settings(settings)
        return plan if _amend is None else _amend(plan)

    @staticmethod
    def _from_settings(settings: PrecisionSettings) -> PrecisionPlan:
        options = settings.model_dump(exclude={"preset"}, exclude_none=True)
        plan = PrecisionPlan.preset(settings.preset)
        kv = settings.kv or plan.kv
        if settings.key_smoothing and key_and_value_formats(kv)[0] is not INT8:
            raise UserError(
                f"precision.key_smoothing = true is for INT8 keys, and keys are {kv} here: leave "
                "it out, or set precision.kv=int8"
            )
        if settings.weights_through_bf16 and not number_format(plan.rollout_linear).has_rule:
            raise UserError(
                "precision.weights_through_bf16 = true is for FP8 weights of the sampler: leave it "
                "out, or use precision.preset = mixed"
            )
        return plan.replace(**options)

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
        return "none" if in_bf16 or self.weights_through_bf16 else "linears"

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
        return alike and self.pinned and not self.sampler_only

    @property
    def sampler_only(self) -> dict[str, Any]:
        """The fields, by name, by which the sampler computes otherwise than the trainer."""
        fields = {name: getattr(self, name) for name in _SAMPLER_FIELDS}
        return {name: value for name, value in fields.items() if value}

    def on(self, side: Side) -> PrecisionPlan:
        """Return the plan by which one side computes: this one, unless a study overrides it."""
        return self

    def before_draw(self, logits: Tensor, bits: Tensor) -> Tensor:
        """Return logits [R, V] as the sampler draws from them: unchanged, unless a study does.

        `bits`, int64 [R], are the random bits of the draws. The logits may be overwritten.
        """
        return logits

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
        if self.keeps_bf16(layer, num_layers) and not number_format(chosen).reads_masters:
            return BF16
        return number_format(self.base if chosen == FP8.name else chosen)

    @property
    def without_base(self) -> PrecisionPlan:
        """The plan of a critic and of a reward model, which have no base."""
        return dataclasses.replace(self, base=PrecisionPlan.base)

    def linear_formats(self, layer: int, num_layers: int) -> dict[Side, Format]:
        return {side: self.linear_format(side, layer, num_layers) for side in get_args(Side)}

    def roundings(self, formats: Mapping[Side, Format]) -> dict[Side, Rounding]:
        """Return how each side rounds a weight that it reads in a format."""
        return {side: self.rounding(side, format) for side, format in formats.items()}

    def rounding(self, side: Side, format: Format) -> Rounding:
        """Return how a weight is rounded for a layer that one side reads in a format."""
        if format is BF16:
            return Rounding(BF16, dithered=self.bf16_rounding == "dithered")
        if not format.has_rule:
            return Rounding(format)
        through_bf16 = side == "rollout" and self.weights_through_bf16
        return Rounding(format, self.on(side).scales, through_bf16)

    def keeps_bf16(self, layer: int, num_layers: int) -> bool:
        """Return whether a decoder layer is one of those whose linears are never FP8."""
        return layer < self.first_layers_bf16 or layer >= num_layers - self.last_layers_bf16

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, as a run directory and a checkpoint keep them."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(PrecisionPlan)}
        for name in _STORED_IF_SET:
            if fields[name] == getattr(PrecisionPlan, name):
                del fields[name]
        for name in _SAMPLER_FIELDS:
            del fields[name]
        if self.sampler_only:
            fields[_SAMPLER_TABLE] = self.sampler_only
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
        if _SAMPLER_TABLE in changed:
            split = preset.get(_SAMPLER_TABLE, {}).get("attention_split")
            stored = changed.pop(_SAMPLER_TABLE)
            changed["weights_through_bf16"] = _through_bf16(stored, split, where)
        return PrecisionPlan._from_settings(checked(_SETTINGS, {"preset": name, **changed}, where))

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
        if self.sampler_only:
            rows.append(("sampler only", words_of(self.sampler_only)))
        promise = "bit for bit equal (checked every step)"
        promise = promise if self.exact else "not promised (measured)"
        return [*rows, ("sampler and trainer log-probs", promise)]


def words_of(fields: dict[str, Any]) -> str:
    """Return fields of a plan in words: `attention_split = 256, bf16_layers = 0 3`."""
    return ", ".join(
        f"{name} = {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in fields.items()
    )


def _through_bf16(stored: Any, split: int | None, where: str) -> Any:
    """Return `weights_through_bf16` of the stored table of the sampler's fields."""
    known = isinstance(stored, dict) and not stored.keys() - set(_SAMPLER_FIELDS)
    if known and stored.get("attention_split") == split:
        return stored.get("weights_through_bf16", False)
    raise UserError(
        f"{where}: {_SAMPLER_TABLE}: the plan of a study, which only `jetrl study` runs "
        "(docs/studies.md)"
    )


_amend: Callable[[PrecisionPlan], PrecisionPlan] | None = None


@contextlib.contextmanager
def amended_plans(amend: Callable[[PrecisionPlan], PrecisionPlan]) -> Iterator[None]:
    """Let settings mean, in this process, the plan that `amend` makes of theirs: for studies."""
    global _amend
    before, _amend = _amend, amend
    try:
        yield
    finally:
        _amend = before
