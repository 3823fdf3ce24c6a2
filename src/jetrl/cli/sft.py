"""Fine-tune on a task's demonstrations, for example as a warm start for reinforcement learning.

With `--task reward`, train a reward model on a task's preference pairs; with `--task dpo`, train
the model itself on them. With task=text, continue pre-training on raw text (docs/data.md).

For example:

    jetrl sft recipes/gsm8k-smoke.toml sft.steps=100 run.name=warm --out models/warm
    jetrl sft demo --task reward sft.until=none sft.steps=400 run.name=judge --out models/judge
    jetrl sft demo --task reward run.name=judge --resume
    jetrl sft model.path=BASE task=text task.path=books/ sft.steps=1000 --out models/more
    jetrl sft demo --task dpo sft.until=none sft.dpo_beta=0.1 sft.lr=1e-5 run.name=preferred
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from jetrl.cli.arguments import table
from jetrl.cli.train import (
    add_recipe_arguments,
    on_ranks,
    opened,
    print_dry_run,
    say_result,
    settings_help,
)
from jetrl.errors import UserError

if TYPE_CHECKING:
    from jetrl.session.supervised import PairResult
    from jetrl.settings.loading import Settings

RUNS_ON_RANKS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.usage = "jetrl sft [RECIPE] [KEY=VALUE ...] [--task answers|reward|dpo] [--out DIR]"
    parser.usage += " [--resume] [--dry-run]"
    add_recipe_arguments(parser)
    add(
        "--task",
        choices=("answers", "reward", "dpo"),
        default="answers",
        help="train on demonstrations, or a reward model or (dpo) the policy on preference pairs",
    )
    add("--out", metavar="DIR", help="write a copy of the model to DIR")
    parser.epilog = settings_help()


def run(args: argparse.Namespace) -> int:
    settings, resume = opened(args)
    for word in args.words:
        key = word.partition("=")[0].strip()
        if key in ("train.lr", "train.warmup_steps", "train.schedule"):
            name = key.replace("train.", "sft.")
            raise UserError(f"override {word!r} has no effect: supervised updates read {name}")
        if key == "sft.dpo_beta" and args.task != "dpo":
            raise UserError(f"override {word!r} has no effect without --task dpo")
    if settings.sft.steps == 0:
        raise UserError("sft.steps = 0: set the number of updates, as in sft.steps=100")
    out = Path(args.out or "")
    if args.out and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"--out {args.out}: already in use; choose another directory")
    if args.dry_run:
        return print_dry_run(args, settings, resume)
    from jetrl import loop
    from jetrl.session.supervised import train_dpo, train_reward_model

    with on_ranks(args, settings, resume) as stopped:
        if args.task == "answers":
            return say_result(loop.sft(settings, out=args.out, resume=resume), settings)
        train = train_dpo if args.task == "dpo" else train_reward_model
        print(_describe(args, settings, train(settings, args.out, resume)))
        return 0
    return stopped[0]


def _describe(args: argparse.Namespace, settings: Settings, result: PairResult) -> str:
    model, report = args.out or str(result.model_path), result.run_path / "report.html"
    rows = [
        ("run", str(result.run_path)),
        *([("report", str(report))] if settings.report.enabled else []),
        ("model", model),
        ("eval accuracy", f"{result.accuracy:.1%} of {result.pairs} pairs ranked correctly"),
    ]
    lines = [table(rows)]
    if args.task == "dpo":
        return lines[0]
    if settings.adapter.kind is not None:
        lines.append(f"merge the adapter first: jetrl export {model} MERGED --merge")
        model = "MERGED"
    lines.append(f"use it: jetrl train ... reward.model=1.0 reward.model_path={model}")
    return "\n".join(lines)
