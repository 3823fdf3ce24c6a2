"""The paired difference of two arms, pooled over several studies.

    python -m benchmarks.study.pooled benchmarks/results/study/behind.json:kv-int8:bf16 ...

Each argument names a results file, an arm, and the arm to compare with. Runs of one study, grid
point and seed form a pair. The output has the rank estimate and the mean difference of all pairs
with their intervals, the signed-rank test and the equivalence test. The rank estimate
(Hodges-Lehmann) is the median of all pairwise averages, with the interval of the signed-rank test,
so that one collapsed run does not decide it. Accuracies are in each run's own precision if both
runs of a pair have one, unless `--common` is given, else in the study's; the output counts the
former. Runs of a pair with different initial weights are an error.

A pool chosen after its studies were seen is not an independent test.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.study.analysis import common_accuracy, own_accuracy, point_name
from benchmarks.study.results import RunResult, read_results
from benchmarks.study.statistics import compare, rank_estimate
from benchmarks.study.tables import shown_interval, shown_p

from jetrl.errors import UserError

MARGIN = 0.01  # as study.margin


def pairs(word: str, points: Sequence[str]) -> Iterator[tuple[RunResult, RunResult]]:
    """Yield the runs of both arms at each grid point and seed.

    Args:
        points: The grid points to use; none: all. Studies without a grid are always used.
    """
    path, *arms = word.rsplit(":", 2)
    if len(arms) != 2:
        raise UserError(f"{word}: say FILE:ARM:ARM, such as behind.json:kv-int8:bf16")
    runs = list(read_results(Path(path)).runs.values())
    if unknown := sorted(set(arms) - {run.arm for run in runs}):
        there = ", ".join(sorted({run.arm for run in runs}))
        raise UserError(f"{path} has no run of {unknown[0]!r}; there are {there}")
    places = {(run.arm, point_name(run.point), run.seed): run for run in runs}
    for (arm, where, seed), run in places.items():
        other = places.get((arms[1], where, seed))
        if arm == arms[0] and other is not None and (not points or where in ("", *points)):
            yield run, other


def difference(run: RunResult, other: RunResult, common: bool = False) -> tuple[float, bool]:
    """Return the difference of two runs' accuracies, and whether both are in own precision."""
    if run.start_sha256 != other.start_sha256:
        raise UserError(f"{run.name} and {other.name} began from different weights")
    for accuracy in (own_accuracy, common_accuracy)[common:]:
        first, second = accuracy(run), accuracy(other)
        if first is not None and second is not None:
            return first - second, accuracy is own_accuracy
    raise UserError(f"{run.name} or {other.name} has no final evaluation")


def main(words: Sequence[str] | None = None) -> None:
    """Print the line of the studies that the command names.

    Args:
        words: The words of the command; by default those that were typed.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pairs", nargs="+", metavar="FILE:ARM:ARM")
    parser.add_argument("--point", action="append", default=[], help="count only this grid point")
    parser.add_argument("--common", action="store_true", help="in the precision of the study")
    args = parser.parse_args(words)
    runs = [pair for word in args.pairs for pair in pairs(word, args.point)]
    if not runs:
        parser.error(f"no pair of runs at {', '.join(args.point) or 'any point'}")
    found = [difference(*pair, args.common) for pair in runs]
    differences = [value for value, _ in found]
    result = compare(differences, MARGIN, 0.95)
    estimate, low, high = (100 * value for value in rank_estimate(differences))
    starts = len({run.start_sha256 for run, _ in runs})
    print(
        f"{len(runs)} pairs from {starts} start{'s' * (starts > 1)}, "
        f"{sum(own for _, own in found)} in their own precision: "
        f"rank estimate {estimate:+.2f}% [{low:+.2f}, {high:+.2f}], "
        f"mean {shown_interval(result.difference, signed=True)}, "
        f"below in {sum(value < 0 for value in differences)}; "
        f"signed ranks p {shown_p(result.rank_p)}, "
        f"within {100 * MARGIN:g}% p {shown_p(result.equivalence_p)}"
    )


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
