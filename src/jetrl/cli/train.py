"""Train with reinforcement learning from a recipe: sample, score and update, step by step.

For example:

    jetrl train demo                                  the demo, on a CPU, in minutes
    jetrl train mine.toml train.lr=1e-5               your recipe, with one setting changed
    jetrl train model.path=Qwen/Qwen3-1.7B task=gsm8k no recipe: defaults plus these settings
    jetrl train demo run.name=mine --resume           continue an interrupted run
    torchrun --nproc-per-node 4 -m jetrl train ...    the same run on four GPUs, one process each

Ctrl-C and SIGTERM write a checkpoint and a report; a second signal exits immediately. Exit codes:
0 done, 1 stopped, 2 bad input, 75 run.max_hours, 130 Ctrl-C, 143 SIGTERM (docs/reliability.md).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shlex
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetrl.cli.arguments import table, tell
from jetrl.distributed.world import launched_rank, launched_size, started_by_torchrun
from jetrl.errors import Terminated, TimeLimitReached, UserError
from jetrl.untrusted import files_named, trust_only

if TYPE_CHECKING:
    from jetrl.session import RunResult
    from jetrl.session.open import Machine
    from jetrl.settings.loading import Settings
    from jetrl.types import Prompt, Sample

RUNS_ON_RANKS = True
_GIB_OF_CUDA = 1.25  # nominal GPU memory taken by the driver and a CUDA context
_MEANING = 58  # start column of the meaning of a setting
_MOST_CHARACTERS, _MOST_OF_A_VALUE = 800, 40  # limits of the message about unused recipe settings
_LEFT = ("run", "report", "checkpoint", "model")  # outputs of a run
_FIRST = ("task.name", "model.path")  # shown first: they identify a recipe best
_USUAL_GIB = 80  # GPU memory if a dry run plans for a GPU that is not here
_NOTHING_NAMED = """\
no recipe and no settings. For example:

    jetrl train demo                                     about 4 minutes on two CPU cores
    jetrl train qwen3-1.7b-gsm8k                         a packaged recipe (list: jetrl recipes)
    jetrl init-recipe Qwen/Qwen3-1.7B rows.jsonl         write a recipe for a model and your rows
    jetrl train model.path=Qwen/Qwen3-1.7B task=gsm8k    defaults plus these settings"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from jetrl.settings.loading import packaged_recipes

    parser.usage = "jetrl train [RECIPE] [KEY=VALUE ...] [--resume] [--dry-run | --preflight]"
    add_recipe_arguments(parser)
    parser.add_argument(
        "--preflight",
        action="store_true",
        help="sample a few prompts, print the rewards, and stop; exit code 1 on warnings",
    )
    names = ", ".join(packaged_recipes())
    parser.epilog = f"packaged recipes: {names}\n\n{settings_help()}"


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "words",
        nargs="*",
        metavar="RECIPE | KEY=VALUE",
        help="TOML file or name of a packaged recipe, followed by settings as section.key=value",
    )
    add(
        "--resume",
        action="store_true",
        help="resume from the last good checkpoint, with the run's settings and these overrides",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print settings and plans, run all checks that need no weights, and stop",
    )
    add_gpu_arguments(parser, "with --dry-run: plan")
    add(
        "--verbose",
        action="store_true",
        help="with --dry-run: also print settings at their defaults",
    )


def add_gpu_arguments(parser: argparse.ArgumentParser, plan: str) -> None:
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help=f"{plan} the memory of a run on N GPUs, one process each",
    )
    memory = f"{plan} for GPUs with this much memory, such as 80 or 141 (default: this machine's "
    memory += f"GPU; without one, {_USUAL_GIB} for all but tiny models)"
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help=memory)


def check_gpu_arguments(args: argparse.Namespace, plans: bool = True) -> None:
    for name, value in (("--gpus", args.gpus), ("--gpu-memory", args.gpu_memory)):
        if value is not None and not plans:
            raise UserError(f"{name} needs --dry-run: a run uses the GPUs that torchrun starts")
        if value is not None and not value > 0:
            raise UserError(f"{name} {value:g}: must be above 0")


