"""Supervised training on a task's worked answers: a warm start for reinforcement learning.

For example:

    jetrl sft recipes/gsm8k-smoke.toml sft.steps=100 run.name=warm --out models/warm
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jetrl.cli.train import add_recipe_arguments, closing_lines, recipe_settings, settings_help
from jetrl.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jetrl sft [RECIPE] [KEY=VALUE ...] [--out DIR]"
    add_recipe_arguments(parser)
    parser.add_argument("--out", metavar="DIR", help="also write the model here")
    parser.epilog = settings_help()


def run(args: argparse.Namespace) -> int:
    settings = recipe_settings(args.words)
    if settings.sft.steps == 0:
        raise UserError("sft.steps = 0: say how many updates, as in sft.steps=100")
    if args.out is not None and Path(args.out).exists() and not _is_empty(Path(args.out)):
        raise UserError(f"--out {args.out}: in use; name another directory")  # before the training
    from jetrl import loop

    try:
        result = loop.sft(settings, out=args.out)
    except KeyboardInterrupt:
        again = "it is not resumed: start again, under another run.name"
        print(f"supervised training interrupted; {again}", file=sys.stderr)
        return 130
    print(closing_lines(result, settings))
    return 0


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
