"""The plots of a run, from the lines of its metrics.jsonl.

A chart exists only if its metrics were measured; its caption has the first and last values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.axes import Axes

from jetrl.runs.format import clip, count, number, percent, visible
from jetrl.runs.history import in_phase
from jetrl.runs.plot_style import (
    COLORS,
    LINES,
    Chart,
    Records,
    drawable,
    finish,
    line,
    series,
    thin,
)

MAX_BARS = 60
PHASES = {
    "rollout": "blue",
    "reward": "amber",
    "update": "violet",
    "requantize": "green",
    "checkpoint": "pink",
    "eval": "slate",
    "other": "axis",
}


def charts_of(records: Records) -> list[Chart]:
    """Return the charts that the lines of metrics.jsonl have data for, in reading order."""
    rl, sft = in_phase(records, "rl"), in_phase(records, "sft")
    charts = [
        _reward(rl),
        _evaluation(rl),
        _mismatch(rl),
        _mismatch_size(rl),
        _lines(rl, "length", "Response length", "tokens", {"response_length/mean": "mean"}),
        _lines(rl, "entropy", "Policy entropy", "nats", {"policy/entropy": "entropy"}),
        _time(rl),
        _lines(
            rl,
            "signal",
            "Where signal is lost",
            "share",
            {
                "reward/zero_std_groups": "groups of equal reward",
                "response_length/clip_ratio": "answers cut off",
                "policy/clip_fraction": "tokens clipped",
            },
        ),
        _lines(rl, "grad_norm", "Gradient norm", "norm", {"policy/grad_norm": "before clipping"}),
        _lines(
            rl,
            "throughput",
            "Throughput",
            "tokens/s",
            {
                "throughput/rollout_tokens_per_s": "rollout",
                "throughput/train_tokens_per_s": "training",
            },
        ),
        _lines(
            rl,
            "memory",
            "Peak memory of the GPU",
            "GiB",
            {
                "memory/rollout_peak_gib": "rollout",
                "memory/update_peak_gib": "update",
            },
        ),
        _lines(sft, "sft_loss", "Supervised updates", "nats", {"sft/loss": "loss"}),
        _lines(
            sft,
            "pairs",
            "Pairs in the right order",
            "share",
            {"reward_model/accuracy": "of the update", "reward_model/eval_accuracy": "held out"},
        ),
    ]
    return [chart for chart in charts if chart is not None]


def _lines(
    records: Records, key: str, title: str, unit: str, names: Mapping[str, str]
) -> Chart | None:
    present = {name: label for name, label in names.items() if any(name in r for r in records)}
    if not present:
        return None

    def draw(axes: Axes) -> None:
        for (name, label), color in zip(present.items(), LINES, strict=False):
            line(axes, *series(records, name), label, COLORS[color])
        if unit in ("share", "tokens", "nats", "norm", "tokens/s", "GiB"):
            # Amounts start at zero, unless some are negative.
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if axes.dataLim.y0 < 0 else 0.0)
            axes.set_ylim(top=1.03 * axes.get_ylim()[1])  # a flat line is not cut by the edge
        finish(axes, unit, len(present))

    form = percent if unit == "share" else number
    ends = [f"{label} {_ends(series(records, n)[1], form)}" for n, label in present.items()]
    unit_text = "" if unit in ("share", "norm") else f" {unit}"
    return Chart(key, title, "; ".join(ends) + unit_text, draw)


def _ends(values: np.ndarray, form: Callable[[float], str]) -> str:
    first, last = form(values[0]), form(values[-1])
    return f"{first} to {last}" if len(values) > 1 else first


def _reward(records: Records) -> Chart | None:
    steps, values = series(records, "reward/mean")
    if not len(steps):
        return None
    having = [r for r in records if "reward/mean" in r]
    spread = drawable([r.get("reward/std", math.nan) for r in having])

    def draw(axes: Axes) -> None:
        if np.isfinite(spread).any():
            x, low = thin(steps, values - spread)
            _, high = thin(steps, values + spread)
            axes.fill_between(x, low, high, color=COLORS["blue"], alpha=0.1, linewidth=0)
        line(axes, steps, values, "mean", COLORS["blue"])
        finish(axes, "reward")

    caption = f"mean {_ends(values, number)}; the band is one standard deviation"
    return Chart("reward", "Reward", caption, draw)


def _evaluation(records: Records) -> Chart | None:
    names = sorted({n for r in records for n in r if re.fullmatch(r"eval/.*/(mean|pass_at_k)", n)})
    curves = {name: series(records, name) for name in names}
    # With one greedy completion a prompt, mean and pass@k are the same: one line is enough.
    drawn = {
        name: (steps, values)
        for name, (steps, values) in curves.items()
        if name.endswith("/mean")
        or not np.array_equal(values, curves.get(name[:-9] + "mean", (steps, values * np.nan))[1])
    }
    if not drawn:
        return None
    shares = all(
        np.nanmin(v, initial=0) >= 0 and np.nanmax(v, initial=0) <= 1 for _, v in drawn.values()
    )

    def draw(axes: Axes) -> None:
        colors = iter(LINES * len(drawn))
        for name, (steps, values) in drawn.items():
            label = name.removeprefix("eval/").replace("/", " ").replace("pass_at_k", "pass@k")
            label = clip(visible(label), 60)
            axes.plot(
                steps,
                values,
                color=COLORS[next(colors)],
                label=label,
                marker="o" if len(steps) <= MAX_BARS else "",
                markersize=4,
                linestyle="-" if name.endswith("/mean") else "--",
            )
        if shares:
            axes.set_ylim(-0.02, 1.04)
        finish(axes, "share" if shares else "reward", len(drawn))

    form = percent if shares else number
    ends = [
        f"{name.removeprefix('eval/')} {_ends(values, form)}" for name, (_, values) in drawn.items()
    ]
    return Chart("eval", "Held-out evaluation", "; ".join(ends), draw)


def _mismatch(records: Records) -> Chart | None:
    steps, values = series(records, "mismatch/num_different")
    if not len(steps):
        return None
    exact = bool(np.all(values == 0))
    compared = sum(r.get("mismatch/num_tokens", 0) for r in records)
    compared_text = f" of {count(compared)} compared" if compared else ""

    def draw(axes: Axes) -> None:
        color = COLORS["green"] if exact else COLORS["red"]
        thin_steps, thin_values = thin(steps, values, np.nanmax)
        # An exact run is a flat line with words; else a stem for each step with differing tokens.
        if exact:
            axes.plot(
                thin_steps,
                thin_values,
                color=color,
                linewidth=3,
                marker="o",
                markersize=4,
                clip_on=False,
            )
            axes.set_ylim(-0.12, 1.0)
            axes.text(
                0.5,
                0.5,
                "0 different tokens at every step",
                color=color,
                fontsize=12,
                fontweight="bold",
                ha="center",
                va="center",
                transform=axes.transAxes,
            )
        else:
            axes.axhline(0, color=COLORS["green"], linewidth=1.4)
            axes.vlines(thin_steps, 0, thin_values, color=color, linewidth=2.2)
            axes.plot(thin_steps, thin_values, color=color, linewidth=0, marker="o", markersize=3)
            axes.set_ylim(bottom=0)
        # `finish` sets ticks and limits for a curve: put those of this picture back.
        bottom, top = axes.get_ylim()
        finish(axes, "tokens")
        if exact:
            axes.set_yticks([0, 1])
        axes.set_ylim(bottom, top)

    differ = count(float(np.nansum(values)))
    caption = f"{differ} tokens differ{compared_text}; 0 is the right answer of an exact plan"
    return Chart("mismatch", "Sampler against trainer", caption, draw)


def _mismatch_size(records: Records) -> Chart | None:
    _, values = series(records, "mismatch/mean_abs_logprob_diff")
    if not np.any(values != 0):
        return None
    return _lines(
        records,
        "mismatch_size",
        "Mean |log-prob difference|",
        "nats",
        {"mismatch/mean_abs_logprob_diff": "mean"},
    )


def _time(records: Records) -> Chart | None:
    having = [r for r in records if "timing/step_s" in r]
    if not having:
        return None
    steps = np.array([r["step"] for r in having], dtype=np.float64)
    whole = np.nan_to_num(drawable([r["timing/step_s"] for r in having]))
    phases = {
        phase: np.nan_to_num(drawable([r.get(f"timing/{phase}_s", 0.0) for r in having]))
        for phase in PHASES
        if phase != "other"
    }
    phases["other"] = np.maximum(whole - sum(phases.values()), 0.0)
    total = sum(float(v.sum()) for v in phases.values()) or 1.0
    # Tiny phases are drawn (the height is the whole step) but not named.
    named = {phase for phase, v in phases.items() if v.sum() >= 0.005 * total}

    def draw(axes: Axes) -> None:
        bottom: np.ndarray | None = None
        for phase, values in phases.items():
            x, y = thin(steps, values)
            low = np.zeros_like(y) if bottom is None else bottom
            label = phase if phase in named else "_"
            color = COLORS[PHASES[phase]]
            if len(x) <= MAX_BARS:
                width = 0.82 * (x[1] - x[0] if len(x) > 1 else 1.0)
                axes.bar(x, y, bottom=low, width=width, color=color, label=label)
            else:
                axes.fill_between(x, low, low + y, color=color, linewidth=0, label=label)
            bottom = low + y
        finish(axes, "seconds", len(named))

    largest = sorted(phases.items(), key=lambda item: -item[1].sum())[:3]
    shares = ", ".join(f"{phase} {percent(float(v.sum()) / total)}" for phase, v in largest)
    return Chart("time", "Time per step", shares, draw)