def planned_machine(args: argparse.Namespace, settings: Settings) -> Machine:
    """Return the GPUs to plan for, from --gpus and --gpu-memory, or of this machine."""
    import torch

    from jetrl.memory.plan import GIB
    from jetrl.models.source import model_config
    from jetrl.precision.backend import REFERENCE
    from jetrl.session.building import is_small, lacks_gpu
    from jetrl.session.open import Machine

    count, run = args.gpus or launched_size(), settings.run
    free = int(((args.gpu_memory or _USUAL_GIB) - _GIB_OF_CUDA) * GIB)
    other = Machine("cuda", free, count, elsewhere=True)
    if lacks_gpu(settings):
        return other
    here = Machine.here(settings)
    elsewhere = args.gpu_memory is not None or here.free is None
    if here.device == "cpu" and not started_by_torchrun():
        wanted = run.device == "auto" and run.backend != REFERENCE.name
        elsewhere = elsewhere or count > 1 or (wanted and not is_small(model_config(settings)))
    if elsewhere:
        return other
    absent = args.gpus is not None and not torch.cuda.is_available()
    return replace(here, cards=count, elsewhere=absent)


def recipe_settings(words: Sequence[str], resume: bool = False) -> Settings:
    """Return the settings of `[RECIPE] [KEY=VALUE ...]`; without a recipe, defaults apply.

    A resume reads the run's own config.toml, and reports recipe settings that differ from it.
    """
    from jetrl.runs.directory import settings_of_resume
    from jetrl.settings.loading import load_config, named

    overrides = [word for word in words if "=" in word]
    recipes = [word for word in words if "=" not in word]
    if len(recipes) > 1:
        raise UserError(f"two recipes, {recipes[0]} and {recipes[1]}: write settings as KEY=VALUE")
    if not words:
        raise UserError(_NOTHING_NAMED)
    recipe = recipes[0] if recipes else None
    settings = named(load_config(recipe, overrides))
    own, here = Path(settings.run.dir, str(settings.run.name)), Path(recipe or "").absolute().parent
    # A config.toml in a moved or copied run directory stands for the run in that directory.
    if resume and recipe and (here / "plan.json").is_file() and here.resolve() != own.resolve():
        place = {"dir": str(here.parent), "name": here.name}
        settings = load_config(recipe, overrides, {"run": place})
    own = Path(settings.run.dir, str(settings.run.name), "config.toml")
    if resume and own.is_file():
        place = {"dir": settings.run.dir, "name": str(settings.run.name)}
        given, settings = settings, load_config(own, overrides, {"run": place})
        unused = _unused_of_recipe(recipes[0], given, settings, own) if recipes else ""
        if unused and launched_rank() == 0:
            tell(unused)
        settings = settings_of_resume(settings)
    return settings


def settings_help() -> str:
    """Return help on every setting (type, default, meaning), wrapped to the terminal width."""
    from jetrl.settings.loading import describe

    width = max(shutil.get_terminal_size((120, 24)).columns, 100)
    lines = ["settings (type, default, meaning; lengths in tokens, times in seconds):"]
    section, blanks = "", " " * _MEANING
    for key, kind, default, words in describe():
        if not key.startswith(f"{section}."):
            section = key.split(".")[0]
            lines.append("")
        head = f"  {key:32}  {kind} [{default}]"
        if len(head) > _MEANING - 2:
            lines.append(head)
            head = ""
        first = head.ljust(_MEANING)
        lines += textwrap.wrap(words, width, initial_indent=first, subsequent_indent=blanks)
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    settings, resume = opened(args)
    if args.dry_run:
        return print_dry_run(args, settings, resume)
    if args.preflight:
        return _run_preflight(settings) if launched_rank() == 0 else 0
    from jetrl import loop

    with on_ranks(args, settings, resume) as stopped:
        if not resume:
            _say_time(args.words)
        return say_result(loop.train(settings, resume=resume), settings)
    return stopped[0]


def opened(args: argparse.Namespace) -> tuple[Settings, bool]:
    """Return the settings of `train` or `sft`, and True if the run is resumed."""
    check_gpu_arguments(args, plans=args.dry_run)
    resume = args.resume
    if not resume and started_by_torchrun():
        from jetrl.session import ranks

        settings = recipe_settings(args.words)
        resume = ranks.is_restart(settings)
        if not resume:
            return settings, resume
    return recipe_settings(args.words, resume), resume


def print_dry_run(args: argparse.Namespace, settings: Settings, resume: bool) -> int:
    for part in dry_run(args, settings, resume) if launched_rank() == 0 else ():
        print(part)
    return 0


