"""The precision plan: one frozen object that sets the number formats of sampler and trainer.

A format depends on the role of an operand (a linear layer during rollout, a key, a gradient), never
on a module's name. The sampler and the trainer share one plan. If it gives both the same formats,
their log-probs must agree bit for bit (`exact`); a run in which they differ is stopped. Presets are
data (`jetrl.settings.presets`). A plan's name is only shown to users.

Studies of a known mismatch use a subclass that overrides `on`, `before_draw` and
`training_forward`. `amended_plans` puts it in place of the plan from the settings
(benchmarks/study/deviation.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from jetrl.errors import UserError, named
from jetrl.files import checked, problem_of, shown_value
from jetrl.precision.formats import (
    BF16,
    EMULATED,
    FP8,
    FP32,
    INT8,
    Emulated,
    Format,
    Recipe,
    Rounding,
    key_and_value_formats,
    number_format,
)
from jetrl.precision.gradient_formats import GRADIENTS, Gradient
from jetrl.settings import presets
from jetrl.settings.model_sections import PrecisionSettings
from jetrl.settings.section import NonNegative, Quantile
from jetrl.types import Json


@functools.cache
def _schemas() -> Json:
    hints = get_type_hints(PrecisionPlan, include_extras=True)
    return {name: TypeAdapter(hint) for name, hint in hints.items()}


Side = Literal["rollout", "train"]
WGradInput = Literal["128x128", "1x128"]

_SETTINGS = TypeAdapter(PrecisionSettings)
# Stored only if not at their defaults, so that plans from before these fields look the same.
_STORED_IF_SET = (
    *("wgrad_input", "pinned_sums", "base", "bf16_rounding", "key_smoothing", "queries", "saved"),
    *Recipe._fields,
)
# The sampler's own fields are stored in a table of this name, as before they became fields.
_SAMPLER_FIELDS = ("weights_through_bf16", "attention_split")
_SAMPLER_TABLE = "sampler_deviation"


@dataclass(frozen=True)
class PrecisionPlan:
    """The number formats of a run, by the role of an operand.

    Attributes:
        name: The preset that the plan was built from.
        rollout_linear: Linears of decoder layers during sampling.
        train_linear: Linears of decoder layers during training.
        kv: Keys and values on both sides: one format, or "keys+values".
        rest: Embeddings, norms and the residual stream.
        lm_head: The output projection, on both sides.
        grad_output: dY in DGrad and WGrad; used only if train_linear is fp8 or int8.
        scales: The format of FP8 scales: float32, or powers of two (rounded up).
        first_layers_bf16: Number of leading decoder layers whose linears stay BF16 on both sides.
        last_layers_bf16: Number of trailing decoder layers whose linears stay BF16 on both sides.
        wgrad_input: Scale groups of X in WGrad: 128 x 128, or 1 x 128 along tokens.
        pinned_sums: Whether reductions have a fixed order that is independent of the batch. None:
            only if the linears of both sides have the same format of at most 8 bits. If not, cuBLAS
            chooses the order of BF16 sums on a GPU.
        base: Format that replaces fp8 in the linears of a frozen base.
        bf16_rounding: Rounding of matrices from FP32 to BF16 (`quantize.dithered_bf16`).
        key_smoothing: Whether INT8 keys are smoothed (`models.key_smoothing`).
        weights_through_bf16: Whether the sampler quantizes master weights rounded to BF16, as if
            BF16 weights were sent to another engine.
        attention_split: Keys per sum in the sampler's attention; None: as in the trainer.
            On a CPU each sum is in float32, in the library's order; the trainer's are exact.
        queries: Queries on both sides. int8: attention has the same bits on every machine
            (`kernels.attention.integer`); only presets and studies choose it.
        saved: Activations that dense layers save for backward: int8 for codes (`precision.saved`).
        weight_block, wgrad_hadamard, stochastic_rounding: Options of emulated NVFP4
            (`formats.Emulated`): values of a weight that share a scale, rotation of WGrad's
            operands, draws for output gradients.
        gradient_estimator, outlier_quantile, outlier_compensation: Options of emulated FP4
            (`precision.fp4`): the derivative of a smooth quantizer in weights' gradients, the
            quantile at which a token's activations are clamped (1: never), and whether what
            clamping took away is multiplied in BF16.
    """

    name: str
    rollout_linear: presets.LinearFormat
    train_linear: presets.TrainedFormat
    kv: presets.KVFormat
    rest: presets.Format
    lm_head: presets.HeadFormat
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
    queries: presets.QueryFormat = "bf16"
    saved: presets.SavedFormat = "off"
    weight_block: presets.WeightBlock = "16x16"
    wgrad_hadamard: bool = False
    stochastic_rounding: bool = False
    gradient_estimator: bool = False
    outlier_quantile: Quantile = 1.0
    outlier_compensation: bool = False

    def __post_init__(self) -> None:
        for name, schema in _schemas().items():
            try:
                schema.validate_python(getattr(self, name), strict=True)
            except ValidationError as error:
                raise UserError(problem_of(error, f"precision.{name}")) from None
        sampler = self.on("rollout")
        trained = number_format(self.train_linear)
        both_fp8 = trained is FP8 and number_format(sampler.rollout_linear) is FP8
        if self.frozen_base and (self.weights_through_bf16 or not both_fp8):
            raise UserError(
                "precision.base = nvfp4 needs FP8 weights that both sides read alike: use "
                "precision.preset = unified or jet, and leave precision.weights_through_bf16 out"
            )
        self._check_queries()
        self._check_recipe(trained, number_format(sampler.rollout_linear))
        if self.saved != "off":
            self._check_saved(trained)
        if trained is not INT8:
            if number_format(self.lm_head).two_planes:
                raise UserError(
                    f"precision.lm_head = {self.lm_head} needs INT8 linear layers: use "
                    "precision.preset = int8"
                )
            if self.gradient.integer:
                raise UserError("precision.grad_output = int8 needs precision.preset = int8")
        if trained is INT8 or trained.emulated:
            self._check_fp8_options(trained, sampler)

    def _check_fp8_options(self, trained: Format, sampler: PrecisionPlan) -> None:
        gradients = ("e5m2", "bf16") if trained.emulated else ("e5m2",)
        only_for_fp8 = {
            "grad_output": self.grad_output in gradients,
            "scales": {self.scales, sampler.scales} != {presets.DEFAULT_SCALES},
            "wgrad_input": self.wgrad_input != "128x128",
        }
        for field, is_set in only_for_fp8.items():
            if is_set:
                raise UserError(
                    f"precision.{field} = {getattr(self, field)} is for FP8: leave it out, or use "
                    "precision.preset = unified or jet"
                )

    def _check_queries(self) -> None:
        if not self.integer_attention:
            return
        if key_and_value_formats(self.kv) != (INT8, INT8):
            raise UserError(
                f"precision.kv = {self.kv} is for queries in BF16, and queries are int8 here: use "
                "precision.kv = int8, or precision.preset = int8"
            )
        if self.attention_split is not None:
            raise UserError(
                f"attention_split = {self.attention_split} is for queries in BF16, and queries "
                "are int8 here: leave it out"
            )

    def _check_recipe(self, trained: Format, sampled: Format) -> None:
        if trained is not sampled and (trained.emulated or sampled.emulated):
            by_preset = " or ".join(format.preset for format in EMULATED)
            raise UserError(
                f"rollout_linear = {self.rollout_linear}, train_linear = {self.train_linear}: "
                f"emulated formats are for both sides; use precision.preset = {by_preset}"
            )
        for format in EMULATED:
            for field in format.options if format is not trained else ():
                if (value := getattr(self, field)) != getattr(PrecisionPlan, field):
                    raise UserError(
                        f"precision.{field} = {value} is for {format.words} that is trained: "
                        f"leave it out, or use precision.preset = {format.preset}"
                    )

    def _check_saved(self, trained: Format) -> None:
        problem = None
        if not trained.coded:
            problem = f"8-bit linear layers, and {self.name} trains them in {trained.words}"
        elif self.integer_attention:
            problem = "queries in BF16, and docs/bits.md does not define it"
        elif self.first_layers_bf16 or self.last_layers_bf16:
            problem = "plans without first_layers_bf16 and last_layers_bf16"
        if problem is not None:
            raise UserError(
                f"precision.saved = {self.saved} is for {problem}: leave it out, or use "
                "precision.preset = int8"
            )

    @staticmethod
    def preset(name: Any) -> PrecisionPlan:
        """Return a preset's plan (`jetrl.settings.presets`), or a plan; else UserError."""
        if isinstance(name, PrecisionPlan):
            return name
        if name not in list(presets.PRESETS):  # a list: the name may be unhashable
            raise UserError(
                f"precision preset {shown_value(name)}: use one of {', '.join(presets.PRESETS)}"
            )
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
        chosen = plan.replace(**options)
        if plan.defined and not chosen.defined:
            changed = [key for key, value in options.items() if value != getattr(plan, key)]
            raise UserError(
                f"precision.{', precision.'.join(changed)}: preset {plan.name} has the same bits "
                "on every machine, and would not with this: leave it out, or use "
                "precision.preset = int8"
            )
        return chosen

    def replace(self, **options: Any) -> PrecisionPlan:
        """Return a plan with some fields changed; UserError for a field that does not exist."""
        known = [field.name for field in dataclasses.fields(self)]
        for key in options.keys() - set(known):
            raise UserError(f"precision plan has no option {key!r}: {', '.join(sorted(known))}")
        plan = dataclasses.replace(self, **options)
        changed = {key: value for key, value in options.items() if value != getattr(self, key)}
        if self.reads_masters and changed.keys() - {"name"}:
            raise UserError(f"the fp32 preset takes no options, but {changed} were given")
        return plan

    @property
    def pinned(self) -> bool:
        """True if all sums have a fixed order; bitwise equality of both sides depends on it."""
        if self.pinned_sums is not None:
            return self.pinned_sums
        if self.emulated:
            return self.rollout_linear == self.train_linear
        return presets.codes_alike(self.rollout_linear, self.train_linear)

    @property
    def emulated(self) -> bool:
        """True if linear layers are trained in a format without kernels."""
        return number_format(self.train_linear).emulated

    @property
    def recipe(self) -> Recipe:
        """The options of emulated formats."""
        return Recipe(**{name: getattr(self, name) for name in Recipe._fields})

    @property
    def widens_wgrad(self) -> bool:
        """True if FP8 GEMMs of GPUs do not support WGrad's operands: they become BF16 there."""
        return self.grad_output == "e5m2" or self.wgrad_input == "1x128"

    @property
    def dithered_in_files(self) -> Literal["none", "linears", "matrices"]:
        """The weights to dither in BF16 files: those that some side reads in another format."""
        if self.bf16_rounding == "dithered" or self.reads_masters:
            return "matrices"
        trained = number_format(self.train_linear)
        sampled = number_format(self.on("rollout").rollout_linear)
        if trained is BF16 and (sampled is BF16 or self.weights_through_bf16):
            return "none"
        return "linears"

    @property
    def smooths_keys(self) -> bool:
        """True if keys are smoothed, on both sides: only INT8 keys are."""
        return self.key_smoothing and key_and_value_formats(self.kv)[0] is INT8

    @property
    def integer_attention(self) -> bool:
        """True if attention multiplies INT8 codes only (`kernels.attention.integer`)."""
        return number_format(self.queries) is INT8

    @property
    def defined(self) -> bool:
        """True if every operation has one result, the same on every machine (docs/bits.md)."""
        integer = self.integer_attention and self.gradient.integer
        in_bf16 = self.first_layers_bf16 or self.last_layers_bf16
        return integer and number_format(self.lm_head).two_planes and not in_bf16

    @property
    def exact(self) -> bool:
        """True if sampler and trainer are guaranteed to agree bit for bit."""
        if (
            self.rollout_linear != self.train_linear
            or number_format(self.train_linear).reads_masters
        ):
            return False
        return self.pinned and not self.sampler_only

    @property
    def sampler_only(self) -> Json:
        """The fields, by name, that make the sampler compute differently from the trainer."""
        fields = {name: getattr(self, name) for name in _SAMPLER_FIELDS}
        return {name: value for name, value in fields.items() if value}

    def on(self, side: Side) -> PrecisionPlan:
        """Return the plan of one side: this one, unless a study overrides it."""
        return self

    def before_draw(self, logits: Tensor, bits: Tensor) -> Tensor:
        """Return the logits [R, V] to draw from: unchanged, unless a study overrides this.

        `bits`, int64 [R], are the random bits of the draws. The logits may be overwritten.
        """
        return logits

    def training_forward(
        self, decoder: nn.Module, sampler_forward: Callable[[], None]
    ) -> AbstractContextManager[None]:
        """Return the context of a forward with gradients: empty, unless a study overrides this.

        `sampler_forward` runs the sampler's forward of the same tokens.
        """
        return nullcontext()

    @property
    def reads_masters(self) -> bool:
        """True if forwards read the master weights, as in the fp32 plan."""
        return number_format(self.rest).reads_masters

    @property
    def keys_in_fp32(self) -> bool:
        """True if keys and values are in FP32, which only the reference attention supports."""
        return key_and_value_formats(self.kv)[0] is FP32

    @property
    def frozen_base(self) -> bool:
        """True if the base has a format that only frozen weights can have, such as NVFP4."""
        return number_format(self.base).frozen

    @property
    def gradient(self) -> Gradient:
        """The format of dY for a weight in codes."""
        return GRADIENTS[self.grad_output]

    @property
    def backward_format(self) -> Format:
        """The format of backward's products: FP8 if an `int8` plan has FP8 output gradients."""
        trained = number_format(self.train_linear)
        return FP8 if trained is INT8 and self.grad_output == "e4m3" else trained

    def linear_format(self, side: Side, layer: int, num_layers: int) -> Format:
        """Return the format of a decoder layer's linears on one side."""
        name = self.train_linear if side == "train" else self.on(side).rollout_linear
        chosen = number_format(name)
        if self.keeps_bf16(layer, num_layers) and not chosen.reads_masters:
            return BF16
        return number_format(self.base) if chosen is FP8 else chosen.with_recipe(self.recipe)

    @property
    def without_base(self) -> PrecisionPlan:
        """The plan of a critic or reward model, which has no frozen base."""
        return dataclasses.replace(self, base=PrecisionPlan.base)

    def linear_formats(self, layer: int, num_layers: int) -> dict[Side, Format]:
        return {side: self.linear_format(side, layer, num_layers) for side in get_args(Side)}

    def rounding(self, side: Side, format: Format) -> Rounding:
        """Return the rounding of a weight that one side reads in a format."""
        if format is BF16:
            return Rounding(BF16, dithered=self.bf16_rounding == "dithered")
        if not format.has_rule:
            return Rounding(format)
        through_bf16 = side == "rollout" and self.weights_through_bf16
        return Rounding(format, self.on(side).scales, through_bf16)

    def keeps_bf16(self, layer: int, num_layers: int) -> bool:
        """Return whether a decoder layer's linears stay in BF16 on both sides."""
        return layer < self.first_layers_bf16 or layer >= num_layers - self.last_layers_bf16

    def to_dict(self) -> Json:
        """Return the fields by name, as stored in plan.json and checkpoints."""
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
    def from_dict(fields: Json, where: str = "precision plan") -> PrecisionPlan:
        """Return the plan of a dict made by `to_dict` and read from the file `where`.

        Raises UserError unless the fields are a preset's, with options of `[precision]` changed.
        """
        name = fields.get("name")
        with named(where):
            preset = PrecisionPlan.preset(name).to_dict()
        # Stored plans without these fields have their defaults, whatever the preset has now.
        absent = ("bf16_rounding", "key_smoothing", *Recipe._fields)
        fields = {name: getattr(PrecisionPlan, name) for name in absent} | fields
        changed = {
            key: value for key, value in fields.items() if key not in preset or value != preset[key]
        }
        if _SAMPLER_TABLE in changed:
            split = preset.get(_SAMPLER_TABLE, {}).get("attention_split")
            stored = changed.pop(_SAMPLER_TABLE)
            changed["weights_through_bf16"] = _through_bf16(stored, split, where)
        return PrecisionPlan._from_settings(checked(_SETTINGS, {"preset": name, **changed}, where))


