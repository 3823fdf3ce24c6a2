"""How many runs are lost with a mismatch that nothing corrects, and how many are lost without.

    python -m benchmarks.study.losses benchmarks/results/study/flows.json ...

A run is lost by the rules of its study (docs/studies.md), and decided with all runs of its file.
From committed results alone, in seconds: the runs of each arm and the lost ones among them, and
Fisher's exact test of the arms of `--against` together against all other arms together. To count
only runs that were made after a rule was set, `--not-in COMMIT` leaves out the runs that the files
had at that commit; `--point` and `--first-seed` leave out other grid points and smaller seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.study.analysis import lost_names, point_name
from benchmarks.study.definition import definition_of
from benchmarks.study.results import RunResult, read_results
from benchmarks.study.statistics import fisher_p


def names_at(commit: str, path: Path) -> set[str]:
    """Return the names of the runs that a results file had at a commit."""
    known = _git(path, "cat-file", "-e", f"{commit}^{{commit}}")
    if known.returncode:
        raise SystemExit(f"error: --not-in {commit}: {known.stderr.strip()}")
    shown = _git(path, "show", f"{commit}:./{path.name}")
    return {run["name"] for run in json.loads(shown.stdout)["runs"]} if shown.stdout else set()


def _git(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of git in the folder of a file."""
    return subprocess.run(["git", "-C", path.parent, *words], capture_output=True, text=True)


def counted(run: RunResult, point: str | None, first_seed: int, older: set[str]) -> bool:
    """Return whether a run is among those that are counted."""
    here = point is None or point_name(run.point) == point
    return here and run.seed >= first_seed and run.name not in older


def table(lost: Counter[str], runs: Counter[str], against: Sequence[str]) -> str:
    """Return a Markdown table of the counts of all arms, and below it the test."""
    lines = ["| arm | lost | of |", "| --- | --- | --- |"]
    lines += [f"| {arm} | {lost[arm]} | {runs[arm]} |" for arm in runs]
    their_lost, their_runs = (sum(count[arm] for arm in against) for count in (lost, runs))
    other_lost, other_runs = lost.total() - their_lost, runs.total() - their_runs
    p = fisher_p(their_lost, their_runs, other_lost, other_runs)
    lines += [
        "",
        f"{' and '.join(against)}: {their_lost} of {their_runs}; all others: {other_lost} of "
        f"{other_runs}; Fisher's exact test, p {p:.4f}",
    ]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Print the table of the results files that the command names.

    Args:
        words: The words of the command; by default those that were typed.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, help="results files of studies")
    parser.add_argument("--against", nargs="+", default=["mixed", "alike"], metavar="ARM")
    parser.add_argument("--not-in", metavar="COMMIT", help="leave out the runs that it has")
    parser.add_argument("--point", help="count this grid point alone, such as '30m, program-64'")
    parser.add_argument("--first-seed", type=int, default=0, help="count no smaller seeds")
    args = parser.parse_args(words)
    lost: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    arms: set[str] = set()
    for path in args.results:
        results = read_results(path)
        all_runs = list(results.runs.values())
        lost_of_all = lost_names(definition_of(results.definition, path), all_runs)
        older = names_at(args.not_in, path) if args.not_in else set()
        arms.update(run.arm for run in all_runs)
        for run in all_runs:
            if counted(run, args.point, args.first_seed, older):
                runs[run.arm] += 1
                lost[run.arm] += run.name in lost_of_all
    if unknown := sorted(set(args.against) - arms):
        parser.error(f"no run of {unknown[0]!r}; there are {', '.join(sorted(arms))}")
    print(table(lost, runs, args.against))


if __name__ == "__main__":
    main()
