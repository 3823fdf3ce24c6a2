"""The curves of a study: metrics over steps, with a line for each arm and a band over seeds.

The line is the mean, the band reaches from the lowest seed to the highest. A run that collapsed or
fell behind has a thin line of its own: it would hide in a mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from benchmarks.study.analysis import (
    ALL_POINTS,
    ArmResult,
    common_accuracy,
    lost_names,
    point_name,
    runs_of,
)
from benchmarks.study.definition import Definition
from benchmarks.study.plan import grid_points
from benchmarks.study.results import Curves, RunResult
from benchmarks.study.tables import accuracy_name
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import NullFormatter

from jetrl.runs.format import percent
from jetrl.runs.plots import COLORS, LINES, Chart, finish, legend_above, legend_columns

MISMATCH = "mismatch/k3_kl"
DASHES = ("-", "--", ":", "-.")
AXES_INCHES, LEGEND_ROW_INCHES = 2.2, 0.25  # height of a plot without its legend, and of its rows


@dataclass(frozen=True)
class CurveKind:
    """A plot of a metric over steps.

    Attributes:
        metric: The metric; "mean" of the run's own held-out evaluations.
    """

    key: str
    title: str
    metric: str
    unit: str
    log: bool = False


HELD_OUT = CurveKind("held_out", "Held-out accuracy while training", "mean", "share")
CURVES = (
    HELD_OUT,
    CurveKind("reward", "Training reward", "reward/mean", "reward"),
    CurveKind("length", "Response length", "response_length/mean", "tokens"),
    CurveKind("entropy", "Policy entropy", "policy/entropy", "nats"),
    CurveKind("grad_norm", "Gradient norm", "policy/grad_norm", "norm"),
    CurveKind(
        "mismatch", "Mean |log-prob difference|", "mismatch/mean_abs_logprob_diff", "nats", log=True
    ),
    CurveKind("k3_kl", "K3 KL of sampler and trainer", MISMATCH, "nats", log=True),
    CurveKind(
        "mult_prob_error", "Token mult prob error", "mismatch/token_mult_prob_error", "ratio"
    ),
)


def color_of(definition: Definition, arm: str) -> str:
    """Return the colour of an arm, the same in all plots of a study."""
    return COLORS[LINES[list(definition.arms).index(arm) % len(LINES)]]


def dash_of(definition: Definition, arm: str) -> str:
    """Return the line style of an arm: colours that come a second time are dashed."""
    return DASHES[list(definition.arms).index(arm) // len(LINES) % len(DASHES)]


def curve_charts(
    definition: Definition, runs: Sequence[RunResult], point: Mapping[str, str]
) -> list[Chart]:
    """Return the plots over steps of a grid point, of the metrics that its runs have."""
    by_arm = {arm: runs_of(runs, point, arm) for arm in definition.arms}
    lost = frozenset(lost_names(definition, runs))
    charts = (_curve_chart(definition, by_arm, kind, point, lost) for kind in CURVES)
    return [chart for chart in charts if chart is not None]


def _curve_chart(
    definition: Definition,
    by_arm: Mapping[str, Sequence[RunResult]],
    kind: CurveKind,
    point: Mapping[str, str],
    lost: frozenset[str],
) -> Chart | None:
    """Return the plot of a metric over steps at a grid point; None where no run has it."""
    bands = {}
    for arm, runs in by_arm.items():
        band = _band([curve_of(run, kind) for run in runs])
        if band is not None and not (kind.log and not np.nanmax(band[1], initial=0.0) > 0):
            bands[arm] = band
    if not bands:
        return None

    bottom, top = _limits(kind, [band[1] for band in bands.values()])

    def draw(axes: Axes) -> None:
        for arm, (steps, mean, low, high) in bands.items():
            color = color_of(definition, arm)
            if kind.log:
                mean, low = (np.where(line > 0, line, np.nan) for line in (mean, low))
            low = np.maximum(low, bottom)
            known = np.isfinite(low) & (high > low)
            axes.fill_between(steps, low, high, where=known, color=color, alpha=0.13, linewidth=0)
            for run in by_arm[arm]:
                if run.name in lost:
                    own = curve_of(run, kind)
                    axes.plot(*zip(*own.items(), strict=True), color=color, linewidth=0.8)
            axes.plot(
                steps,
                mean,
                color=color,
                linestyle=dash_of(definition, arm),
                label=definition.label(arm),
                linewidth=1.5,
                marker="o" if len(steps) <= 12 else "",
                markersize=3,
            )
        finish(axes, kind.unit, 1)
        legend_above(axes)
        if kind.log:
            axes.set_yscale("log")
            label_powers(axes.yaxis)
            axes.set_ylim(bottom, top)
        elif kind.unit == "share":
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")

    zero = [
        definition.label(arm)
        for arm, runs in by_arm.items()
        if kind.log and arm not in bands and any(kind.metric in r.curves.values for r in runs)
    ]
    last = [f"{definition.label(arm)} {_shown(band[1], kind.unit)}" for arm, band in bands.items()]
    caption = "at the end: " + ", ".join(last)
    if zero:
        caption += f"; exactly 0 throughout, not drawn: {', '.join(zero)}"
    key, name = "-".join([*point.values(), kind.key]), point_name(point)
    on_training_set = kind is HELD_OUT and definition.evaluates_training_set
    title = "Accuracy on the training set" if on_training_set else kind.title
    height = height_with_legend([definition.label(arm) for arm in bands])
    return Chart(key, title + f": {name}" * bool(name), caption, draw, height)


def _limits(kind: CurveKind, means: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the ends of a logarithmic axis, powers of ten around the means; else no ends."""
    if not kind.log:
        return -math.inf, math.inf
    positive = np.concatenate(means)
    positive = positive[positive > 0]
    low, high = math.floor(np.log10(positive.min())), math.ceil(np.log10(positive.max()))
    return 10.0**low, 10.0 ** max(high, low + 1)


