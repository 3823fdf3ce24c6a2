"""The plots of a study that have a place for each arm: accuracies, differences and doses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes

from jetrl.runs.format import percent
from jetrl.runs.plot_style import COLORS, LINES, Chart
from jetrl.study.analysis import (
    ALL_POINTS,
    ArmResult,
    common_accuracy,
    has_collapsed,
    mean_of_curve,
    point_name,
    runs_of,
)
from jetrl.study.charts import MISMATCH, color_of, label_powers
from jetrl.study.definition import Definition
from jetrl.study.plan import grid_points
from jetrl.study.results import RunResult
from jetrl.study.statistics import Interval, mean_interval, share_interval

ROW_INCHES = 0.3  # height of a row of the plots that have a row for each arm


def accuracy_charts(
    definition: Definition, runs: Sequence[RunResult], results: Sequence[ArmResult]
) -> list[Chart]:
    """Return a plot of the final accuracy of each arm, seed by seed, for each grid point.

    Args:
        definition: The definition of the study.
        runs: The runs of the study.
        results: The results of its arms.
    """
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
    title = "Final held-out accuracy" + f": {name}" * bool(name)
    caption = "dots are seeds, lines the interval of the mean"
    key = "-".join([*point.values(), "accuracy"])
    return Chart(key, title, caption, draw, height=1.0 + ROW_INCHES * len(rows))


def difference_charts(definition: Definition, results: Sequence[ArmResult]) -> list[Chart]:
    """Return a plot of the differences from the reference arm for each grid point.

    Args:
        definition: The definition of the study.
        results: The results of its arms.
    """
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
            interval, color = row.comparison.difference, color_of(definition, row.arm)
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


def dose_charts(definition: Definition, runs: Sequence[RunResult]) -> list[Chart]:
    """Return plots of outcome and collapse against the measured K3 KL, of arms that have a dose.

    There is a line for each grid point, and a place on it for each dose.

    Args:
        definition: The definition of the study.
        runs: The runs of the study.
    """
    arms = sorted(
        (name for name, arm in definition.arms.items() if arm.dose is not None),
        key=lambda name: definition.arms[name].dose or 0.0,
    )
    lines = {}
    for point in grid_points(definition):
        places = [_dose_place(definition, runs_of(runs, point, arm)) for arm in arms]
        known = [place for place in places if place is not None]
        if known:
            lines[point_name(point) or "runs"] = known
    if not lines:
        return []
    about = "against the mean K3 KL of sampler and trainer, by dose; 0 stands at the left edge"
    return [
        _dose_chart(lines, 1, Chart("dose-accuracy", "Final accuracy by mismatch", about, _none)),
        _dose_chart(lines, 4, Chart("dose-collapse", "Collapses by mismatch", about, _none)),
    ]


def _none(axes: Axes) -> None:
    """Draw nothing."""


def _dose_place(definition: Definition, runs: Sequence[RunResult]) -> tuple[float, ...] | None:
    """Return K3 KL, accuracy and collapse rate of a dose, each with its ends; None without runs.

    They are kl, accuracy, low, high, collapse rate, low, high.
    """
    kls = [kl for run in runs if (kl := mean_of_curve(run, MISMATCH)) is not None]
    values = [value for run in runs if (value := common_accuracy(run)) is not None]
    if not kls:
        return None
    level = definition.study.level
    nothing = Interval(math.nan, math.nan, math.nan, 0)  # all runs ended without weights
    accuracy = mean_interval(values, level) if values else nothing
    fallen = sum(has_collapsed(run, definition.collapse) for run in runs)
    rate = share_interval(fallen, len(runs), level)
    return (
        fmean(kls),
        *(accuracy.mean, accuracy.low, accuracy.high),
        *(rate.mean, rate.low, rate.high),
    )


def _dose_chart(
    lines: Mapping[str, Sequence[tuple[float, ...]]], column: int, chart: Chart
) -> Chart:
    """Return a plot of one column of `_dose_place` with its ends, against the K3 KL."""
    kls = [place[0] for places in lines.values() for place in places]
    least = min((kl for kl in kls if kl > 0), default=1e-6)

    def draw(axes: Axes) -> None:
        for number, (name, places) in enumerate(lines.items()):
            color = COLORS[LINES[number % len(LINES)]]
            x = np.maximum([place[0] for place in places], least / 3)
            mean, low, high = (np.array([p[column + i] for p in places]) for i in range(3))
            order = np.argsort(x)
            low, high = np.maximum(low, 0.0), np.minimum(high, 1.0)
            ends = np.nan_to_num(np.abs([mean - low, high - mean]))[:, order]
            axes.errorbar(
                x[order],
                mean[order],
                ends,
                color=color,
                label=name,
                marker="o",
                markersize=4,
                linewidth=1.3,
                elinewidth=0.9,
            )
        axes.set_xscale("log")
        label_powers(axes.xaxis)
        left = 10.0 ** math.floor(math.log10(least / 3))
        right = 10.0 ** math.ceil(math.log10(max(*kls, least) * 1.01))
        axes.set_xlim(left, right)
        axes.set_xlabel("K3 KL, nats")
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
        if len(lines) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0.2)

    return Chart(chart.key, chart.title, chart.caption, draw, height=2.9)
