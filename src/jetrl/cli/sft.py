"""Supervised training on a task's worked answers: a warm start for reinforcement learning. Or, with
`--task reward`, a reward model from its pairs of a better and a worse completion.

For example:

    jetrl sft recipes/gsm8k-smoke.toml sft.steps=100 run.name=warm --out models/warm
    jetrl sft demo --task reward sft.until=none sft.steps=400 run.name=judge --out models/judge
    jetrl sft demo --task reward run.name=judge --resume
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from jetrl.cli.arguments import table
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

if TYPE_CHECKING:
    from jetrl.config import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "jetrl sft [RECIPE] [KEY=VALUE ...] [--task answers|reward] [--out DIR] [--resume]"
    )
    add_recipe_arguments(parser)
    parser.add_argument(
        "--task",
        choices=("answers", "reward"),
        default="answers",
        help="imitate worked answers, or learn from pairs of completions which is better",
    )
    parser.add_argument("--out", metavar="DIR", help="also write the model here")
    add_resume_argument(parser)
    parser.epilog = settings_help()


def run(args: argparse.Namespace) -> int:
    settings = recipe_settings(args.words, args.resume)
    if settings.sft.steps == 0:
        raise UserError("sft.steps = 0: say how many updates, as in sft.steps=100")
    if args.out is not None and Path(args.out).exists() and not _is_empty(Path(args.out)):
        raise UserError(f"--out {args.out}: in use; name another directory")  # before the training
    if args.task == "reward":
        return _reward(args, settings)
    from jetrl import loop

    try:
        result = loop.sft(settings, out=args.out, resume=args.resume)
    except (KeyboardInterrupt, Terminated) as end:
        return say_how_to_go_on(end, "sft", args, settings)
    print(closing_lines(result, settings))
    return exit_code(result)


def _reward(args: argparse.Namespace, settings: Settings) -> int:
    from jetrl.reward_training import train_reward_model

    try:
        result = train_reward_model(settings, args.out, args.resume)
    except (KeyboardInterrupt, Terminated) as end:
        return say_how_to_go_on(end, "sft", args, settings)
    model = args.out or str(result.model_path)
    report = result.run_path / "report.html"
    rows = [
        ("run", str(result.run_path)),
        *([("report", str(report))] if settings.report.enabled else []),
        ("model", model),
        ("held out", f"{result.accuracy:.1%} of {result.pairs} pairs in the right order"),
    ]
    print(table(rows))
    print(f"use it: jetrl train ... reward.model=1.0 reward.model_path={model}")
    return 0


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
