"""How far an arm lies from another one over several studies, seed by seed.

    python benchmarks/study/pooled.py benchmarks/results/study/behind.json:kv-int8:bf16 ...

Each word names a results file, an arm, and the arm that it is compared with. All pairs of runs of
one study, grid point and seed are put together: their mean difference with its interval, the
median, the signed-rank test and the test of equivalence, as in a report (docs/studies.md). From
committed results alone, in seconds. The accuracy of a run is that in its own precision where both
runs of a pair have one, and otherwise that in the precision of the study; the line says how many
pairs have their own. Two runs of a pair that began from different weights are an error.

Such a sum is no test of its own where it was formed after its studies were seen.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jetrl.errors import UserError
from jetrl.study.analysis import common_accuracy, own_accuracy, point_name
from jetrl.study.results import RunResult, read_results
from jetrl.study.statistics import compare
from jetrl.study.tables import shown_interval, shown_p


def pairs(word: str, point: str | None) -> Iterator[tuple[RunResult, RunResult]]:
    """Yield the two runs of each grid point and seed that both arms have.

    Args:
        word: FILE:ARM:ARM, as the command has it.
        point: The only grid point that counts, if any is named; studies without a grid count whole.

    Raises:
        UserError: The word has another form, or the file has no run of an arm.
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
        if arm == arms[0] and other is not None and (point is None or where in ("", point)):
            yield run, other


def difference(run: RunResult, other: RunResult) -> tuple[float, bool]:
    """Return how far a run ends above another one, and whether each has its own precision.

    Args:
        run: The run.
        other: The run of the other arm with the same seed.

    Raises:
        UserError: They began from different weights, or one of them was not evaluated.
    """
    if run.start_sha256 != other.start_sha256:
        raise UserError(f"{run.name} and {other.name} began from different weights")
    for accuracy in (own_accuracy, common_accuracy):
        first, second = accuracy(run), accuracy(other)
        if first is not None and second is not None:
            return first - second, accuracy is own_accuracy
    raise UserError(f"{run.name} or {other.name} has no final evaluation")


def main(words: Sequence[str] | None = None) -> None:
    """Print the line of the studies that the command names.

    Args:
        words: The words of the command; by default those that were typed.

    Raises:
        UserError: A file or an arm is missing, or two runs do not compare.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pairs", nargs="+", metavar="FILE:ARM:ARM")
    parser.add_argument("--point", help="count this grid point alone, such as '30m-program-64'")
    parser.add_argument("--margin", type=float, default=0.01, help="as study.margin")
    args = parser.parse_args(words)
    runs = [pair for word in args.pairs for pair in pairs(word, args.point)]
    if not runs:
        parser.error(f"no pair of runs at {args.point!r}")
    found = [difference(*pair) for pair in runs]
    differences = [value for value, _ in found]
    result = compare(differences, args.margin, 0.95)
    starts = len({run.start_sha256 for run, _ in runs})
    print(
        f"{len(runs)} pairs from {starts} start{'s' * (starts > 1)}, "
        f"{sum(own for _, own in found)} in their own precision: "
        f"mean {shown_interval(result.difference, signed=True)}, "
        f"median {100 * result.median:+.2f}%, below in {sum(value < 0 for value in differences)}; "
        f"signed ranks p {shown_p(result.rank_p)}, "
        f"within {100 * args.margin:g}% p {shown_p(result.equivalence_p)}"
    )


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
