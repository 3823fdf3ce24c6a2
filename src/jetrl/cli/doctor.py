"""What works on this machine: versions, devices, self-checks, each with the next step to take.

For example:

    jetrl doctor
    jetrl doctor --json        for a bug report
"""

from __future__ import annotations

import argparse
import json

from jetrl.cli.arguments import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="a JSON list of the checks")


def run(args: argparse.Namespace) -> int:
    from jetrl.cli.checks import all_checks

    checks = all_checks()
    if args.json:
        print(json.dumps([check._asdict() for check in checks], indent=2))
    else:
        print(table([(check.status, check.name, check.detail) for check in checks]))
        steps = [f"  {check.name}: {check.next_step}" for check in checks if check.next_step]
        if steps:
            print("\n".join(["", "next steps:", *steps]))
    return 1 if any(check.status == "FAIL" for check in checks) else 0