@contextlib.contextmanager
def on_ranks(args: argparse.Namespace, settings: Settings, resume: bool) -> Iterator[list[int]]:
    """Join any ranks; if a signal ends the body, append its exit code to the yielded list."""
    stopped: list[int] = []
    try:
        if started_by_torchrun():
            from jetrl.session import ranks

            with ranks.joined(settings, resume):
                yield stopped
        else:
            yield stopped
    except (KeyboardInterrupt, Terminated) as end:
        stopped.append(_say_how_to_resume(end, args, settings))


def _say_time(words: Sequence[str]) -> None:
    from jetrl.cli.recipes import description
    from jetrl.settings.loading import packaged_recipes

    name = next((word for word in words if "=" not in word), "")
    takes = description(name).get("takes") if name in packaged_recipes() else None
    if takes:
        print(f"{name}, unchanged, takes {takes}", flush=True)


def _unused_of_recipe(recipe: str, given: Settings, own: Settings, config: Path) -> str:
    """Return a sentence about the recipe's settings that a resumed run does not use, or ""."""
    from jetrl.runs.directory import settings_that_differ
    from jetrl.runs.format import clip, visible
    from jetrl.settings.messages import toml_value

    def word(value: Any) -> str:
        return "none" if value is None else clip(toml_value(value), _MOST_OF_A_VALUE)

    recipes, runs = (settings.model_dump(mode="json") for settings in (given, own))
    differing = settings_that_differ(recipes, runs)
    derived = {"loop.steps"} if given.loop.epochs else set()
    keys = sorted(differing.keys() - derived, key=lambda key: (key not in _FIRST, key))
    unused = [f"{k} = {word(differing[k][0])} (run: {word(differing[k][1])})" for k in keys]
    if not unused:
        return ""
    shown = visible(clip(", ".join(unused), _MOST_CHARACTERS))
    return (
        f"--resume continues with the run's own settings ({config}) and ignores these settings of "
        f"{recipe}: {shown}. To change a setting of the run, add KEY=VALUE"
    )


def say_result(result: RunResult, settings: Settings) -> int:
    """Print the run's outputs; return 0, or the exit code of the time limit if it ended the run."""
    from jetrl.runs.directory import RunDirectory

    model = result.model_path
    paths = {label: getattr(result, f"{label}_path") for label in _LEFT}
    rows = [(label, str(path)) for label, path in paths.items() if path is not None]
    if result.digest:
        rows.append(("digest", result.digest))
    print(table(rows))
    if model is not None:
        prompt = "12+07=" if settings.task.name == "arithmetic" else "PROMPT"
        chat = " --chat" if result.chats else ""
        print(f"sample from it: jetrl sample {shlex.quote(str(model))}{chat} '{prompt}'")
        if reading := RunDirectory(result.run_path).reading():
            print(f"in this task {reading}")
    return TimeLimitReached.exit_code if result.stopped else 0


def _say_how_to_resume(end: BaseException, args: argparse.Namespace, settings: Settings) -> int:
    """Print the report path and the resume command; return the exit code."""
    task = getattr(args, "task", None)  # None: of `train`
    options = ["--task", "reward"] if task == "reward" else []
    options += ["--out", args.out] if task and args.out else []
    again = shlex.join(["jetrl", "sft" if task else "train", *args.words, *options, "--resume"])
    report = Path(settings.run.dir) / str(settings.run.name) / "report.html"
    if report.is_file():
        tell(f"report  {report}")
    what, code = ("terminated", 143) if isinstance(end, Terminated) else ("interrupted", 130)
    tell(f"{what}; to resume: {again}")
    return code


def _run_preflight(settings: Settings) -> int:
    from jetrl.session.step import preflight

    samples, warnings = preflight(settings)
    for _, group in itertools.groupby(samples, key=lambda sample: sample.group):
        first, *others = group
        lines = [line for sample in (first, *others) for line in _sample_lines(sample)]
        print("\n".join([*_prompt_lines(first.prompt), *lines, ""]))
    if settings.sft.steps:
        print(f"this is the model before the {settings.sft.steps} supervised updates")
    print("\n".join(f"warning: {warning}" for warning in warnings) or "no warnings")
    return 1 if warnings else 0


