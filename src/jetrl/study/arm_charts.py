"""The plots of a study that have a place for each arm: accuracies, differences and doses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from jetrl.runs.format import percent
from jetrl.runs.plot_style import COLORS, LINES, Chart
from jetrl.study.analysis import (
    ALL_POINTS,
    ArmResult,
    common_accuracy,
    mean_of_curve,
    point_name,
    runs_of,
)
from jetrl.study.charts import (
    MISMATCH,
    color_of,
    height_with_legend,
    label_powers,
    legend_above,
)
from jetrl.study.definition import Definition
from jetrl.study.lost import Loss, lost_names
from jetrl.study.plan import grid_points
from jetrl.study.results import RunResult
from jetrl.study.statistics import Interval, share_interval
from jetrl.study.tables import accuracy_name

ROW_INCHES = 0.3  # height of a row of the plots that have a row for each arm
_SEED: dict[str, Any] = {"alpha": 0.4, "markersize": 3}  # how a run is drawn beside a mean


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


@dataclass(frozen=True)
class _DosePlace:
    """The place of a dose in the plots of doses.

    Attributes:
        kl: The mean K3 KL of its runs.
        values: The final accuracy of each run that has one.
        rate: The share of runs that were lost, with its interval.
    """

    kl: float
    values: Sequence[float]
    rate: Interval


DoseLines = Mapping[str, Sequence[_DosePlace]]


def dose_charts(definition: Definition, runs: Sequence[RunResult]) -> list[Chart]:
    """Return plots of outcome and lost runs against the measured K3 KL, of arms that have a dose.

    There is a line for each grid point, and a place on it for each dose; in a grid of several axes
    each value of the first has plots of its own.

    Args:
        definition: The definition of the study.
        runs: The runs of the study.
    """
    arms = sorted(
        (name for name, arm in definition.arms.items() if arm.dose is not None),
        key=lambda name: definition.arms[name].dose or 0.0,
    )
    lost = lost_names(definition, runs)
    plots: dict[str, dict[str, list[_DosePlace]]] = {}
    for point in grid_points(definition):
        names = list(point.values())
        plot, line = (names[0], ", ".join(names[1:])) if len(names) > 1 else ("", point_name(point))
        places = [_dose_place(definition, runs_of(runs, point, arm), lost) for arm in arms]
        known = [place for place in places if place is not None]
        if known:
            plots.setdefault(plot, {})[line or "runs"] = known
    charts = []
    for plot, lines in plots.items():
        charts += [_dose_accuracy_chart(plot, lines), _dose_lost_chart(plot, lines)]
    return charts


def _dose_place(
    definition: Definition, runs: Sequence[RunResult], lost: Mapping[str, Loss]
) -> _DosePlace | None:
    """Return the place of the runs of a dose; None without runs."""
    kls = [kl for run in runs if (kl := mean_of_curve(run, MISMATCH)) is not None]
    values = [value for run in runs if (value := common_accuracy(run)) is not None]
    if not kls:
        return None
    count = sum(run.name in lost for run in runs)
    return _DosePlace(fmean(kls), values, share_interval(count, len(runs), definition.study.level))


def _dose_accuracy_chart(plot: str, lines: DoseLines) -> Chart:
    """Return the plot of final accuracies by mismatch, with a dot for each seed."""

    def draw(axes: Axes) -> None:
        for x, places, color, name in _drawn(lines):
            means = [fmean(place.values) if place.values else math.nan for place in places]
            axes.plot(x, means, color=color, label=name, marker="D", markersize=4, linewidth=1.3)
            for at, place in zip(x, places, strict=True):
                axes.plot([at] * len(place.values), place.values, "o", color=color, **_SEED)
        _finish_doses(axes, lines)

    return Chart(
        "-".join(filter(None, ["dose-accuracy", plot])),
        "Final accuracy by mismatch" + f": {plot}" * bool(plot),
        "against the mean K3 KL of sampler and trainer, by dose; dots are seeds",
        draw,
        height_with_legend(list(lines)),
    )


def _dose_lost_chart(plot: str, lines: DoseLines) -> Chart:
    """Return the plot of the shares of runs that were lost by mismatch, with their intervals."""

    def draw(axes: Axes) -> None:
        for x, places, color, name in _drawn(lines):
            rates = [place.rate for place in places]
            means = np.array([rate.mean for rate in rates])
            ends = [means - [rate.low for rate in rates], [rate.high for rate in rates] - means]
            axes.plot(x, means, color=color, label=name, marker="D", markersize=4, linewidth=1.3)
            axes.errorbar(x, means, ends, fmt="none", ecolor=color, elinewidth=0.8, alpha=0.6)
        _finish_doses(axes, lines)
        axes.set_ylim(-0.04, 1.04)

    return Chart(
        "-".join(filter(None, ["dose-lost", plot])),
        "Runs lost by mismatch" + f": {plot}" * bool(plot),
        "against the mean K3 KL of sampler and trainer, by dose; bars are exact intervals",
        draw,
        height_with_legend(list(lines)),
    )


def _drawn(
    lines: DoseLines,
) -> Iterator[tuple[list[float], list[_DosePlace], str, str]]:
    """Yield the places of each line from left to right, with their x, colour and name.

    Lines stand a little beside each other, since their doses are the same.
    """
    zero, _ = _dose_ends(lines)
    for number, (name, places) in enumerate(lines.items()):
        ordered = sorted(places, key=lambda place: place.kl)
        aside = 1.12 ** (number - (len(lines) - 1) / 2)
        x = [max(place.kl, zero) * aside for place in ordered]
        yield x, ordered, COLORS[LINES[number % len(LINES)]], name


def _dose_ends(lines: DoseLines) -> tuple[float, float]:
    """Return where a K3 KL of 0 stands, a power of ten below all others, and the right end."""
    kls = [place.kl for places in lines.values() for place in places if place.kl > 0] or [1e-6]
    return 10.0 ** (math.floor(math.log10(min(kls))) - 1), 10.0 ** math.ceil(math.log10(max(kls)))


def _finish_doses(axes: Axes, lines: DoseLines) -> None:
    """Give a plot of doses its axes, with a place for 0, and a legend."""
    zero, right = _dose_ends(lines)
    axes.set_xscale("log")
    label_powers(axes.xaxis)
    powers = [10.0**power for power in range(round(math.log10(zero)), round(math.log10(right)) + 1)]
    axes.set_xticks(powers, ["0", *(f"{power:.0e}" for power in powers[1:])])
    axes.set_xlim(zero / 2, max(right, 10 * zero) * 1.5)
    axes.set_xlabel("K3 KL, nats")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    legend_above(axes, list(lines))
