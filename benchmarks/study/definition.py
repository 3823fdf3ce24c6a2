"""The definition of a study: the contents of a study file (TOML), read and checked.

    [study]           name, question, seeds, where its files go
    [settings]        settings that all runs have in common, and the recipe below them
    [grid.AXIS.NAME]  the values of an axis, each a table of settings
    [arms.NAME]       the settings that make an arm; label, twin and kill_after are its own
    [start]           supervised training whose weights all arms of a grid point begin from
    [eval]            how the final weights of every run are evaluated
    [collapse]        the rule by which a run counts as collapsed

The same tree of tables is kept in the results file, so that a report needs only that file.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from jetrl.errors import UserError, nearest
from jetrl.files import problem_of, read_text
from jetrl.runs.metrics import check_metrics
from jetrl.settings.messages import Origins, origin
from jetrl.settings.presets import BF16Rounding, KVSetting, Preset
from jetrl.settings.section import Mass, NonNegative, NonNegativeFloat, Positive, Section, Share

S = TypeVar("S", bound=Section)
MOST_RUNS = 10_000


@dataclass(frozen=True)
class Definition:
    """The definition of a study.

    Attributes:
        study: The section [study].
        eval: The section [eval].
        collapse: The section [collapse].
        start: The section [start]; None: the initial weights are those of the settings.
        arms: The keys of each arm other than settings, by name, in the order of the file.
        recipe: The recipe below all settings; None: the defaults.
        grid: The settings of each value, by axis and value.
        start_settings: The settings of the supervised training that differ from those of the runs.
        origins: The file and line of each key, for messages.
    """

    source: Path
    tree: dict[str, Any]
    study: StudySection
    eval: EvalSection
    collapse: CollapseSection
    start: StartSection | None
    arms: dict[str, Arm]
    recipe: str | None
    common: Layer
    grid: dict[str, dict[str, Layer]]
    arm_settings: dict[str, Layer]
    start_settings: Layer
    origins: Origins

    @property
    def reference(self) -> str:
        """The arm with which the others are compared."""
        return self.study.reference or next(iter(self.arms))

    @property
    def out(self) -> Path:
        """The folder of the runs."""
        return Path(self.study.out or f"studies/{self.study.name}")

    @property
    def results_file(self) -> Path:
        """The file of the results."""
        return Path(self.study.results) if self.study.results else self.out / "results.json"

    @property
    def evaluates_training_set(self) -> bool:
        """True if all runs are evaluated on their training prompts."""
        task = self.common.get("task")
        return isinstance(task, dict) and task.get("eval_split") == "train"

    @property
    def reads_text(self) -> bool:
        """True if the runs train on raw text, and are compared by their loss."""
        task = self.common.get("task")
        return isinstance(task, dict) and task.get("name") == "text"

    def label(self, arm: str) -> str:
        """Return the name of an arm in plots and tables."""
        return self.arms[arm].label or arm

    def place(self, key: str) -> str:
        """Return the file and line of a dotted key, for messages."""
        return origin(key, self.origins)


def read_definition(path: Path) -> Definition:
    """Return the definition in a study file."""
    try:
        text = read_text(path)
        tree = tomllib.loads(text)
    except FileNotFoundError:
        raise UserError(f"study {path}: no such file") from None
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"study {path}: not valid TOML: {error}") from None
    return definition_of(tree, path, _origins_of(text, path))


def definition_of(tree: dict[str, Any], source: Path, origins: Origins | None = None) -> Definition:
    """Return the definition in the tables of a study file."""
    origins = origins or {"": str(source)}
    tables = _checked(Tables, tree, "", origins)
    if not tables.arms:
        raise UserError(f"{source}: no [arms.NAME]: at least one arm is expected")
    common = dict(tables.settings)
    recipe = common.pop("recipe", None)
    if not isinstance(recipe, str | None):
        raise UserError(f"{origin('settings.recipe', origins)}: settings.recipe is not text")
    arms, arm_settings = {}, {}
    for name, table in tables.arms.items():
        arms[name], arm_settings[name] = _split(Arm, table, f"arms.{name}", origins)
    start: StartSection | None = None
    start_settings: Layer = {}
    if tables.start is not None:
        start, start_settings = _split(StartSection, tables.start, "start", origins)
    reference = tables.study.reference
    if reference is not None and reference not in arms:
        raise UserError(
            f"{origin('study.reference', origins)}: study.reference = {reference}: no such "
            f"arm; arms: {', '.join(arms)}"
        )
    for axis, values in tables.grid.items():
        if not values:
            raise UserError(f"{origin(f'grid.{axis}', origins)}: grid.{axis} has no values")
    sizes = [len(tables.study.seeds), len(arms), *(len(v) for v in tables.grid.values())]
    if math.prod(sizes) > MOST_RUNS:
        raise UserError(f"{source}: {math.prod(sizes):,} runs; a study has at most {MOST_RUNS:,}")
    return Definition(
        source=source,
        tree=tree,
        study=tables.study,
        eval=tables.eval,
        collapse=tables.collapse,
        start=start,
        arms=arms,
        recipe=recipe,
        common=common,
        grid=tables.grid,
        arm_settings=arm_settings,
        start_settings=start_settings,
        origins=origins,
    )


def _split(kind: type[S], table: Layer, path: str, origins: Origins) -> tuple[S, Layer]:
    """Return the own keys of a table as its schema has them, and its tables of settings."""
    settings = {key: value for key, value in table.items() if isinstance(value, dict)}
    own = {key: value for key, value in table.items() if key not in settings}
    return _checked(kind, own, path, origins), settings


def _checked(kind: type[S], tree: Layer, path: str, origins: Origins) -> S:
    """Return a table as its schema has it."""
    try:
        return kind.model_validate(tree, strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        # A misspelled key is unknown, and often missing as well: the first says more.
        first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
        steps = [str(step) for step in first["loc"] if step != "[key]"]
        key = ".".join([path, *steps]).strip(".")
        if first["type"] == "extra_forbidden":
            known = _schema_at(kind, steps[:-1]).model_fields
            message = f"unknown key {key}{nearest(steps[-1], known)}"
        else:
            message = problem_of(error, path)
        raise UserError(f"{origin(key, origins)}: {message}") from None


def _schema_at(kind: type[Section], steps: Sequence[str]) -> type[Section]:
    """Return the schema of an inner table."""
    for step in steps:
        inner = kind.model_fields[step].annotation if step in kind.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, Section)):
            break
        kind = inner
    return kind


def _origins_of(text: str, source: Path) -> Origins:
    """Return the file and the line on which each dotted key of a TOML text first stands."""
    origins = {"": str(source)}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"{source}, line {number}"
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            table = re.sub(r"[\s\"']", "", header[1])
            origins.setdefault(table, place)
        elif key := re.match(r"\s*([\w.+\"'-]+)\s*=", line):
            plain = re.sub(r"[\"']", "", key[1])
            origins.setdefault(f"{table}.{plain}".lstrip("."), place)
    return origins


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_+][A-Za-z0-9_+.-]*$", max_length=40)]
"""The name of a study, an arm, an axis or a value, which becomes part of a folder's name."""
Layer = dict[str, Any]
"""Settings as nested tables: section, key, value."""


