"""Run again what gave a NaN or an infinity, and say which operation gave the first one.

For example:

    jetrl replay runs/demo/nonfinite/step_000007               as the run did it
    jetrl replay runs/demo/nonfinite/step_000007 --plan bf16   is it FP8?
    jetrl replay runs/demo/nonfinite/step_000007 --device cpu  is it the GPU?

A run leaves such a folder when a loss, a gradient or the logits of a sample are not finite
(train.on_nonfinite says what becomes of the run). No weight is changed. Exit code 4 if it happens
again, 0 if everything is finite.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from jetrl.cli.arguments import DEVICES, PLANS, add_trust_argument, print_json, table
from jetrl.errors import NonFiniteError

if TYPE_CHECKING:
    from jetrl.session.reproduction import Replay

SHOWN = 5  # gradient norms


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FOLDER", help="runs/NAME/nonfinite/step_NNNNNN")
    parser.add_argument("--plan", choices=PLANS, help="another precision preset than the run's")
    parser.add_argument("--device", choices=DEVICES, help="another device than the run's")
    add_trust_argument(parser)
    parser.add_argument("--json", action="store_true", help="a JSON object")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from jetrl.runs.format import visible
    from jetrl.session.reproduction import replay

    replayed = replay(Path(args.path), args.plan, args.device)
    if args.json:
        print_json(dataclasses.asdict(replayed) | {"finite": replayed.finite}, indent=1)
    else:
        print(visible(as_text(replayed), newlines=True))
    return 0 if replayed.finite else NonFiniteError.exit_code


def as_text(replayed: Replay) -> str:
    """Return as a table what the run met, and what the replay met."""
    facts = replayed.facts
    when = f"step {facts.step}, {facts.kind}"
    if facts.kind == "update":
        when += f" {facts.update + 1}"
    rows = [
        ("what the run met", f"{when}: {facts.what}"),
        ("first, at the time", facts.first or "it did not happen again when it was repeated"),
        ("first, now", replayed.first or "every value is finite"),
        *((name, f"{value:.6g}") for name, value in replayed.numbers.items()),
        *((f"gradient norm of {name}", f"{norm:.6g}") for name, norm in replayed.norms[:SHOWN]),
    ]
    return table(rows)
