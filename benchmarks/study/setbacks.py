"""How far runs fall back on the way, and whether a rising mismatch tells of it.

    python benchmarks/study/setbacks.py benchmarks/results/study/flows.json ...

A run's *fall* is the most that its held-out accuracy loses between an evaluation and a later one.
Its K3 KL *rises* where two kept values in a row are above `--rise` times the median of all before
them, of which there must be four. From committed results alone, in seconds: a line for each grid
point and arm, which names the runs that fell by more than `--fall`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from jetrl.study.analysis import point_name
from jetrl.study.charts import MISMATCH
from jetrl.study.results import Curves, RunResult, read_results

_LEAST = 4  # kept values of the K3 KL before the first that may be a rise


@dataclass(frozen=True)
class Setback:
    """What one run lost on the way.

    Attributes:
        name: The run.
        fall: The most that its held-out accuracy lost; 0 where it never did.
        rise: The step at which its K3 KL rose; None where it did not.
    """

    name: str
    fall: float
    rise: int | None


def setback(run: RunResult, times: float) -> Setback:
    """Return the setback of a run.

    Args:
        run: The run.
        times: How many times its median the K3 KL must reach to have risen.
    """
    best = fall = 0.0
    for value in run.held_out.values.get("mean", []):
        if value is not None:
            best = max(best, value)
            fall = max(fall, best - value)
    return Setback(run.name, fall, _rise(run.curves, times))


def _rise(curves: Curves, times: float) -> int | None:
    """Return the step of the first of two values in a row that are far above those before."""
    pairs = zip(curves.steps, curves.values.get(MISMATCH, []), strict=False)
    kept = [(step, value) for step, value in pairs if value is not None]
    values = [value for _, value in kept]
    for i in range(_LEAST, len(kept) - 1):
        if min(values[i : i + 2]) > times * median(values[:i]) > 0:
            return kept[i][0]
    return None


def table(setbacks: dict[tuple[str, str], list[Setback]], fall: float) -> str:
    """Return a Markdown table of setbacks.

    Args:
        setbacks: Those of the runs of each grid point and arm.
        fall: What a run must lose to be named.
    """
    lines = [
        "| point | arm | runs | largest fall | K3 KL rises in | far falls, step of the rise |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (point, arm), own in setbacks.items():
        far = [one for one in own if one.fall > fall]
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
    parser.add_argument("--fall", type=float, default=0.1, help="name runs that fell by more")
    parser.add_argument("--rise", type=float, default=3.0, help="times the median before")
    args = parser.parse_args(words)
    setbacks: dict[tuple[str, str], list[Setback]] = {}
    for path in args.results:
        for run in read_results(path).runs.values():
            place = (f"{path.stem}: {point_name(run.point)}", run.arm)
            setbacks.setdefault(place, []).append(setback(run, args.rise))
    print(table(setbacks, args.fall))


if __name__ == "__main__":
    main()
