"""Drops of the accuracy during runs, and whether the K3 KL or the reward warns of them.

    python -m benchmarks.study.setbacks benchmarks/results/study/flows.json ...

The *fall* of a run is the largest drop of its held-out accuracy from one evaluation to a later one.
Its K3 KL *rises* if two consecutive values exceed three times the median of the values before, of
which there must be four. Its reward *collapses* by the rule of the warnings of a run
(docs/numbers.md), applied to the values in the results, which are means over steps. The output has
a line per grid point and arm, with the runs that fell by more than ten points; then the number of
lost runs, and of other runs, that each sign marks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.study.analysis import lost_names, point_name
from benchmarks.study.charts import MISMATCH
from benchmarks.study.definition import definition_of
from benchmarks.study.results import Curves, RunResult, read_results

from jetrl.runs.anomalies import ENOUGH, RECENT, WINDOW, reward_collapses

FALL, RISE = 0.1, 3.0  # a fall that is named; times the median of values before
_LEAST = 4  # kept values of the K3 KL before the first that may be a rise
_ENDS = ("collapsed", "behind", "others")


@dataclass(frozen=True)
class Setback:
    """The setback of one run.

    Attributes:
        fall: The largest drop of its held-out accuracy, 0 or more.
        rise: The step at which its K3 KL rose, if it did.
        collapse: The step at which its reward collapsed, if it did.
    """

    name: str
    fall: float
    rise: int | None
    has_mismatch: bool
    collapse: int | None


def setback(run: RunResult) -> Setback:
    """Return the setback of a run."""
    best = fall = 0.0
    for value in run.held_out.values.get("mean", []):
        if value is not None:
            best = max(best, value)
            fall = max(fall, best - value)
    has_mismatch = any(run.curves.values.get(MISMATCH, []))
    rise, collapse = _rise(run.curves), _reward_collapse(run.curves)
    return Setback(run.name, fall, rise, has_mismatch, collapse)


def _rise(curves: Curves) -> int | None:
    """Return the step of the first of two consecutive values far above those before."""
    pairs = zip(curves.steps, curves.values.get(MISMATCH, []), strict=False)
    kept = [(step, value) for step, value in pairs if value is not None]
    values = [value for _, value in kept]
    for i in range(_LEAST, len(kept) - 1):
        if min(values[i : i + 2]) > RISE * median(values[:i]) > 0:
            return kept[i][0]
    return None


def _reward_collapse(curves: Curves) -> int | None:
    """Return the step at which a run's rewards collapse, by the rule for single steps."""
    pairs = zip(curves.steps, curves.values.get("reward/mean", []), strict=False)
    kept = [(step, value) for step, value in pairs if value is not None]
    if len(kept) < 2:
        return None
    apart = kept[1][0] - kept[0][0]  # steps from one kept value to the next
    recent = max(1, round(RECENT / apart))
    enough, window = (recent + max(2, round(count / apart)) for count in (ENOUGH, WINDOW - RECENT))
    for i in range(enough, len(kept) + 1):
        if reward_collapses([value for _, value in kept[max(0, i - window) : i]], recent):
            return kept[i - 1][0]
    return None


def signs(ends: dict[str, list[Setback]]) -> str:
    """Return a Markdown table of the number of runs that each sign marked."""
    lines = [f"| sign | {' | '.join(_ENDS)} |", "| --- | --- | --- | --- |"]
    cells = [_marked([one.collapse for one in ends[end]]) for end in _ENDS]
    lines.append(f"| the reward collapses | {' | '.join(cells)} |")
    cells = [_marked([one.rise for one in ends[end] if one.has_mismatch]) for end in _ENDS]
    lines.append(f"| the K3 KL rises, of runs that have one | {' | '.join(cells)} |")
    return "\n".join(lines)


def _marked(steps: list[int | None]) -> str:
    return f"{sum(step is not None for step in steps)} of {len(steps)}"


def table(setbacks: dict[tuple[str, str], list[Setback]]) -> str:
    """Return a Markdown table of setbacks."""
    lines = [
        "| point | arm | runs | largest fall | K3 KL rises in | far falls, step of the rise |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (point, arm), own in setbacks.items():
        far = [one for one in own if one.fall > FALL]
        named = "; ".join(
            f"{one.name}: {100 * one.fall:.0f} points, {one.rise or 'never'}" for one in far
        )
        largest = f"{100 * max(one.fall for one in own):.1f} points"
        risen = sum(one.rise is not None for one in own)
        lines.append(f"| {point} | {arm} | {len(own)} | {largest} | {risen} | {named} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Print the table of the results files that the command names.

    Args:
        words: The words of the command; by default those that were typed.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, help="results files of studies")
    args = parser.parse_args(words)
    setbacks: dict[tuple[str, str], list[Setback]] = {}
    ends: dict[str, list[Setback]] = {end: [] for end in _ENDS}
    for path in args.results:
        results = read_results(path)
        lost = lost_names(definition_of(results.definition, path), [*results.runs.values()])
        for run in results.runs.values():
            place = (f"{path.stem}: {point_name(run.point)}", run.arm)
            one = setback(run)
            setbacks.setdefault(place, []).append(one)
            ends[lost.get(run.name, "others")].append(one)
    print(table(setbacks), signs(ends), sep="\n\n")


if __name__ == "__main__":
    main()