def _through_bf16(stored: Any, split: int | None, where: str) -> Any:
    """Return `weights_through_bf16` from the stored table of the sampler's fields."""
    known = isinstance(stored, dict) and not stored.keys() - set(_SAMPLER_FIELDS)
    if known and stored.get("attention_split") == split:
        return stored.get("weights_through_bf16", False)
    raise UserError(
        f"{where}: {_SAMPLER_TABLE}: the plan of a study, which only `jetrl study` runs "
        "(docs/studies.md)"
    )


def plan_table(plan: PrecisionPlan) -> list[tuple[str, str]]:
    """Return rows of (role, format) that show a plan to a user."""
    rows = _linear_rows(plan)
    if plan.first_layers_bf16 or plan.last_layers_bf16:
        kept = f"first {plan.first_layers_bf16}, last {plan.last_layers_bf16}"
        rows.append(("layers kept in BF16, both sides", kept))
    keys, values = (f.described(plan.scales) for f in key_and_value_formats(plan.kv))
    if plan.smooths_keys:
        keys += ", smoothed"
    if plan.integer_attention:
        rows.append(("queries, both sides", number_format(plan.queries).described(plan.scales)))
    rows += [
        ("keys and values, both sides", keys if keys == values else f"{keys}; {values}"),
        ("embeddings, norms, residual", number_format(plan.rest).described(plan.scales)),
        ("lm_head, both sides", number_format(plan.lm_head).described_head(plan.scales)),
        ("master weights", "FP32"),
    ]
    if plan.saved != "off":
        rows.append(("saved activations", "INT8 codes: gate and up, queries, QK norms' inputs"))
    if plan.wgrad_input != "128x128":
        rows.append(("X into WGrad", f"{plan.wgrad_input} along tokens"))
    if plan.pinned_sums is not None:
        order = "one order, whatever the batch" if plan.pinned_sums else "the library's order"
        rows.append(("sums", order))
    if plan.bf16_rounding == "dithered":
        rows.append(("BF16 weights", "rounded by fixed draws"))
    elif number_format(plan.train_linear) is BF16:
        rows.append(("BF16 weights", "rounded to nearest"))
    if plan.sampler_only:
        rows.append(("sampler only", words_of(plan.sampler_only)))
    agreement = (
        "bit for bit equal (checked every step)" if plan.exact else "not promised (measured)"
    )
    rows.append(("sampler and trainer log-probs", agreement))
    if plan.defined:
        rows.append(("results of a run", "defined for every machine (docs/bits.md)"))
    return rows