def label_powers(axis: Axis) -> None:
    """Label a logarithmic axis at the powers of ten alone."""
    axis.set_major_formatter(lambda value, _: f"{value:.0e}")
    axis.set_minor_formatter(NullFormatter())


def _shown(means: np.ndarray, unit: str) -> str:
    """Return the last mean of a curve in words."""
    known = means[np.isfinite(means)]
    if not len(known):
        return "none"
    digits = 6 if unit == "ratio" else 3
    return percent(float(known[-1])) if unit == "share" else f"{known[-1]:.{digits}g}"


def curve_of(run: RunResult, kind: CurveKind) -> dict[int, float]:
    """Return the values of a run's curve by step."""
    curves: Curves = run.held_out if kind is HELD_OUT else run.curves
    values = curves.values.get(kind.metric, [])
    pairs = zip(curves.steps, values, strict=False)
    return {step: value for step, value in pairs if value is not None}


def _band(
    curves: Sequence[Mapping[int, float]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Return steps, and the mean, the lowest and the highest value at each; None without values."""
    steps = sorted({step for curve in curves for step in curve})
    if not steps:
        return None
    values = [[curve[step] for curve in curves if step in curve] for step in steps]
    rows = [
        (float(step), fmean(own), min(own), max(own))
        for step, own in zip(steps, values, strict=True)
    ]
    columns = np.array(rows).T
    return columns[0], columns[1], columns[2], columns[3]


def height_with_legend(names: Sequence[str]) -> float:
    """Return the height in inches of a plot with a legend above it."""
    rows = math.ceil(len(names) / legend_columns(names)) if len(names) > 1 else 0
    return AXES_INCHES + LEGEND_ROW_INCHES * rows


ROW_INCHES = 0.3  # height of a row of the plots that have a row for each arm


def accuracy_charts(
    definition: Definition, runs: Sequence[RunResult], results: Sequence[ArmResult]
) -> list[Chart]:
    """Return a plot of the final accuracy of each arm, seed by seed, for each grid point."""
    charts = []
    for point in grid_points(definition):
        name = point_name(point)
        rows = [r for r in results if r.point == name and r.common is not None]
        if rows:
            charts.append(_accuracy_chart(definition, runs, point, rows))
    return charts


def _accuracy_chart(
    definition: Definition,
    runs: Sequence[RunResult],
    point: Mapping[str, str],
    rows: Sequence[ArmResult],
) -> Chart:
    """Return the plot of the final accuracies at a grid point."""

    def draw(axes: Axes) -> None:
        for place, row in enumerate(rows):
            color = color_of(definition, row.arm)
            values = [common_accuracy(run) for run in runs_of(runs, point, row.arm)]
            known = [value for value in values if value is not None]
            axes.plot(known, [place] * len(known), "o", color=color, alpha=0.4, markersize=4)
            assert row.common is not None
            if math.isfinite(row.common.low):
                ends = [max(row.common.low, 0.0), min(row.common.high, 1.0)]
                axes.plot(ends, [place] * 2, color=color, linewidth=2)
            axes.plot([row.common.mean], [place], "D", color=color, markersize=5)
        _rows_of_arms(axes, definition, rows)

    name = point_name(point)
    title = accuracy_name(definition) + f": {name}" * bool(name)
    caption = "dots are seeds, lines the interval of the mean"
    key = "-".join([*point.values(), "accuracy"])
    return Chart(key, title, caption, draw, height=1.0 + ROW_INCHES * len(rows))


def difference_charts(definition: Definition, results: Sequence[ArmResult]) -> list[Chart]:
    """Return a plot of the differences from the reference arm for each grid point."""
    charts = []
    for point in dict.fromkeys(result.point for result in results):
        rows = [r for r in results if r.point == point and r.comparison is not None]
        if rows:
            charts.append(_difference_chart(definition, point, rows))
    return charts


def _difference_chart(definition: Definition, point: str, rows: Sequence[ArmResult]) -> Chart:
    """Return the plot of the differences from the reference arm at a grid point."""
    margin = definition.study.margin

    def draw(axes: Axes) -> None:
        axes.axvspan(-margin, margin, color=COLORS["green"], alpha=0.12, linewidth=0)
        axes.axvline(0, color=COLORS["axis"], linewidth=1)
        for place, row in enumerate(rows):
            assert row.comparison is not None
            interval, color = row.comparison.tests.difference, color_of(definition, row.arm)
            if math.isfinite(interval.low):
                ends = [max(interval.low, -1.0), min(interval.high, 1.0)]
                axes.plot(ends, [place] * 2, color=color, linewidth=2)
            axes.plot([interval.mean], [place], "D", color=color, markersize=5)
        _rows_of_arms(axes, definition, rows)

    caption = f"seed by seed; the green band is the margin of {percent(margin)}"
    title = f"Difference from {definition.label(definition.reference)}" + f": {point}" * bool(point)
    key = f"{point.replace(', ', '-').replace(ALL_POINTS, 'all')}-difference".lstrip("-")
    return Chart(key, title, caption, draw, height=1.0 + ROW_INCHES * len(rows))


def _rows_of_arms(axes: Axes, definition: Definition, rows: Sequence[ArmResult]) -> None:
    """Give a plot a row for each arm, the first above, and shares below."""
    axes.set_yticks(range(len(rows)), [definition.label(row.arm) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    axes.grid(axis="x")
