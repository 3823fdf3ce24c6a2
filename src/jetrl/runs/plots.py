"""Plots of runs from metrics.jsonl, as PNG files and as SVG in the report.

SVG colors are CSS variables, so that a plot follows the page's light or dark theme.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from jetrl.errors import UserError
from jetrl.runs.directory import RunDirectory
from jetrl.runs.format import clip, count, labels, number, percent, visible
from jetrl.runs.history import in_phase, values_of
from jetrl.runs.metrics import find_metric, is_eval_mean, is_share
from jetrl.runs.storage import Record

Records = Sequence[dict[str, Any]]

DEFAULT_METRICS = (
    *("reward/mean", "eval", "response_length/mean", "policy/entropy"),
    *("mismatch/mean_abs_logprob_diff", "timing/step_s"),
)
_ACCURACIES = {
    f"{pairs}/{name}": words
    for pairs in ("reward_model", "dpo")
    for name, words in {"accuracy": "of the update", "eval_accuracy": "eval"}.items()
}
SUPERVISED_METRICS = ("sft/loss", *_ACCURACIES, "sft/grad_norm")
PANEL_INCHES = (5.2, 2.9)

# Colors for light and dark pages.
PALETTE = {
    "text": ("#475063", "#a7b0c0"),
    "axis": ("#9aa3b2", "#667085"),
    "grid": ("#e6e9ef", "#262c38"),
    "blue": ("#3567e8", "#7aa2ff"),
    "green": ("#12936f", "#3fcf9e"),
    "amber": ("#d48a12", "#f0b349"),
    "violet": ("#7c55d9", "#ab8ff5"),
    "pink": ("#c74b86", "#ee7fb4"),
    "slate": ("#71809a", "#94a3b8"),
    "red": ("#d23f3f", "#ff7b72"),
    "teal": ("#1a9fb5", "#4cc9dc"),
    "brown": ("#8a5a36", "#c79a73"),
}
COLORS = {name: light for name, (light, _) in PALETTE.items()}
LINES = ("blue", "amber", "green", "violet", "pink", "slate", "teal", "brown")
SIZE_INCHES = (4.4, 2.3)  # the width of a report column, so that text keeps its size
PNG_DPI = 200
MAX_POINTS = 400
SMOOTH_FROM = 40
MOST_DRAWN = 1e100  # sums and squares of values up to this are finite

STYLE: dict[Any, Any] = {
    **{"font.size": 9, "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"]},
    **{"axes.edgecolor": COLORS["axis"], "axes.labelcolor": COLORS["text"]},
    **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
    **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True},
    **{"axes.unicode_minus": False, "text.parse_math": False, "svg.fonttype": "none"},
    **{f"{name}.color": COLORS["text"] for name in ("text", "xtick", "ytick")},
    **{"grid.color": COLORS["grid"], "ytick.left": False},
    **{"legend.frameon": False, "legend.fontsize": 8},
    **{"lines.linewidth": 1.8, "lines.solid_capstyle": "round"},
}
CHART_STYLE: dict[Any, Any] = {**STYLE, "font.size": 12, "legend.fontsize": 12}


@dataclass(frozen=True)
class Chart:
    """A plot; `key` is the file name without extension."""

    key: str
    title: str
    caption: str
    draw: Callable[[Axes], None]
    height: float = SIZE_INCHES[1]


ChartOf = Callable[[Records], Chart | None]


def to_png(chart: Chart, path: Path) -> None:
    """Save a chart with its title as a PNG on white."""
    with mpl.rc_context(CHART_STYLE):
        figure, axes = _figure(chart)
        chart.draw(axes)
        if figure.legends:  # a title of the figure would be drawn over it
            bold = FontProperties(size=13, weight="bold")
            figure.legends[0].set_title(chart.title, prop=bold)
            figure.legends[0].set_alignment("left")
        else:
            figure.suptitle(chart.title, x=0.02, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path, format="png", dpi=PNG_DPI, facecolor="white")


def to_svg(chart: Chart) -> str:
    """Return a chart as an SVG element; the HTML page must define the `--plot-NAME` colors."""
    with mpl.rc_context({**CHART_STYLE, "svg.hashsalt": f"jetrl {chart.key}"}):
        figure, axes = _figure(chart)
        chart.draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for size in ("width", "height"):  # sized by the page
        svg = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", svg, count=1)
    for name, color in COLORS.items():
        svg = svg.replace(f": {color}", f": var(--plot-{name})")
    return svg.strip()


def _figure(chart: Chart) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(SIZE_INCHES[0], chart.height), layout="constrained")
    return figure, figure.add_subplot()


def series(records: Records, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values of a metric, float64; values that cannot be plotted are NaN."""
    having = [r for r in records if name in r]
    steps = np.array([r["step"] for r in having], dtype=np.float64)
    return steps, drawable([r[name] for r in having])


