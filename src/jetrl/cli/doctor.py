"""Find out what works on this machine, or what became of a run, and the next steps to take.

For example:

    jetrl doctor
    jetrl doctor --json        for a bug report
    jetrl doctor runs/demo     how that run ended, what is whole, how it goes on
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jetrl.cli.arguments import print_json, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="a run's name or directory (default: this machine)"
    )
    parser.add_argument("--dir", default="runs", help="folder that holds run directories")
    parser.add_argument("--json", action="store_true", help="a JSON list of the checks")


def run(args: argparse.Namespace) -> int:
    if args.run is None:
        from jetrl.cli.checks import all_checks

        findings = all_checks()
    else:
        from jetrl.cli.run_checks import run_checks
        from jetrl.cli.runs import find_run

        findings = run_checks(find_run(args.run, Path(args.dir)))
    if args.json:
        print_json([finding._asdict() for finding in findings])
    else:
        from jetrl.runs.format import visible

        lines = [table([finding[:3] for finding in findings])]
        steps = [f"  {each.name}: {each.next_step}" for each in findings if each.next_step]
        if steps:
            lines += ["", "next steps:", *steps]
        print(visible("\n".join(lines), newlines=True))  # a run's end may quote what a model wrote
    return 1 if any(finding.status == "FAIL" for finding in findings) else 0
