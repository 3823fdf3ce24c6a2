"""The runs of a study: every grid point, arm and seed, with complete settings.

The settings of a run are merged in this order, later ones taking precedence: the recipe, the common
settings, the value of each axis, the arm. All are resolved and checked before any run starts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.study.definition import Definition, Layer, StartSection
from benchmarks.study.deviation import NO_DEVIATION, SECTION, SamplerDeviation, deviation_of

from jetrl.errors import UserError
from jetrl.settings.loading import Settings, load_config, to_toml, toml_value
from jetrl.settings.sections import ModelSettings, PrecisionSettings

OWN_KEYS = ("run.name", "run.dir", "run.seed")
RUN, START = "runs", "starts"
# Tasks of studies that were built in, by the names that study files and digests have for them.
EXAMPLES = {
    name: f"examples/long_answers.py:{name.capitalize()}" for name in ("program", "multiplication")
}
THROUGH_BF16 = "weights_through_bf16"  # once of the sampler's deviation, now of [precision]


@dataclass(frozen=True)
class PlannedStart:
    """A base checkpoint: supervised training before several runs.

    Attributes:
        digest: The digest of the settings that differ from their defaults.
        said: The digest of the settings in the study file and recipe.
    """

    name: str
    settings: Settings
    digest: str
    said: str

    @property
    def path(self) -> Path:
        """The run directory."""
        return Path(self.settings.run.dir) / self.name


@dataclass(frozen=True)
class PlannedRun:
    """A run of a study.

    Attributes:
        point: The grid point: the name of a value by the name of its axis.
        digest: The digest of the settings that differ from their defaults, its start's included.
        said: The digest of the settings in the study file and recipe, its start's included. It
            does not change with a default.
        start: The training of its initial weights; None: its own settings name them.
        deviation: The difference of its sampler from its trainer.
    """

    name: str
    point: Mapping[str, str]
    arm: str
    seed: int
    settings: Settings
    digest: str
    said: str
    start: PlannedStart | None = None
    deviation: SamplerDeviation = NO_DEVIATION

    @property
    def path(self) -> Path:
        """The run directory."""
        return Path(self.settings.run.dir) / self.name

    @property
    def steps(self) -> int:
        """The number of its steps; of raw text, of its supervised updates."""
        settings = self.settings
        return settings.sft.steps if settings.task.is_text else settings.loop.steps


def recipe_of(settings: Settings) -> str:
    """Return a run's recipe as TOML: the settings of study file and recipe, without defaults."""
    return to_toml(settings, defaults=False)


@dataclass(frozen=True)
class _Setting:
    """A setting of a study file."""

    value: Any
    place: str


Flat = dict[str, _Setting]