def _linear_rows(plan: PrecisionPlan) -> list[tuple[str, str]]:
    """Return the rows of the decoder layers' linears during sampling and training."""
    trained = number_format(plan.train_linear).with_recipe(plan.recipe)
    sampled = number_format(plan.rollout_linear).with_recipe(plan.recipe)
    rollout = sampled.described_linear(plan.scales)
    training = trained.described_linear(plan.scales)
    if isinstance(trained, Emulated):
        training = trained.described_training(plan.scales)
        speed = "that of BF16 products at best: there are no kernels for these codes"
        return [("rollout linears", rollout), ("training linears", training), ("speed", speed)]
    if plan.frozen_base:
        rollout = training = number_format(plan.base).described_linear(plan.scales)
    elif plan.backward_format is not trained:
        training += f" (FProp); {plan.gradient.words} (DGrad, WGrad)"
    elif trained.coded:
        training += f" (FProp, DGrad, WGrad; output gradients {plan.gradient.words})"
    return [("rollout linears", rollout), ("training linears", training)]


def words_of(fields: Json) -> str:
    """Return plan fields as text, like `attention_split = 256, bf16_layers = 0 3`."""
    words = []
    for name, value in fields.items():
        shown = " ".join(map(str, value)) if isinstance(value, list) else value
        words.append(f"{name} = {shown}")
    return ", ".join(words)


_amend: Callable[[PrecisionPlan], PrecisionPlan] | None = None


@contextlib.contextmanager
def amended_plans(amend: Callable[[PrecisionPlan], PrecisionPlan]) -> Iterator[None]:
    """Apply `amend` to every plan that this process makes from settings; for studies."""
    global _amend
    before, _amend = _amend, amend
    try:
        yield
    finally:
        _amend = before
