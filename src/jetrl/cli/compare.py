"""Compare runs with the first one: settings, rewards, times, and up to which step bits agree.

For example:

    jetrl compare demo demo-2                     a run that was repeated, or killed and resumed
    jetrl compare runs/bf16 runs/unified          the same curve? in how much of the time?
    jetrl compare demo demo-2 --same              exit code 1 unless all bits are the same

Of metrics with a mean at each step it shows the mean over the last tenth of the steps that all runs
have; of times and speeds the median; of memory the peak. Bits are compared line by line of
metrics.jsonl, times, speeds and memory left out.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from jetrl.cli.arguments import print_json, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", metavar="RUN", help="a run's name, or its directory")
    parser.add_argument("--dir", default="runs", help="folder that holds run directories")
    parser.add_argument(
        "--same", action="store_true", help="exit code 1 unless the bits are the same"
    )
    parser.add_argument("--json", action="store_true", help="a JSON object")


def run(args: argparse.Namespace) -> int:
    from jetrl.cli.runs import find_run
    from jetrl.runs import bits_in_words, compare_runs, comparison_rows
    from jetrl.runs.format import visible

    comparison = compare_runs([find_run(name, Path(args.dir)) for name in args.run])
    if args.json:
        facts = {"same": comparison.same, **dataclasses.asdict(comparison)}
        print_json(facts)
    else:
        first, *others = comparison.runs
        lines = [table(comparison_rows(comparison)), ""]
        common = comparison.common_steps
        lines += [f"rewards, times and speeds over the {common} steps that all have"]
        lines += [bits_in_words(other, first) for other in others]
        print(visible("\n".join(lines), newlines=True))
    return 1 if args.same and not comparison.same else 0