class StudySection(Section):
    """The section `[study]`: the name, the seeds and the files of a study."""

    name: Name = Field(description="name of the study")
    title: str = Field("", description="heading of the report; empty: the name")
    question: str = Field("", description="what the study is to answer, for the report")
    seeds: list[NonNegative] = Field(description="run.seed of the runs of each arm")
    reference: str | None = Field(
        None, description="arm that the others are compared with, seed by seed; unset: the first"
    )
    margin: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.01, description="difference of held-out accuracy below which two arms are equivalent"
    )
    level: Annotated[float, Field(gt=0.5, lt=1)] = Field(
        0.95, description="confidence of the intervals; a test's level is what it leaves"
    )
    jobs: Positive | None = Field(
        None, description="runs side by side on a card; unset: 4 on a GPU, 1 on the CPU"
    )
    threads: Positive = Field(1, description="CPU threads a run (OMP_NUM_THREADS)")
    out: str | None = Field(None, description="folder of the runs; unset: studies/NAME")
    results: str | None = Field(
        None, description="file of the results, made to be committed; unset: OUT/results.json"
    )
    points: Annotated[int, Field(ge=2, le=10_000)] = Field(
        60, description="points that are kept of a curve, each the mean of the steps around it"
    )
    metrics: list[str] = Field(
        default_factory=list, description="metrics that are kept beside the usual ones"
    )
    keep_weights: bool = Field(
        True, description="false: remove checkpoints and model of a run that is evaluated"
    )

    @field_validator("seeds")
    @classmethod
    def different_seeds(cls, seeds: list[int]) -> list[int]:
        """Check that the list holds a seed, and no seed twice."""
        if not seeds or len(set(seeds)) < len(seeds):
            raise ValueError("at least one seed is expected, and each one once")
        return seeds

    @field_validator("metrics")
    @classmethod
    def known_metrics(cls, metrics: list[str]) -> list[str]:
        """Check that metrics.jsonl knows all the names."""
        check_metrics(dict.fromkeys(metrics, 0.0))
        return metrics


