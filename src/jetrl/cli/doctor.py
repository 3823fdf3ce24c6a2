"""What works on this machine, or what became of a run: each finding with the next step to take.

For example:

    jetrl doctor
    jetrl doctor --json        for a bug report
    jetrl doctor runs/demo     how that run ended, what is whole, how it goes on
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from jetrl.cli.arguments import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="a run's name or directory (default: this machine)"
    )
    parser.add_argument("--dir", default="runs", help="folder that holds run directories")
    parser.add_argument("--json", action="store_true", help="a JSON list of the checks")


def run(args: argparse.Namespace) -> int:
    if args.run is None:
        from jetrl.cli.checks import all_checks

        checks = all_checks()
    else:
        from jetrl.cli.run_checks import run_checks
        from jetrl.cli.runs import find_run

        checks = run_checks(find_run(args.run, Path(args.dir)))
    if args.json:
        print(json.dumps([check._asdict() for check in checks], indent=2))
    else:
        from jetrl.runs.format import visible

        lines = [table([(check.status, check.name, check.detail) for check in checks])]
        steps = [f"  {check.name}: {check.next_step}" for check in checks if check.next_step]
        if steps:
            lines += ["", "next steps:", *steps]
        print(visible("\n".join(lines), newlines=True))  # a run's end may quote what a model wrote
    return 1 if any(check.status == "FAIL" for check in checks) else 0
