"""Supervised training on a task's worked answers: a warm start for reinforcement learning.

For example:

    jetrl sft recipes/gsm8k-smoke.toml sft.steps=100 run.name=warm --out models/warm
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jetrl.cli.train import (
    add_recipe_arguments,
    add_resume_argument,
    closing_lines,
    exit_code,
    recipe_settings,
    say_how_to_go_on,
    settings_help,
)
from jetrl.errors import Terminated, UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jetrl sft [RECIPE] [KEY=VALUE ...] [--out DIR] [--resume]"
    add_recipe_arguments(parser)
    parser.add_argument("--out", metavar="DIR", help="also write the model here")
    add_resume_argument(parser)
    parser.epilog = settings_help()


def run(args: argparse.Namespace) -> int:
    settings = recipe_settings(args.words, args.resume)
    if settings.sft.steps == 0:
        raise UserError("sft.steps = 0: say how many updates, as in sft.steps=100")
    if args.out is not None and Path(args.out).exists() and not _is_empty(Path(args.out)):
        raise UserError(f"--out {args.out}: in use; name another directory")  # before the training
    from jetrl import loop

    try:
        result = loop.sft(settings, out=args.out, resume=args.resume)
    except (KeyboardInterrupt, Terminated) as end:
        return say_how_to_go_on(end, "sft", args, settings)
    print(closing_lines(result, settings))
    return exit_code(result)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