class EvalSection(Section):
    """The section `[eval]`: one evaluation of the final weights, alike for all runs."""

    preset: Preset = Field("bf16", description="precision preset that all runs are evaluated in")
    bf16_rounding: BF16Rounding | None = Field(
        None,
        description="rounding of their weights, as precision.bf16_rounding; unset: the preset's",
    )
    prompts: NonNegative = Field(256, description="held-out prompts, from the start; 0: all")
    samples: Positive = Field(4, description="completions a prompt")
    temperature: NonNegativeFloat = Field(1.0, description="0: greedy, with samples = 1")
    top_p: Mass = Field(1.0, description="keep the most probable tokens up to this mass; 1: all")
    seed: NonNegative = Field(0, description="fixes every draw of the evaluation")
    own: bool = Field(True, description="evaluate each run in its own precision as well")
    exported: bool = Field(
        False, description="evaluate each run's exported BF16 files as well, in `preset`"
    )

    @model_validator(mode="after")
    def draws_differ(self) -> Self:
        """Check that several completions of a prompt can differ."""
        if self.temperature == 0 and self.samples > 1:
            raise ValueError("temperature = 0 draws the same completion each time; set samples = 1")
        return self


class CollapseSection(Section):
    """The section `[collapse]`: the rule by which a run counts as collapsed.

    A run has collapsed if it ended on non-finite numbers, or if the mean of a metric over its last
    steps is below a share of the highest mean over as many consecutive steps.
    """

    metric: str = Field("reward/mean", description="metric that falls")
    window: Annotated[float, Field(gt=0, le=0.5)] = Field(
        0.1, description="length of a stretch, as a share of the run's steps"
    )
    share: Share = Field(0.5, description="of the highest mean: below it the run has collapsed")
    least: NonNegativeFloat = Field(
        0.05, description="highest mean below which a run has not learnt, and cannot collapse"
    )

    behind: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.1,
        description="how far below the median of the reference arm's final accuracies a run that "
        "has not collapsed has fallen behind",
    )

    @field_validator("metric")
    @classmethod
    def known_metric(cls, metric: str) -> str:
        """Check that metrics.jsonl has a metric of this name."""
        check_metrics({metric: 0.0})
        return metric


class StartSection(Section):
    """The section `[start]`: supervised training before the runs, whose weights all arms share."""

    precision: Preset = Field("bf16", description="precision preset of the supervised training")
    kv: KVSetting | None = Field(
        None, description="its keys and values, as precision.kv; unset: the preset's"
    )
    bf16_rounding: BF16Rounding | None = Field(
        None, description="as precision.bf16_rounding; unset: the preset's"
    )
    pinned_sums: bool = Field(
        False,
        description="true: repeats to the bit on the same kind of card, as an exact plan does; "
        "bf16 and mixed do not otherwise on a GPU",
    )
    seed: NonNegative | None = Field(
        None, description="run.seed of one start for all seeds; unset: one start for each seed"
    )


class Arm(Section):
    """The keys of an arm other than settings."""

    label: str = Field("", description="name in plots and tables; empty: the arm's name")
    twin: bool | str = Field(
        False,
        description="true, or the name of a group: final weights equal to the other twins', bit "
        "for bit",
    )
    kill_after: list[Positive] = Field(
        default_factory=list,
        description="steps after which the run is killed (SIGKILL), to be resumed",
    )

    @field_validator("kill_after")
    @classmethod
    def ascending(cls, steps: list[int]) -> list[int]:
        """Check that the steps are in ascending order."""
        if steps != sorted(set(steps)):
            raise ValueError("steps in ascending order are expected, each one once")
        return steps


class Tables(Section):
    """The tables of a study file, with the settings of runs as they are written.

    Attributes:
        study: The section [study].
        settings: The settings of all runs, and the recipe below them.
        grid: The settings of each value, by the names of axis and value.
        arms: The own keys and the settings of each arm, by name.
        start: The own keys and the settings of the supervised start; None: there is none.
        eval: The section [eval].
        collapse: The section [collapse].
    """

    study: StudySection
    settings: Layer = Field(default_factory=dict)
    grid: dict[Name, dict[Name, Layer]] = Field(default_factory=dict)
    arms: dict[Name, Layer]
    start: Layer | None = None
    eval: EvalSection = EvalSection()
    collapse: CollapseSection = CollapseSection()
