"""Rerun the steps after a run's last checkpoint, and name the operation that produces a NaN.

It samples again. To train on a run's recorded rollouts without sampling, use `jetrl train` with
data.rollouts=RUN; to train on earlier samples again, data.replay_steps (docs/data.md).

For example:

    jetrl replay runs/demo                rerun the steps since the last checkpoint
    jetrl replay runs/demo --plan bf16    is it FP8?
    jetrl replay runs/demo --device cpu   is it the GPU?

The run directory is not changed. Exit code 4 if a loss, gradient or sampled logit is not finite
again, 0 if all are finite.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from jetrl.cli.arguments import DEVICES, PLANS, add_trust_argument, print_json
from jetrl.errors import NonFiniteError

_NOTHING = "nothing to replay: the run is finished, and its last checkpoint is of its last step"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="RUN", help="run directory, or a run name under runs")
    add("--plan", choices=PLANS, help="precision preset (default: from the run)")
    add("--device", choices=DEVICES, help="device (default: from the run)")
    add_trust_argument(parser)
    add("--json", action="store_true", help="a JSON object")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from jetrl.cli.runs import find_run
    from jetrl.runs.format import visible
    from jetrl.session.replay import replay

    with contextlib.redirect_stdout(sys.stderr):  # the console of the run
        step, problem = replay(find_run(args.path, Path("runs")), args.plan, args.device)
    if args.json:
        print_json({"finite": not problem, "step": step, "problem": problem}, indent=1)
    else:
        finite = f"every value is finite up to step {step}" if step else _NOTHING
        print(visible(problem, newlines=True) or finite)
    return NonFiniteError.exit_code if problem else 0
