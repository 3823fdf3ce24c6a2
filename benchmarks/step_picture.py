"""Draw the README's chart: how long each phase of a step takes, in BF16 and in FP8.

The pass for old log-probs is left out: at one update per step no plan needs it. Each bar also says
how many tokens have another log-prob in the trainer than in the sampler.

    cd benchmarks/results/h200
    python ../../step_picture.py step_2048_plans.json step_8192.json --out step.png

The files are those of `jetrl bench step`; each of their rows is a bar.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jetrl.runs.plots import COLORS, STYLE

PHASES = {
    "rollout": ("rollout", "blue"),
    "update": ("forward and backward", "violet"),
    "optimizer": ("", "amber"),  # both are too short to be seen beside the others
    "requantize": ("", "green"),
}
BAR = 0.62
NAMED_SHARE = 0.045  # of the longest bar: a narrower part has no room for its seconds


def draw_load(axes: Axes, rows: Sequence[dict[str, Any]]) -> set[str]:
    """Draw the bars of one load, one for each plan; return the phases that they have."""
    steps = [row["step_s"] - row["seconds"].get("old_logprobs", 0.0) for row in rows]
    longest = max(steps)
    phases = set()
    for y, row in enumerate(rows):
        left = 0.0
        for phase, (_, color) in PHASES.items():
            seconds = row["seconds"].get(phase, 0.0)
            if not seconds:
                continue
            phases.add(phase)
            axes.barh(y, seconds, BAR, left, color=COLORS[color], edgecolor="white", lw=0.6)
            if seconds > NAMED_SHARE * longest:
                axes.text(
                    left + seconds / 2, y, f"{seconds:.1f}", color="white", ha="center",
                    va="center", fontsize=8.5,
                )  # fmt: skip
            left += seconds
        whole = f" {steps[y]:.1f} s"
        if "times_bf16" in row:
            whole += f", {row['times_bf16']['step_without_old_logprobs']:.2f} times as fast"
        axes.text(left, y - 0.14, whole, va="center", fontsize=9.5, fontweight="bold")
        axes.text(
            left, y + 0.2, f" {row['different']:,} of {row['compared_tokens']:,} log-probs differ",
            va="center", fontsize=8.5, color=COLORS["red" if row["different"] else "green"],
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row["plan"] for row in rows], fontsize=10)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.4 * longest)
    axes.set_title(rows[0]["load"], loc="left", fontsize=10, color=COLORS["text"])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.grid(visible=False)
    return phases


def picture(files: Sequence[dict[str, Any]], out: Path) -> None:
    """Write the PNG."""
    loads: dict[str, list[dict[str, Any]]] = {}
    for row in (row for file in files for row in file["rows"]):
        loads.setdefault(row["load"], []).append(row)
    with mpl.rc_context(STYLE):
        bars = [len(rows) for rows in loads.values()]
        height = 0.8 + 0.45 * len(loads) + 0.4 * sum(bars)
        figure = Figure(figsize=(8.6, height), layout="constrained")
        subplots = figure.subplots(len(loads), 1, squeeze=False, height_ratios=bars)[:, 0]
        phases: set[str] = set()
        for axes, rows in zip(subplots, loads.values(), strict=True):
            phases |= draw_load(axes, rows)
        shape = files[0]["rows"][0]["shape"].replace("qwen3-8b", "Qwen3-8B")
        figure.suptitle(
            f"One training step of {shape}, all parameters, one {files[0]['device']}: seconds",
            x=0.01, ha="left", fontsize=12, fontweight="bold",
        )  # fmt: skip
        handles = [
            mpl.patches.Patch(color=COLORS[color], label=label)
            for phase, (label, color) in PHASES.items()
            if phase in phases and label
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9)
        figure.savefig(out, dpi=130, metadata={"Software": None})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="JSON of jetrl bench step")
    parser.add_argument("--out", required=True, type=Path, help="PNG file")
    args = parser.parse_args(argv)
    picture([json.loads(file.read_text(encoding="utf-8")) for file in args.files], args.out)


if __name__ == "__main__":
    main()