def _sample_lines(sample: Sample) -> list[str]:
    from jetrl.runs.format import number, visible

    completion = sample.completion
    facts = [f"reward {number(sample.score.reward)}"]
    facts += [f"{name} {number(value)}" for name, value in sample.score.parts.items()]
    facts.append(f"{len(completion.token_ids)} tokens")
    if len(completion.turns) > 1:
        facts.append(f"{len(completion.turns)} turns")
    if completion.finish_reason == "length":
        facts.append("truncated")
    if sample.failure:
        facts.append(f"not scored: {sample.failure}")
    text = visible(completion.text, newlines=True)
    return ["  " + visible(", ".join(facts)), textwrap.indent(text or "(nothing)", "    ")]


def _prompt_lines(prompt: Prompt) -> list[str]:
    from jetrl.runs.format import clip, visible
    from jetrl.types.conversation import shown_message

    text = prompt.text or ""
    if prompt.messages is not None:
        text = "\n".join(map(shown_message, prompt.messages))
    answer = "" if prompt.answer is None else f", answer {clip(prompt.answer, 80)}"
    head = visible(f"prompt {prompt.id}{answer}")
    return [head, textwrap.indent(visible(text, newlines=True).rstrip(), "    ")]


def dry_run(args: argparse.Namespace, settings: Settings, resume: bool) -> Iterator[str]:
    """Yield settings and plans; raise UserError if the run would be rejected."""
    from jetrl.memory.plan import shown
    from jetrl.precision.plan import PrecisionPlan, plan_table
    from jetrl.runs.directory import check_start
    from jetrl.session.open import TrainingContext, check_pairs, check_run, check_text
    from jetrl.settings.loading import to_toml

    plan = PrecisionPlan.from_settings(settings.precision)
    if not args.verbose:
        yield "# settings that differ from the defaults (--verbose: all)"
    yield to_toml(settings, changed_only=not args.verbose)
    yield f"# precision plan: {plan.name}"
    yield table(plan_table(plan), indent="#   ") + "\n"
    files = files_named(settings.model_dump()) if resume else ()
    if files:  # untrusted files: docs/security.md
        names = ", ".join(sorted(files))
        yield f"# not checked: a dry run with --resume does not import {names}"
        return
    with contextlib.ExitStack() as stack:
        if resume:
            stack.enter_context(trust_only())
        machine = planned_machine(args, settings)
        task = getattr(args, "task", None)
        if task in ("reward", "dpo"):
            dpo = task == "dpo"
            checked: TrainingContext = check_pairs(settings, resume or None, machine, dpo)
        elif task and settings.task.is_text:
            checked = check_text(settings, resume or None, machine)
        else:
            checked = check_run(settings, stack, resume or None, machine)
    yield f"# memory plan{_of_gpus(args, machine)}"
    yield shown(checked.memory.plan, indent="#   ")
    yield from (f"# {note}" for note in checked.notes)
    unread = [*_unread(settings, resume), *["proofs on the GPU"] * (machine.device != "cpu")]
    if unread:
        yield f"# not checked: {', '.join(unread)}"
    check_start(settings, plan.to_dict(), resume)  # last, after the plans are printed


def _of_gpus(args: argparse.Namespace, machine: Machine) -> str:
    """Return the GPUs of a memory plan in words, if there are several or they are not local."""
    from jetrl.memory.plan import GIB

    several = (machine.cards or 1) > 1
    each = f" of each of {machine.cards} GPUs" if several else ""
    if not machine.elsewhere or machine.free is None or machine.device == "cpu":
        return each
    gib = machine.free / GIB + _GIB_OF_CUDA
    asked = "" if args.gpu_memory else " (this machine has none; to change: --gpu-memory GIB)"
    return f"{each or ' of a GPU'} with {gib:g} GiB{asked}"


def _unread(settings: Settings, resume: bool) -> Iterator[str]:
    """Yield the weights and services that a dry run does not check."""
    unread = {
        f"the weights of {settings.model.path}": settings.model.path,
        "the weights of the reference": settings.reference.path,
        "the weights of the critic": settings.critic.path,
        "the weights of the teacher": settings.teacher.path,
        "the weights of the reward model": settings.reward.model_path,
        f"the tensors of {settings.adapter.path}": settings.adapter.path,
        "the run's checkpoints": resume,
        "the logins of trackers": settings.trackers.names,
    }
    yield from (what for what, there in unread.items() if there)
