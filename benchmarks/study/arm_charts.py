"""The plots of a study that have a place for each arm: accuracies and differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.study.analysis import (
    ALL_POINTS,
    ArmResult,
    common_accuracy,
    point_name,
    runs_of,
)
from benchmarks.study.charts import color_of
from benchmarks.study.definition import Definition
from benchmarks.study.plan import grid_points
from benchmarks.study.results import RunResult
from benchmarks.study.tables import accuracy_name
from matplotlib.axes import Axes

from jetrl.runs.format import percent
from jetrl.runs.plots import COLORS, Chart

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
    title = accuracy_name(definition) + f": {name}" * bool(name)
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
