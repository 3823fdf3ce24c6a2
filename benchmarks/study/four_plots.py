"""Draw reward, held-out accuracy, K3 KL and gradient norm over the steps of a study, in one row.

    python -m benchmarks.study.four_plots benchmarks/results/study/NAME.json --out FILE.svg
    python -m benchmarks.study.four_plots ... --arms int8 bf16 mixed --point GRID_VALUE ...

A line is the mean over seeds, a band the 95% interval of that mean. Reward and gradient norm are
moving means of five points. The KL has a dot for each mean, on a logarithmic axis with a line for 0
below its powers.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
import numpy as np
from benchmarks.study.analysis import point_name
from benchmarks.study.charts import CURVES, HELD_OUT, CurveKind, curve_of
from benchmarks.study.definition import definition_of
from benchmarks.study.results import RunResult, read_results
from benchmarks.study.statistics import mean_interval
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter

from jetrl.errors import UserError
from jetrl.runs.plots import COLORS, STYLE

KINDS = {kind.key: kind for kind in CURVES}
TITLES = {"reward": "Reward", "held_out": "Held-out accuracy"}
TITLES |= {"k3_kl": "K3 KL, sampler to trainer", "grad_norm": "Gradient norm"}
LABELS = {
    "int8": "int8: eight bits, exact",
    "unified": "unified: FP8, exact",
    "mixed": "mixed: FP8 sampler, BF16 trainer",
}
LINES = ("blue", "slate", "amber", "green", "violet", "pink", "teal", "brown")
RADIUS = 2  # points on both sides in a moving mean
POWERS = 8  # of ten, at most, on the KL's axis; what is below them is drawn as 0
Arms = Mapping[str, Sequence[RunResult]]


def runs_by_arm(runs: Sequence[RunResult], point: Sequence[str], arms: Sequence[str]) -> Arms:
    """Return the runs of each arm at the grid point with these values."""
    at = [run for run in runs if {*point} <= {*run.point.values()}]
    points = sorted({point_name(run.point) for run in at or runs})
    if not at or len(points) > 1:
        raise UserError(f"--point {' '.join(point)}: single out one of: {'; '.join(points)}")
    found = {arm: [run for run in at if run.arm == arm] for arm in arms}
    if missing := [arm for arm, own in found.items() if not own]:
        there = ", ".join(sorted({run.arm for run in at}))
        raise UserError(f"--arms {missing[0]}: no run of this arm; there are {there}")
    return found


def moving_mean(curve: dict[int, float]) -> dict[int, float]:
    values, last = [*curve.values()], len(curve) - 1
    reach = [min(RADIUS, i, last - i) for i in range(last + 1)]
    return {s: fmean(values[i - reach[i] : i + reach[i] + 1]) for i, s in enumerate(curve)}


def draw_plot(axes: Axes, kind: CurveKind, arms: Arms) -> None:
    zero = 0.0
    lines: dict[str, np.ndarray] = {}  # [4, points] of each arm: step, mean, interval
    for arm, runs in arms.items():
        curves = [curve_of(run, kind) for run in runs]
        if not kind.log and kind is not HELD_OUT:
            curves = [moving_mean(curve) for curve in curves]
        found = {
            step: mean_interval([curve[step] for curve in curves if step in curve], 0.95)
            for step in sorted({step for curve in curves for step in curve})
        }
        lines[arm] = np.array([(step, f.mean, f.low, f.high) for step, f in found.items()]).T
    if kind.log:
        zero = log_axis(axes, np.concatenate([line[1] for line in lines.values()]))
        exact = {arm: own for arm, own in arms.items() if not any(r.different_tokens for r in own)}
        tokens = sum(run.compared_tokens for own in exact.values() for run in own)
        words = f"{', '.join(exact)}: 0 of {tokens / 1e6:.1f}M tokens differ" if exact else ""
        axes.annotate(words, (0, zero), (2, 3), textcoords="offset points", fontsize=7.5)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    for place, (arm, (steps, means, low, high)) in enumerate(lines.items()):
        color = COLORS[LINES[place % len(LINES)]]
        style: dict[str, Any] = {"color": color, "zorder": 9 - place, "label": arm}
        if kind.log:
            axes.plot(steps, np.where(means < 10 * zero, zero, means), "o", ms=2, **style)
        else:
            axes.fill_between(steps, low, high, color=color, alpha=0.15, lw=0)
            axes.plot(steps, means, marker="o" if len(steps) <= 12 else "", ms=3.5, **style)
    if kind is HELD_OUT:
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_title(TITLES[kind.key], loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.margins(x=0.02)


def log_axis(axes: Axes, means: np.ndarray) -> float:
    """Give the axis powers of ten and, two powers below them, a 0; return where it is drawn."""
    positive = means[means > 0] if means.any() else np.array([1e-8])
    top = math.ceil(math.log10(positive.max()))
    bottom = max(math.floor(math.log10(positive.min())), top - POWERS)
    powers = range(top, bottom - 1, -2 if top - bottom > 4 else -1)
    zero = 10.0 ** (bottom - 2)
    axes.set(yscale="log", ylim=(zero / 4, 10.0**top))
    axes.set_yticks([zero, *(10.0**p for p in powers)], ["0", *(f"1e{p}" for p in powers)])
    axes.yaxis.set_minor_locator(NullLocator())
    return zero


def draw(arms: Arms, labels: Mapping[str, str], out: Path) -> None:
    with mpl.rc_context({**STYLE, "svg.hashsalt": "jetrl four_plots"}):
        figure = Figure(figsize=(10.0, 2.5), layout="constrained")
        for axes, key in zip(figure.subplots(1, len(TITLES)), TITLES, strict=True):
            draw_plot(axes, KINDS[key], arms)
        handles, names = axes.get_legend_handles_labels()
        shown = [LABELS.get(name, labels[name]) for name in names]
        figure.legend(handles, shown, loc="outside upper left", ncols=len(names))
        seeds = " or ".join(map(str, sorted({len(runs) for runs in arms.values()})))
        about: dict[str, Any] = {"ha": "right", "va": "top", "fontsize": 8}
        figure.text(0.995, 0.965, f"mean of {seeds} seeds, 95% interval", **about)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, format="svg", facecolor="white", metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study.four_plots")
    parser.add_argument("results", type=Path, help="results of a study")
    parser.add_argument("--arms", nargs="+", default=["int8", "bf16", "mixed"])
    parser.add_argument("--point", nargs="+", default=[], metavar="GRID_VALUE")
    parser.add_argument("--out", type=Path, required=True, help="SVG file")
    args = parser.parse_args(argv)
    results = read_results(args.results)
    arms = runs_by_arm([*results.runs.values()], args.point, args.arms)
    definition = definition_of(results.definition, args.results)
    draw(arms, {arm: definition.label(arm) for arm in arms}, args.out)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
