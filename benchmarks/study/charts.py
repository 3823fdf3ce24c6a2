"""The curves of a study: metrics over steps, with a line per arm and a band over seeds.

The line is the mean; the band ranges from the lowest to the highest seed. Lost runs are also drawn
as thin lines, because a mean would hide them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from benchmarks.study.analysis import lost_names, point_name, runs_of
from benchmarks.study.definition import Definition
from benchmarks.study.results import Curves, RunResult
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
    """Return the color of an arm, the same in all plots of a study."""
    return COLORS[LINES[list(definition.arms).index(arm) % len(LINES)]]


def dash_of(definition: Definition, arm: str) -> str:
    """Return the line style of an arm, which differs when colors repeat."""
    return DASHES[list(definition.arms).index(arm) // len(LINES) % len(DASHES)]


def curve_charts(
    definition: Definition, runs: Sequence[RunResult], point: Mapping[str, str]
) -> list[Chart]:
    """Return the plots of a grid point, one per metric that its runs have."""
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
    """Return the plot of a metric at a grid point; None if no run has it."""
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
    """Return the limits of a logarithmic axis, powers of ten around the means; else infinite."""
    if not kind.log:
        return -math.inf, math.inf
    positive = np.concatenate(means)
    positive = positive[positive > 0]
    low, high = math.floor(np.log10(positive.min())), math.ceil(np.log10(positive.max()))
    return 10.0**low, 10.0 ** max(high, low + 1)


def label_powers(axis: Axis) -> None:
    """Label a logarithmic axis only at powers of ten."""
    axis.set_major_formatter(lambda value, _: f"{value:.0e}")
    axis.set_minor_formatter(NullFormatter())


def _shown(means: np.ndarray, unit: str) -> str:
    """Return the last mean of a curve as text."""
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
    """Return steps, means, minima and maxima of curves; None without values."""
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