def drawable(values: Sequence[float]) -> np.ndarray:
    """Return values as float64, with NaN for infinities and values above 1e100."""
    array = np.array([float(value) for value in values], dtype=np.float64)
    return np.where(np.abs(array) < MOST_DRAWN, array, np.nan)


def line(axes: Axes, curve: tuple[np.ndarray, np.ndarray], label: str, color: str) -> None:
    """Plot a metric as a line; long series get a moving average, very long ones are thinned."""
    steps, values = curve
    steps, values = thin(steps, values)
    if len(steps) >= SMOOTH_FROM and len(np.unique(values)) > 1:  # equal values: no average
        axes.plot(steps, values, color=color, alpha=0.28, linewidth=1.0)
        axes.plot(steps, _moving_mean(values, max(2, len(steps) // 32)), color=color, label=label)
    else:
        marker = "o" if len(steps) <= 30 else ""
        axes.plot(steps, values, color=color, label=label, marker=marker, markersize=3.2)


def finish(axes: Axes, unit: str, num_lines: int = 1) -> None:
    """Set ticks, labels and limits: integer steps on the x-axis, the unit on the y-axis."""
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
        legend_above(axes)


def legend_above(axes: Axes) -> None:
    """Add a legend above a chart of several lines, in as many columns as fit."""
    names = axes.get_legend_handles_labels()[1]
    place: dict[str, Any] = {"loc": "outside upper left", "handlelength": 1.2}
    columns = legend_columns(names)
    if len(names) > 1 and isinstance(axes.figure, Figure):
        axes.figure.legend(**place, ncols=columns, handletextpad=0.5, columnspacing=1.0)


def legend_columns(names: Sequence[str]) -> int:
    """Return the legend columns; legends are filled column by column."""
    for columns in range(min(4, len(names)), 1, -1):
        groups = np.array_split(np.array([len(name) for name in names]), columns)
        inches = [0.45 + 0.095 * int(group.max()) for group in groups]
        if sum(inches) < SIZE_INCHES[0]:
            return columns
    return 1


def thin(
    steps: np.ndarray,
    values: np.ndarray,
    how: Callable[..., Any] = np.nanmean,
    most: int = MAX_POINTS,
) -> tuple[np.ndarray, np.ndarray]:
    if len(steps) <= most:
        return steps, values
    groups = np.array_split(np.arange(len(steps)), most)
    joined = [how(values[g]) if np.isfinite(values[g]).any() else math.nan for g in groups]
    return np.array([steps[g].mean() for g in groups]), np.array(joined)


def _moving_mean(values: np.ndarray, radius: int) -> np.ndarray:
    """Return the mean of each value and up to `radius` neighbors per side, ignoring gaps."""
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    nums = np.concatenate([[0], np.cumsum(known)])
    index = np.arange(len(values))
    reach = np.minimum(radius, np.minimum(index, index[::-1]))
    low, high = index - reach, index + reach + 1
    num = nums[high] - nums[low]
    empty = np.full(len(values), math.nan)
    return np.divide(sums[high] - sums[low], num, out=empty, where=num > 0)


MAX_BARS = 60
PHASES = {
    **{"rollout": "blue", "reward": "amber", "update": "violet", "requantize": "green"},
    **{"checkpoint": "pink", "eval": "slate", "other": "axis"},
}


def _lines(key: str, title: str, unit: str, names: Mapping[str, str]) -> ChartOf:

    def chart_of(records: Records) -> Chart | None:
        supervised = any(name.startswith(("sft/", "reward_model/", "dpo/")) for name in names)
        records = in_phase(records, "sft" if supervised else "rl")
        present = {label: name for name, label in names.items() if any(name in r for r in records)}
        curves = {label: series(records, name) for label, name in present.items()}
        if not curves:
            return None

        def draw(axes: Axes) -> None:
            for (label, curve), color in zip(curves.items(), itertools.cycle(LINES), strict=False):
                line(axes, curve, label, COLORS[color])
            # Start at zero unless a value is negative; keep flat lines off the edge.
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if axes.dataLim.y0 < 0 else 0.0)
            axes.set_ylim(top=1.03 * axes.get_ylim()[1])
            finish(axes, unit, len(curves))

        form = percent if unit == "share" else number
        ends = {label: curve[1][[0, -1][: len(curve[1])]] for label, curve in curves.items()}
        shown = [f"{label} {' to '.join(map(form, values))}" for label, values in ends.items()]
        unit_text = "" if unit in ("share", "norm", "reward") else f" {unit}"
        return Chart(key, title, "; ".join(shown) + unit_text, draw)

    return chart_of


def _evaluation(records: Records) -> Chart | None:
    records = in_phase(records, "rl")
    names = sorted(
        {n for r in records for n in r if re.fullmatch(r"eval/.*/(mean|accuracy|pass_at_k)", n)}
    )
    values = {name: values_of(records, name) for name in names}
    shares = all(is_share(name, records) for name in names if is_eval_mean(name))
    drawn = {
        name: clip(visible(name.removeprefix("eval/").replace("pass_at_k", "pass@k")), 60)
        for name in names  # with one greedy completion per prompt, mean and pass@k are the same
        if not name.endswith("/pass_at_k") or values[name] != values.get(name[:-9] + "mean")
    }
    chart_of = _lines("eval", "Held-out evaluation", "share" if shares else "reward", drawn)
    return chart_of(records)


def _mismatch(records: Records) -> Chart | None:
    records = in_phase(records, "rl")
    steps, values = series(records, "mismatch/num_different")
    if not len(steps):
        return None
    exact = bool(np.all(values == 0))
    steps, shown = thin(steps, values, np.nanmax)

    def draw(axes: Axes) -> None:
        # An exact run shows a flat line with a text, other runs a stem per step with differing
        # tokens.
        color, width = (COLORS["green"], 3) if exact else (COLORS["red"], 0)
        axes.plot(steps, shown, color=color, lw=width, marker="o", markersize=4, clip_on=False)
        if exact:
            text: dict[str, Any] = {"ha": "center", "va": "center", "transform": axes.transAxes}
            axes.text(0.5, 0.5, "0 different tokens at every step", color=color, **text)
        else:
            axes.vlines(steps, 0, shown, color=color, linewidth=2.2)
        finish(axes, "tokens")
        if exact:
            axes.set_yticks([0, 1])
        axes.set_ylim(-0.12 if exact else 0.0, 1.0 if exact else None)

    compared = sum(r.get("mismatch/num_tokens", 0) for r in records)
    caption = (
        f"{count(float(np.nansum(values)))} tokens differ"
        + (f" of {count(compared)} compared" if compared else "")
        + "; 0 is expected from an exact plan"
    )
    return Chart("mismatch", "Sampler against trainer", caption, draw)


def _mismatch_size(records: Records) -> Chart | None:
    name = "mismatch/mean_abs_logprob_diff"
    if not np.any(series(records, name)[1] != 0):
        return None
    return _lines("mismatch_size", "Mean |log-prob difference|", "nats", {name: "mean"})(records)


def _time(records: Records) -> Chart | None:
    having = [r for r in in_phase(records, "rl") if "timing/step_s" in r]
    if not having:
        return None
    steps = np.array([r["step"] for r in having], dtype=np.float64)

    def seconds(phase: str) -> np.ndarray:
        return np.nan_to_num(drawable([r.get(f"timing/{phase}_s", 0.0) for r in having]))

    phases = {phase: seconds(phase) for phase in PHASES if phase != "other"}
    phases["other"] = np.maximum(seconds("step") - sum(phases.values()), 0.0)
    total = sum(float(v.sum()) for v in phases.values()) or 1.0
    # Plot tiny phases too, since the height is the whole step, but do not label them.
    named = {phase for phase, v in phases.items() if v.sum() >= 0.005 * total}

    def draw(axes: Axes) -> None:
        low: Any = 0.0
        for phase, values in phases.items():
            x, y = thin(steps, values, most=MAX_BARS)
            width = 0.82 * (x[1] - x[0] if len(x) > 1 else 1.0)
            label = phase if phase in named else "_"
            axes.bar(x, y, bottom=low, width=width, color=COLORS[PHASES[phase]], label=label)
            low = low + y
        finish(axes, "seconds", len(named))

    largest = sorted(phases.items(), key=lambda item: -item[1].sum())[:3]
    shares = ", ".join(f"{phase} {percent(float(v.sum()) / total)}" for phase, v in largest)
    return Chart("time", "Time per step", shares, draw)


CHARTS: tuple[ChartOf, ...] = (
    _lines(
        "reward", "Reward", "reward", {"reward/mean": "mean", "reward/std": "standard deviation"}
    ),
    *(_evaluation, _mismatch, _mismatch_size),
    _lines("length", "Response length", "tokens", {"response_length/mean": "mean"}),
    _lines("entropy", "Policy entropy", "nats", {"policy/entropy": "entropy"}),
    _lines(
        "experts",
        "Load of the busiest expert",
        "times the mean",
        {"experts/load": "mean over layers", "experts/load_max": "largest"},
    ),
    _lines("routes", "Routes that differ", "share", {"experts/routes_different": "of all routes"}),
    _time,
    _lines(
        "signal",
        "Where signal is lost",
        "share",
        {
            "reward/zero_std_groups": "equal-reward groups",
            "response_length/clip_ratio": "truncated",
            "policy/clip_fraction": "tokens clipped",
        },
    ),
    _lines("grad_norm", "Gradient norm", "norm", {"policy/grad_norm": "before clipping"}),
    _lines(
        "throughput",
        "Throughput",
        "tokens/s",
        {"throughput/rollout_tokens_per_s": "rollout", "throughput/train_tokens_per_s": "training"},
    ),
    _lines(
        "memory",
        "Peak memory of the GPU",
        "GiB",
        {"memory/rollout_peak_gib": "rollout", "memory/update_peak_gib": "update"},
    ),
    _lines("sft_loss", "Supervised updates", "nats", {"sft/loss": "loss"}),
    _lines("pairs", "Pairs ranked correctly", "share", _ACCURACIES),
)


def charts_of(records: Records) -> list[Chart]:
    charts = (chart(records) for chart in CHARTS)
    return [chart for chart in charts if chart is not None]


def plot_runs(
    paths: Sequence[str | Path], metrics: Sequence[str] = (), out_png: str | Path = "runs.png"
) -> Path:
    """Plot metrics of runs as a PNG, one panel per metric; `eval`: the means of all tasks."""
    named = zip(labels(paths), paths, strict=True)
    runs = {label: RunDirectory.open(path).metrics() for label, path in named}
    in_rl = any(in_phase(records, "rl") for records in runs.values())
    usual = DEFAULT_METRICS if in_rl else SUPERVISED_METRICS
    names = _chosen(metrics or usual, runs, strict=bool(metrics))
    num_columns = min(len(names), 2)
    num_rows = math.ceil(len(names) / num_columns)
    width, height = PANEL_INCHES
    out = Path(out_png)
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # missing glyphs are drawn as boxes
        size = (width * num_columns, height * num_rows + 0.4)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(num_rows, num_columns, squeeze=False)
        for axes in grid.flat[len(names) :]:
            axes.set_visible(False)
        for name, axes in zip(names, grid.flat, strict=False):
            for (label, records), color in zip(runs.items(), itertools.cycle(LINES), strict=False):
                rl = in_phase(records, "rl")
                own = rl if any(name in record for record in rl) else in_phase(records, "sft")
                line(axes, series(own, name), clip(visible(label), 60), COLORS[color])
            metric = find_metric(name)
            finish(axes, metric.unit if metric else "")
            axes.set_title(clip(visible(name), 60), loc="left", fontsize=10, fontweight="bold")
        handles, texts = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside upper left", ncols=4)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(out, format="png", dpi=150, facecolor="white")
        except OSError as error:
            why = error.strerror or error
            raise UserError(f"{out}: cannot be written: {why}; --out names another file") from None
    return out


def _chosen(metrics: Sequence[str], runs: dict[str, list[Record]], strict: bool) -> list[str]:
    present = {name for records in runs.values() for record in records for name in record}
    names: list[str] = []
    for name in metrics:
        matches = sorted(filter(is_eval_mean, present)) if name == "eval" else {name} & present
        if strict and not matches:
            known = ", ".join(sorted(n for n in present if find_metric(n)))
            raise UserError(f"metric {name}: none of these runs has it; they have {known}")
        names += matches
    if not names:
        raise UserError("nothing to plot: these runs have no finished step")
    return names
