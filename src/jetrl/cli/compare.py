"""Compare runs with the first one: settings, rewards, times, and the first step that differs.

For example:

    jetrl compare demo demo-2                     a run and a repeat of it
    jetrl compare runs/bf16 runs/unified          two variants: rewards and speed
    jetrl compare demo demo-2 --same              exit code 1 unless all bits are the same

Rewards and losses are means over the last tenth of the common steps; times and speeds are medians;
memory is the peak. Bits are compared line by line in metrics.jsonl, except times, speeds and
memory. --same compares the digests of the steps (docs/exactness.md) and names the first step and
field that differ: prompts, tokens, logprobs, rewards, losses, grad_norms or weights.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from jetrl.cli.arguments import print_json, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", nargs="+", metavar="RUN", help="a run's name or directory")
    add("--dir", default="runs", help="parent folder of run directories")
    add("--same", action="store_true", help="compare digests too; exit code 1 unless all are equal")
    add("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    from jetrl.cli.runs import find_run
    from jetrl.runs.format import visible
    from jetrl.runs.overview import bits_in_words, compare_runs, comparison_rows, digest_in_words

    paths = [find_run(name, Path(args.dir)) for name in args.run]
    comparison = compare_runs(paths, check_digests=args.same)
    if args.json:
        same = {"same": comparison.same, "same_digest": comparison.same_digest}
        print_json({**same, **dataclasses.asdict(comparison)})
    else:
        first, *others = comparison.runs
        lines = [table(comparison_rows(comparison)), ""]
        common, supervised = comparison.common_steps, comparison.common_sft_steps
        if common or not supervised:
            lines += [f"rewards, times and speeds: over the {common} common steps"]
        else:
            lines += [f"times and speeds: over the {supervised} common supervised steps"]
        lines += [bits_in_words(other, first) for other in others]
        lines += [digest_in_words(other, first) for other in others if args.same]
        print(visible("\n".join(lines), newlines=True))
    return 1 if args.same and not comparison.same_digest else 0
