"""The stacked bars of a step, BF16 beside FP8, from the files of `jetrl bench step`.

    python benchmarks/step_picture.py benchmarks/results/h200/step.json --out docs/images/step.png

A bar for each row of the files: how long each phase of the step took, by load. To the right of each
bar stands its whole time and, against BF16's of the same load, how many times as fast it is.
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

from jetrl.runs.plot_style import COLORS, STYLE

PHASES = {
    "rollout": ("rollout", "blue"),
    "old_logprobs": ("old log-probs", "slate"),
    "update": ("forward and backward", "violet"),
    "optimizer": ("optimizer", "amber"),
    "requantize": ("requantize", "green"),
}
BAR = 0.62
NAMED_SHARE = 0.045  # of the longest bar: a narrower part has no room for its seconds


def draw(axes: Axes, rows: Sequence[dict[str, Any]]) -> set[str]:
    """One load's bars; returns the phases that it has."""
    longest = max(row["step_s"] for row in rows)
    seen = set()
    for place, row in enumerate(rows):
        left = 0.0
        for phase, (_, color) in PHASES.items():
            seconds = row["seconds"].get(phase, 0.0)
            if not seconds:
                continue
            seen.add(phase)
            axes.barh(place, seconds, BAR, left, color=COLORS[color], edgecolor="white", lw=0.6)
            if seconds > NAMED_SHARE * longest:
                axes.text(
                    left + seconds / 2, place, f"{seconds:.1f}", color="white", ha="center",
                    va="center", fontsize=8.5,
                )  # fmt: skip
            left += seconds
        said = f" {row['step_s']:.1f} s"
        if "times_bf16" in row:
            times = row["times_bf16"]
            said += f"   {times['step']:.2f}x"
            if times["step"] != times["step_without_old_logprobs"]:
                said += f" ({times['step_without_old_logprobs']:.2f}x without old log-probs)"
        axes.text(left, place, said, va="center", fontsize=9.5, fontweight="bold")
    axes.set_yticks(range(len(rows)), [row["plan"] for row in rows], fontsize=10)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * longest)
    axes.set_title(rows[0]["load"], loc="left", fontsize=10, color=COLORS["text"])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(left=False, bottom=False)
    axes.grid(visible=True, axis="x", color=COLORS["grid"])
    axes.grid(visible=False, axis="y")
    return seen


def picture(files: Sequence[dict[str, Any]], out: Path) -> None:
    """Writes the PNG."""
    loads: dict[str, list[dict[str, Any]]] = {}
    for row in (row for file in files for row in file["rows"]):
        loads.setdefault(row["load"], []).append(row)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 0.9 + 1.45 * len(loads)), layout="constrained")
        parts = figure.subplots(len(loads), 1, squeeze=False)[:, 0]
        seen: set[str] = set()
        for axes, rows in zip(parts, loads.values(), strict=True):
            seen |= draw(axes, rows)
        parts[-1].set_xlabel("seconds")
        shape = files[0]["rows"][0]["shape"]
        figure.suptitle(
            f"One step, {shape}, all parameters trained, one {files[0]['device']}",
            x=0.01, ha="left", fontsize=12, fontweight="bold",
        )  # fmt: skip
        handles = [
            mpl.patches.Patch(color=COLORS[color], label=label)
            for phase, (label, color) in PHASES.items()
            if phase in seen
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9)
        figure.savefig(out, dpi=160, metadata={"Software": None})


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
