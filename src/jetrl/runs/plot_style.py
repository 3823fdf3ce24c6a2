"""The style of a run's plots, and their two forms: a PNG, and SVG inside the report.

The SVG is drawn in the colours of the light page; each colour is then replaced by the CSS variable
of the same meaning, so one drawing follows the reader's light or dark setting.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

Records = Sequence[dict[str, Any]]

COLORS = {
    "text": "#475063",
    "axis": "#9aa3b2",
    "grid": "#e6e9ef",
    "blue": "#3567e8",
    "green": "#12936f",
    "amber": "#d48a12",
    "violet": "#7c55d9",
    "pink": "#c74b86",
    "slate": "#71809a",
    "red": "#d23f3f",
    "teal": "#1a9fb5",
    "brown": "#8a5a36",
}
LINES = ("blue", "amber", "green", "violet", "pink", "slate", "teal", "brown")
SIZE_INCHES = (5.4, 2.5)
PNG_DPI = 160
MAX_POINTS = 400
SMOOTH_FROM = 40
MOST_DRAWN = 1e100  # sums and squares of such values are finite

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "axes.edgecolor": COLORS["axis"],
    "axes.labelcolor": COLORS["text"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.unicode_minus": False,
    "grid.color": COLORS["grid"],
    "text.color": COLORS["text"],
    "xtick.color": COLORS["text"],
    "ytick.color": COLORS["text"],
    "ytick.left": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "text.parse_math": False,
}


@dataclass(frozen=True)
class Chart:
    """A plot.

    Attributes:
        key: The plot's file name, without an ending.
    """

    key: str
    title: str
    caption: str
    draw: Callable[[Axes], None]
    height: float = SIZE_INCHES[1]


def to_png(chart: Chart, path: Path) -> None:
    """Draw a chart, with its title, as a PNG on white."""
    with mpl.rc_context(STYLE):
        figure, axes = _figure(chart)
        figure.suptitle(chart.title, x=0.02, ha="left", fontsize=11, fontweight="bold")
        chart.draw(axes)
        figure.savefig(path, format="png", dpi=PNG_DPI, facecolor="white")


def to_svg(chart: Chart) -> str:
    """Return a chart as an SVG element for an HTML page.

    The page defines the colour variables `--plot-text`, `--plot-blue` and so on (the keys of
    COLORS).
    """
    with mpl.rc_context({**STYLE, "svg.hashsalt": f"jetrl {chart.key}"}):
        figure, axes = _figure(chart)
        chart.draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    for name, color in COLORS.items():
        svg = svg.replace(f": {color}", f": var(--plot-{name})")
    return svg.strip()


def _figure(chart: Chart) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(SIZE_INCHES[0], chart.height), layout="constrained")
    return figure, figure.add_subplot()


def series(records: Records, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values of a metric, float64, what cannot be drawn as gaps."""
    having = [r for r in records if name in r]
    steps = np.array([r["step"] for r in having], dtype=np.float64)
    return steps, drawable([r[name] for r in having])


def drawable(values: Sequence[float]) -> np.ndarray:
    """Return values as float64, with NaN in place of infinities and of values above 1e100."""
    array = np.array([float(value) for value in values], dtype=np.float64)
    return np.where(np.abs(array) < MOST_DRAWN, array, np.nan)


def line(axes: Axes, steps: np.ndarray, values: np.ndarray, label: str, color: str) -> None:
    """Draw a line through a metric: thinned if very long, with a moving mean if long."""
    steps, values = thin(steps, values)
    if len(steps) >= SMOOTH_FROM and len(np.unique(values)) > 1:  # a mean of equals has noise
        axes.plot(steps, values, color=color, alpha=0.28, linewidth=1.0)
        axes.plot(steps, moving_mean(values, max(2, len(steps) // 32)), color=color, label=label)
    else:
        marker = "o" if len(steps) <= 30 else ""
        axes.plot(steps, values, color=color, label=label, marker=marker, markersize=3.2)


def finish(axes: Axes, unit: str, num_lines: int = 1) -> None:
    """Give a chart whole steps below, the unit at the side."""
    whole = MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)
    axes.xaxis.set_major_locator(whole)
    left, right = axes.dataLim.intervalx
    if left == right:
        axes.set_xlim(left - 1, right + 1)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.margins(x=0.02)
    if unit == "tokens/s":
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    if unit == "share":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.3g}%"))
        axes.set_ylabel("")
    if num_lines > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0.2)


def thin(
    steps: np.ndarray, values: np.ndarray, how: Callable[..., Any] = np.nanmean
) -> tuple[np.ndarray, np.ndarray]:
    """Return at most MAX_POINTS points: neighbours are joined."""
    if len(steps) <= MAX_POINTS:
        return steps, values
    groups = np.array_split(np.arange(len(steps)), MAX_POINTS)
    joined = [how(values[g]) if np.isfinite(values[g]).any() else math.nan for g in groups]
    return np.array([steps[g].mean() for g in groups]), np.array(joined)


def moving_mean(values: np.ndarray, radius: int) -> np.ndarray:
    """Return the mean over each value and `radius` neighbours on both sides, without gaps.

    Near the ends the radius shrinks, so that the curve begins and ends at the measured values.
    """
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    nums = np.concatenate([[0], np.cumsum(known)])
    index = np.arange(len(values))
    reach = np.minimum(radius, np.minimum(index, index[::-1]))
    low, high = index - reach, index + reach + 1
    num = nums[high] - nums[low]
    empty = np.full(len(values), math.nan)
    return np.divide(sums[high] - sums[low], num, out=empty, where=num > 0)