def planned_runs(definition: Definition) -> list[PlannedRun]:
    """Return all runs of a study by seed, so that the first runs cover all arms."""
    runs = []
    for seed in definition.study.seeds:
        for point in grid_points(definition):
            for arm in definition.arms:
                runs.append(_planned_run(definition, point, arm, seed))
    names = [run.name for run in runs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(
            f"{definition.source}: two runs are called {twice}: rename an arm or a value of the "
            "grid"
        )
    return runs


def grid_points(definition: Definition) -> Iterator[dict[str, str]]:
    """Yield the grid points, each a mapping from axis to the name of a value."""
    for names in itertools.product(*definition.grid.values()):
        yield dict(zip(definition.grid, names, strict=True))


def chosen(runs: Sequence[PlannedRun], only: Sequence[str]) -> list[PlannedRun]:
    """Return the runs selected by --only.

    Args:
        only: Names of arms, AXIS=VALUE and seed=NUMBER; none: all runs. Arms are alternatives, as
            are values of one axis and seeds.
    """
    arms = {run.arm for run in runs}
    values = {f"{axis}={value}" for run in runs for axis, value in _place_of(run).items()}
    for name in only:
        if name not in arms | values:
            known = ", ".join([*sorted(arms), *sorted(values)])
            raise UserError(f"--only {name}: no such arm or value of the grid; there are: {known}")
    named_arms = arms.intersection(only) or arms
    named_values = values.intersection(only)
    axes = {value.partition("=")[0] for value in named_values}
    return [
        run
        for run in runs
        if run.arm in named_arms
        and all(f"{axis}={_place_of(run)[axis]}" in named_values for axis in axes)
    ]


def _place_of(run: PlannedRun) -> dict[str, str]:
    """Return the seed and grid point of a run; an axis named seed takes precedence."""
    return {"seed": str(run.seed), **run.point}


def _planned_run(definition: Definition, point: dict[str, str], arm: str, seed: int) -> PlannedRun:
    """Return a run with its settings, resolved and checked."""
    shared = [_flat(definition, definition.common, "settings")]
    for axis, value in point.items():
        shared.append(_flat(definition, definition.grid[axis][value], f"grid.{axis}.{value}"))
    own = _flat(definition, definition.arm_settings[arm], f"arms.{arm}")
    name = "-".join([*point.values(), arm, f"s{seed}"])
    task = None if definition.recipe is None else load_config(definition.recipe).task.name
    flat, deviation = _without_deviation(definition, _merged([*shared, own], task))
    settings = _resolved(definition, flat, name, seed, RUN)
    if settings.task.is_text and not definition.reads_text:
        raise UserError(
            f"{definition.source}: the run {name} reads raw text, whose losses have a report of "
            'their own: write task.name = "text" in [settings], for all runs'
        )
    if (settings.task.eval_split == "train") != definition.evaluates_training_set:
        raise UserError(
            f"{definition.source}: the run {name} is evaluated on split "
            f"{settings.task.eval_split!r}, and the report says of all runs whether it is the "
            "training set: write task.eval_split in [settings], and nowhere else"
        )
    if definition.start is None:
        digest, said = _digest(settings, deviation), _said(settings, deviation)
        return PlannedRun(
            name, point, arm, seed, settings, digest, said, start=None, deviation=deviation
        )
    if "sft.steps" in own:
        raise UserError(
            f"{own['sft.steps'].place}: arms.{arm} sets sft.steps, and [start] trains before all "
            "arms: write it there"
        )
    start = _planned_start(definition, definition.start, _merged(shared, task), seed)
    digest = _digest(settings, deviation, start.digest)
    said = _said(settings, deviation, start.said)
    model = ModelSettings(path=str(start.path / "model"))
    sft = settings.sft.model_copy(update={"steps": 0, "until": None})
    begun = settings.model_copy(update={"model": model, "sft": sft})
    return PlannedRun(name, point, arm, seed, begun, digest, said, start, deviation)


def _without_deviation(definition: Definition, flat: Flat) -> tuple[Flat, SamplerDeviation]:
    """Return the settings of a run without its sampler's deviation, and that deviation."""
    own = {
        key: setting
        for key, setting in flat.items()
        if key.startswith(f"{SECTION}.") and key != f"{SECTION}.{THROUGH_BF16}"
    }
    if not own:
        return flat, NO_DEVIATION
    if definition.eval.own or definition.eval.exported:
        raise UserError(
            f"{definition.place('eval')}: a sampler deviates in training alone: with {SECTION} set "
            "own = false in [eval], and leave exported out"
        )
    table = {key.removeprefix(f"{SECTION}."): setting.value for key, setting in own.items()}
    deviation = deviation_of(table, next(iter(own.values())).place)
    return {key: setting for key, setting in flat.items() if key not in own}, deviation


def _planned_start(
    definition: Definition, section: StartSection, shared: Flat, seed: int
) -> PlannedStart:
    """Return the supervised training of a grid point; equal ones have one name."""
    shared, _ = _without_deviation(definition, shared)
    shared = shared | _flat(definition, definition.start_settings, "start")
    chosen_seed = seed if section.seed is None else section.seed
    settings = _resolved(definition, shared, "start", chosen_seed, START)
    if not settings.sft.steps:
        raise UserError(
            f"{definition.place('start')}: [start] trains sft.steps updates, and sft.steps = 0"
        )
    # Settings without effect before the first step must not change the digest.
    defaults = Settings()
    precision = PrecisionSettings(preset=section.precision, pinned_sums=section.pinned_sums or None)
    own = section.model_dump(include={"kv", "bf16_rounding"}, exclude_none=True)
    settings = settings.model_copy(
        update={
            "precision": precision.model_copy(update=own),
            "algorithm": defaults.algorithm,
            "loop": defaults.loop.model_copy(update={"steps": 0}),
        }
    )
    digest, said = _digest(settings, NO_DEVIATION), _said(settings, NO_DEVIATION)
    name = f"start-{digest}"
    run = settings.run.model_copy(update={"name": name})
    return PlannedStart(name, settings.model_copy(update={"run": run}), digest, said)


def _resolved(definition: Definition, flat: Flat, name: str, seed: int, folder: str) -> Settings:
    """Return the settings of a run, checked."""
    for key in OWN_KEYS:
        if key in flat:
            raise UserError(f"{flat[key].place}: {key} is set by the study itself; leave it out")
    if "run.max_hours" in flat:
        raise UserError(
            f"{flat['run.max_hours'].place}: run.max_hours: a study has its own limit, "
            "jetrl study --minutes; leave it out"
        )
    overrides = [f"{key}={_override(key, setting.value)}" for key, setting in flat.items()]
    overrides += [f"run.name={name}", f"run.dir={definition.out / folder}", f"run.seed={seed}"]
    try:
        return load_config(definition.recipe, overrides)
    except UserError as error:
        message = str(error)
        for override, setting in zip(overrides, flat.values(), strict=False):
            message = message.replace(f"override {override!r}", setting.place)
        raise UserError(f"{message}\n(settings of the run {name})") from None


def _override(key: str, value: Any) -> str:
    """Return a value in the notation of overrides, where `none` unsets a setting."""
    if key == "task.name":
        value = EXAMPLES.get(value, value)
    return "none" if value == "none" else toml_value(value)


def _flat(definition: Definition, layer: Layer, path: str) -> Flat:
    """Return the settings of a table by dotted key, with their places in the file."""

    def walk(tree: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[tuple[str, _Setting]]:
        for key, value in tree.items():
            if isinstance(value, dict) and (value or not keys):
                yield from walk(value, (*keys, key))
            else:
                dotted = ".".join((*keys, key))
                yield dotted, _Setting(value, definition.place(f"{path}.{dotted}"))

    return dict(walk(layer, ()))


def _merged(layers: Sequence[Flat], task: str | None) -> Flat:
    """Return the merged settings of layers; later ones take precedence."""
    merged: Flat = {}
    for layer in layers:
        name = layer.get("task.name")
        if name is not None:
            if task not in (None, name.value):
                merged = {key: s for key, s in merged.items() if not key.startswith("task.")}
            task = name.value
        if "model.path" in layer:
            merged = {
                key: s
                for key, s in merged.items()
                if not key.startswith("model.config") and key != "model.tokenizer"
            }
        if any(key.startswith("model.config") for key in layer):
            merged.pop("model.path", None)
        merged |= layer
    return merged


def _digest(settings: Settings, deviation: SamplerDeviation, start: str = "") -> str:
    """Return a digest of the settings that differ from their defaults, without name and folder."""
    tree = settings.model_dump(mode="json", exclude_defaults=True)
    _put_deviation(tree, deviation.to_dict())
    # `unified` was the default preset until 2026-11-26: digests of earlier runs leave it out.
    precision = tree.pop("precision", {}) | {"preset": settings.precision.preset}
    if precision["preset"] == "unified":
        del precision["preset"]
    if precision:
        tree["precision"] = precision
    return _digest_of(tree, start)


def _said(settings: Settings, deviation: SamplerDeviation, start: str = "") -> str:
    """Return a digest of the settings that were given a value, without name and folder."""
    tree = settings.model_dump(mode="json", exclude_unset=True)
    _put_deviation(tree, deviation.model_dump(mode="json", exclude_unset=True))
    return _digest_of(tree, start)


def _put_deviation(tree: dict[str, Any], own: dict[str, Any]) -> None:
    """Add the deviation, and a setting that once belonged to it, as in digests of earlier runs."""
    precision = tree.get("precision", {})
    if THROUGH_BF16 in precision:
        own = own | {THROUGH_BF16: precision.pop(THROUGH_BF16)}
    if own:
        tree[SECTION] = own


def _digest_of(tree: dict[str, Any], start: str) -> str:
    """Return a digest of settings in sections and of a start's digest, without name and folder."""
    run = {k: v for k, v in tree.pop("run", {}).items() if k not in ("name", "dir")}
    for name, example in EXAMPLES.items():
        if tree.get("task", {}).get("name") == example:
            tree["task"]["name"] = name
    text = json.dumps([start, run, tree], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
