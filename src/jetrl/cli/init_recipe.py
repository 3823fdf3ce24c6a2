"""Write a recipe for a model and your data that fits a GPU.

For example:

    jetrl init-recipe Qwen/Qwen3-1.7B                           GSM8K (included)
    jetrl init-recipe Qwen/Qwen3-8B rows.jsonl --gpu-memory 80
    jetrl init-recipe models/mine rows.csv task.options.answer=solution loop.steps=500

If full fine-tuning does not fit, the recipe makes the smallest change that fits (usually adapters,
docs/adapters.md) and lists alternatives. The recipe passes `jetrl train --dry-run`.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jetrl.cli.train import add_gpu_arguments, check_gpu_arguments, planned_machine
from jetrl.errors import UserError
from jetrl.untrusted import files_named, trust_only

if TYPE_CHECKING:
    from jetrl.memory.fitting import Way
    from jetrl.session.open import Machine, RunContext
    from jetrl.settings.loading import Settings

_USUAL = ("train.warmup_steps=5", "loop.steps=200", "eval.every=20", "checkpoint.every=50")
_PROMPTS, _HELD_OUT = 32, 128
_COMMENTS = {
    "adapter.kind": "low-rank adapters on a frozen base; default: train all parameters",
    "train.optimizer_states": "3 bytes per parameter, not 8",
    "task.name": "data file, built-in task (docs/tasks.md) or file.py:Class",
    "task.options.checker": "math | exact | regex | file.py:function (docs/data.md)",
    "rollout.prompts_per_step": "prompts, with samples_per_prompt completions each",
    "rollout.samples_per_prompt": "group size",
    "rollout.max_tokens": "longer completions are truncated",
    "train.lr": "full fine-tuning: about 1e-6; adapters: 2e-5",
    "eval.every": "steps",
    "checkpoint.every": "steps",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jetrl init-recipe MODEL [DATA] [KEY=VALUE ...] [--out FILE]"
    add, words = parser.add_argument, "model directory or hub name, then a task or data file "
    words += "(default: gsm8k), then settings as section.key=value"
    add("words", nargs="+", metavar="MODEL | DATA | KEY=VALUE", help=words)
    add("--out", metavar="FILE", help="output recipe (default: MODEL-DATA.toml)")
    add_gpu_arguments(parser, "plan")


def run(args: argparse.Namespace) -> int:
    from jetrl.settings.loading import load_config, named

    check_gpu_arguments(args)
    given = [word for word in args.words if "=" not in word]
    if not 1 <= len(given) <= 2:
        raise UserError(f"give a model, then a task or data file, not {shlex.join(given)}")
    model, data = [*given, "gsm8k"][:2]
    settings = [word for word in args.words if "=" in word]
    words = [f"model.path={model}", f"task.name={data}", *_checker_of(model, data), *settings]
    out = Path(args.out or f"{named(load_config(None, words)).run.name}.toml")
    if out.exists():
        raise UserError(f"{out} exists: choose another file with --out")
    machine = planned_machine(args, load_config(None, words))
    sizes = [f"rollout.prompts_per_step={_PROMPTS}", "rollout.samples_per_prompt=8"]
    sizes += ["rollout.max_tokens=1024", f"eval.prompts={_HELD_OUT}"]
    words = [f"run.name={out.stem}", *_USUAL, "train.lr=1e-6", *sizes, *words]
    checked, machine, words, others = _fitting(words, machine)
    counts = {"rollout.prompts_per_step": _PROMPTS, "eval.prompts": _HELD_OUT}
    for key, prompts in zip(counts, (checked.prompts, checked.eval_prompts), strict=True):
        if len(prompts) < counts[key] and not any(w.startswith(key) for w in settings):
            words.append(f"{key}={len(prompts)}")
    final = load_config(None, words)
    head = _head(out, shlex.join(["jetrl", "init-recipe", *args.words]), checked, machine, others)
    out.write_text(f"{head}\n{_with_comments(final)}", encoding="utf-8")
    print(f"wrote {out}\nnext: jetrl train {shlex.quote(str(out))} --dry-run")
    return 0


def _checker_of(model: str, data: str) -> list[str]:
    """Return task options for data files and gsm8k, depending on the model's chat template."""
    from jetrl.models import hf
    from jetrl.tasks.rows import SUFFIXES

    rows = Path(data).suffix in SUFFIXES or Path(data).is_dir()
    plain = (rows or data == "gsm8k") and hf.load_tokenizer(model).chat_template is None
    return ["task.options.checker=math"] * rows + ["task.options.format=text"] * plain


def _fitting(
    words: list[str], machine: Machine
) -> tuple[RunContext, Machine, list[str], list[Way]]:
    """Return the run after the smallest change that fits, its machine, words and alternatives."""
    from jetrl.memory.fitting import DoesNotFitError
    from jetrl.session.open import check_run
    from jetrl.settings.loading import load_config

    others: list[Way] = []
    while True:
        settings = load_config(None, words)  # all typed by the user
        try:
            with trust_only(files_named(settings.model_dump())), contextlib.ExitStack() as stack:
                return check_run(settings, stack, False, machine), machine, words, others
        except DoesNotFitError as error:
            if not error.ways:
                raise
            way, *others = sorted(error.ways, key=lambda each: (each.cards, len(each.changes)))
            if "adapter.kind" in way.changes:
                words = ["train.lr=2e-5", *(w for w in words if w != "train.lr=1e-6")]
            words = [*words, *way.overrides]
            machine = replace(machine, cards=way.cards or machine.cards)


def _head(out: Path, command: str, checked: RunContext, machine: Machine, others: list[Way]) -> str:
    """Return the recipe's opening comment: requirements, alternatives, commands."""
    from jetrl.memory.plan import GIB

    cards, needed = machine.cards or 1, checked.memory.plan.needed / GIB
    recipe = shlex.quote(str(out))
    start, gpus, where = "jetrl", "", "one GPU" if machine.device == "cuda" else "memory"
    if cards > 1:
        start, gpus = f"torchrun --nproc-per-node {cards} -m jetrl", f" --gpus {cards}"
        where = f"{cards} GPUs, each"
    lines = [
        f"GRPO on {checked.task.label}, written by `{command}`.",
        "",
        f"Needs: {where} with {needed:.1f} GiB free, by the memory plan.",
        f"Prompts: {len(checked.prompts)} for training, {len(checked.eval_prompts)} for eval.",
        *([""] if others else []),
        *(str(way).replace("it fits", "It also fits", 1) for way in others),
        "",
        f"    jetrl train {recipe} --dry-run{gpus}      settings, precision plan and memory plan",
        f"    jetrl train {recipe} --preflight    a few prompts, completions and rewards first",
        f"    {start} train {recipe}",
    ]
    return "\n".join(f"# {line}".rstrip() for line in lines) + "\n"


def _with_comments(settings: Settings) -> str:
    """Return the explicitly set settings as commented TOML."""
    from jetrl.settings.loading import to_toml

    lines, section = [], ""
    for line in to_toml(settings, defaults=False).splitlines():
        if header := re.fullmatch(r"\[([\w.]+)\]", line):
            section = header[1]
        comment = _COMMENTS.get(f"{section}.{line.partition(' = ')[0]}")
        lines.append(f"{line}  # {comment}" if comment else line)
    return "\n".join(lines).rstrip() + "\n"
