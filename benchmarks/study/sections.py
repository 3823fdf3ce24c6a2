"""The sections of a study file: every key, with its type, range and meaning.

Settings of runs, which stand in [settings], [grid], [arms] and [start], are not read here.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from jetrl.presets import KVSetting, Preset
from jetrl.runs.metrics import check_metrics
from jetrl.settings.section import Mass, NonNegative, NonNegativeFloat, Positive, Section, Share

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_+][A-Za-z0-9_+.-]*$", max_length=40)]
"""The name of a study, an arm, an axis or a value: it becomes part of a folder's name."""
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
    prompts: NonNegative = Field(256, description="held-out prompts, from the start; 0: all")
    samples: Positive = Field(4, description="completions a prompt")
    temperature: NonNegativeFloat = Field(1.0, description="0: greedy, with samples = 1")
    top_p: Mass = Field(1.0, description="keep the most probable tokens up to this mass; 1: all")
    seed: NonNegative = Field(0, description="fixes every draw of the evaluation")
    own: bool = Field(True, description="evaluate each run in its own precision as well")

    @model_validator(mode="after")
    def draws_differ(self) -> Self:
        """Check that several completions of a prompt can differ."""
        if self.temperature == 0 and self.samples > 1:
            raise ValueError("temperature = 0 draws the same completion each time; set samples = 1")
        return self


class CollapseSection(Section):
    """The section `[collapse]`: the rule by which a run counts as collapsed.

    A run has collapsed if it ended on numbers that are not finite, or if the mean of a metric over
    the last stretch of its steps is below a share of the highest mean over any stretch as long.
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
    pinned_sums: bool = Field(
        False,
        description="true: repeats to the bit on the same kind of card, as an exact plan does; "
        "bf16 and mixed do not otherwise on a GPU",
    )
    seed: NonNegative | None = Field(
        None, description="run.seed of one start for all seeds; unset: one start for each seed"
    )


class Arm(Section):
    """The keys of an arm beside the settings of the runs."""

    label: str = Field("", description="name in plots and tables; empty: the arm's name")
    dose: float | None = Field(None, description="size of a deviation, for the plots of doses")
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
