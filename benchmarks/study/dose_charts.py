"""The plots of a study of doses: accuracy and lost runs against the mismatch that was measured.

Arms with a dose make a line. Arms without one, whose sampler deviates in another way, stand beside
it, each kind with a mark of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.study.analysis import common_accuracy, mean_of_curve, point_name, runs_of
from benchmarks.study.charts import MISMATCH, height_with_legend, label_powers, legend_above
from benchmarks.study.definition import Definition
from benchmarks.study.lost import Loss, lost_names
from benchmarks.study.plan import grid_points
from benchmarks.study.results import RunResult
from benchmarks.study.statistics import Interval, share_interval
from matplotlib.axes import Axes

from jetrl.runs.plots import COLORS, LINES, Chart

_SEED: dict[str, Any] = {"alpha": 0.4, "markersize": 3}  # how a run is drawn beside a mean
_MARKS = ("s", "^", "v", "P", "X", "*")


@dataclass(frozen=True)
class _Place:
    """The runs of one arm at one grid point, as the plots have them.

    Attributes:
        kl: Their mean K3 KL.
        values: The final accuracy of each run that has one.
        rate: The share of runs that were lost, with its interval.
    """

    kl: float
    values: Sequence[float]
    rate: Interval

    @property
    def mean(self) -> float:
        """The mean of the final accuracies, NaN without any."""
        return fmean(self.values) if self.values else math.nan


@dataclass(frozen=True)
class _Line:
    """A grid point, as a plot has it.

    Attributes:
        name: The name of the line.
        doses: The places of arms with a dose, by mismatch.
        others: Those of arms without one, by label.
    """

    name: str
    doses: Sequence[_Place]
    others: Mapping[str, _Place]

    @property
    def places(self) -> list[_Place]:
        """All places."""
        return [*self.doses, *self.others.values()]


def dose_charts(definition: Definition, runs: Sequence[RunResult]) -> list[Chart]:
    """Return plots of outcome and lost runs against the measured K3 KL, where arms have a dose.

    There is a line for each grid point, and a place on it for each dose; in a grid of several axes
    each value of the first has plots of its own.

    Args:
        definition: The definition of the study.
        runs: The runs of the study.
    """
    lost = lost_names(definition, runs)
    plots: dict[str, list[_Line]] = {}
    for point in grid_points(definition):
        doses: list[_Place] = []
        others: dict[str, _Place] = {}
        for arm, section in definition.arms.items():
            place = _place(definition, runs_of(runs, point, arm), lost)
            if place is not None and section.dose is not None:
                doses.append(place)
            elif place is not None and place.kl > 0:
                others[definition.label(arm)] = place
        names = list(point.values())
        plot, line = (names[0], ", ".join(names[1:])) if len(names) > 1 else ("", point_name(point))
        if doses or others:
            ordered = sorted(doses, key=lambda place: place.kl)
            plots.setdefault(plot, []).append(_Line(line or "runs", ordered, others))
    charts = []
    for plot, lines in plots.items():
        if any(line.doses for line in lines):
            charts += [_accuracy_chart(plot, lines), _lost_chart(plot, lines)]
    return charts


def _place(
    definition: Definition, runs: Sequence[RunResult], lost: Mapping[str, Loss]
) -> _Place | None:
    """Return the place of the runs of an arm; None without runs."""
    kls = [kl for run in runs if (kl := mean_of_curve(run, MISMATCH)) is not None]
    values = [value for run in runs if (value := common_accuracy(run)) is not None]
    if not kls:
        return None
    count = sum(run.name in lost for run in runs)
    return _Place(fmean(kls), values, share_interval(count, len(runs), definition.study.level))


def _accuracy_chart(plot: str, lines: Sequence[_Line]) -> Chart:
    """Return the plot of final accuracies by mismatch, with a dot for each seed."""

    def draw(axes: Axes) -> None:
        for x, place, color in _draw(axes, lines, lambda place: place.mean):
            axes.plot([x] * len(place.values), place.values, "o", color=color, **_SEED)

    return _chart("accuracy", "Final accuracy", "dots are seeds", plot, lines, draw)


def _lost_chart(plot: str, lines: Sequence[_Line]) -> Chart:
    """Return the plot of the shares of runs that were lost by mismatch, with their intervals."""

    def draw(axes: Axes) -> None:
        for x, place, color in _draw(axes, lines, lambda place: place.rate.mean):
            ends = [place.rate.low, place.rate.high]
            axes.plot([x, x], ends, color=color, linewidth=0.8, alpha=0.6)
        axes.set_ylim(-0.04, 1.04)

    return _chart("lost", "Runs lost", "bars are exact intervals", plot, lines, draw)


def _chart(
    key: str,
    title: str,
    caption: str,
    plot: str,
    lines: Sequence[_Line],
    draw: Callable[[Axes], None],
) -> Chart:
    """Return a plot by mismatch from a key, a title, a caption and a function that draws it."""
    return Chart(
        "-".join(filter(None, ["dose", key, plot])),
        f"{title} by mismatch" + f": {plot}" * bool(plot),
        f"against the mean K3 KL of sampler and trainer; {caption}",
        draw,
        height_with_legend(_legend(lines)),
    )


def _draw(
    axes: Axes, lines: Sequence[_Line], height: Callable[[_Place], float]
) -> list[tuple[float, _Place, str]]:
    """Draw lines, single marks and the axes; return each place with its x and colour.

    Lines stand a little beside each other, since their doses are the same.

    Args:
        axes: The axes.
        lines: What is drawn.
        height: Returns how high a place is.
    """
    zero, right = _ends(lines)
    labels = _other_labels(lines)
    drawn = []
    for number, line in enumerate(lines):
        color = COLORS[LINES[number % len(LINES)]]
        aside = 1.12 ** (number - (len(lines) - 1) / 2)
        at = [max(place.kl, zero) * aside for place in line.places]
        doses, heights = len(line.doses), [height(place) for place in line.places]
        axes.plot(
            at[:doses], heights[:doses], color=color, label=line.name,
            marker="D", markersize=4, linewidth=1.3,
        )  # fmt: skip
        for x, y, label in zip(at[doses:], heights[doses:], line.others, strict=True):
            mark = _MARKS[labels.index(label) % len(_MARKS)]
            axes.plot([x], [y], mark, color=color, markersize=7, markerfacecolor="none")
        drawn += [(x, place, color) for x, place in zip(at, line.places, strict=True)]
    for number, label in enumerate(labels):
        mark = _MARKS[number % len(_MARKS)]
        axes.plot([], [], mark, color=COLORS["text"], label=label, markerfacecolor="none")
    axes.set_xscale("log")
    label_powers(axes.xaxis)
    powers = [10.0**power for power in range(round(math.log10(zero)), round(math.log10(right)) + 1)]
    axes.set_xticks(powers, ["0", *(f"{power:.0e}" for power in powers[1:])])
    axes.set_xlim(zero / 2, max(right, 10 * zero) * 1.5)
    axes.set_xlabel("K3 KL, nats")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    legend_above(axes, _legend(lines))
    return drawn


def _other_labels(lines: Sequence[_Line]) -> list[str]:
    """Return the labels of the arms without a dose."""
    return list(dict.fromkeys(label for line in lines for label in line.others))


def _legend(lines: Sequence[_Line]) -> list[str]:
    """Return the entries of the legend."""
    return [*(line.name for line in lines), *_other_labels(lines)]


def _ends(lines: Sequence[_Line]) -> tuple[float, float]:
    """Return where a K3 KL of 0 stands, a power of ten below all others, and the right end."""
    kls = [place.kl for line in lines for place in line.places if place.kl > 0] or [1e-6]
    return 10.0 ** (math.floor(math.log10(min(kls))) - 1), 10.0 ** math.ceil(math.log10(max(kls)))
