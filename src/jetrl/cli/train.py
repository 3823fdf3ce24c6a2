"""Reinforcement learning from a recipe: sample, score, update, until the steps are done.

For example:

    jetrl train                                       the demo, on a CPU, in minutes
    jetrl train recipes/gsm8k-smoke.toml              a recipe, by path or (packaged) by name
    jetrl train demo run.name=mine train.lr=1e-3      with settings changed
    jetrl train demo run.name=mine --resume           go on with a run that was cut, as it was set
    torchrun --nproc-per-node 4 -m jetrl train ...    the same run on four GPUs, one process each

Ctrl-C and SIGTERM leave a checkpoint and a report; a second one leaves at once. Exit codes: 0 done,
1 stopped, 2 bad input, 75 run.max_hours, 130 Ctrl-C, 143 SIGTERM; all of them: docs/reliability.md.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jetrl.cli.arguments import table, tell
from jetrl.cli.ranks import goes_on, joined
from jetrl.cli.resumed import unused_of_recipe
from jetrl.distributed.world import launched_rank, launched_size, started_by_torchrun
from jetrl.errors import Terminated, TimeLimitReached, UserError

if TYPE_CHECKING:
    from jetrl.session import RunResult
    from jetrl.settings.loading import Settings
    from jetrl.types import Prompt, Sample

RUNS_ON_RANKS = True
DEFAULT_RECIPE = "demo"
_GIB_OF_CUDA = 1.25  # of a GPU's memory by its name: the driver's and a context's, about
_MEANING = 58  # column where a setting's meaning starts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from jetrl.settings.loading import packaged_recipes

    parser.usage = "jetrl train [RECIPE] [KEY=VALUE ...] [--resume] [--dry-run | --preflight]"
    add_recipe_arguments(parser)
    add_resume_argument(parser)
    add_dry_run_argument(parser)
    parser.add_argument(
        "--preflight",
        action="store_true",
        help="sample a few prompts, show what they are worth, and stop: exit code 1 with a warning",
    )
    names = ", ".join(packaged_recipes())
    parser.epilog = f"packaged recipes: {names}\n\n{settings_help()}"


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the positional arguments of a command: a recipe, and settings that replace its own."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RECIPE | KEY=VALUE",
        help="a TOML file or a packaged recipe's name, then settings as section.key=value",
    )


def add_resume_argument(parser: argparse.ArgumentParser) -> None:
    """Add --resume."""
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last good checkpoint with the run's own settings, and overrides",
    )


def add_dry_run_argument(parser: argparse.ArgumentParser) -> None:
    """Add --dry-run, and the options for GPUs that this machine does not have."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print settings, precision plan and memory plan, and stop",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="with --dry-run: the memory plan of a run on N GPUs, one process each",
    )
    parser.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GIB",
        help="with --dry-run: plan for GPUs of so much memory, as 80 or 141, instead of this "
        "machine's",
    )


def planned_gpus(args: argparse.Namespace) -> PlannedGPUs:
    """Return the GPUs that the options --gpus and --gpu-memory name.

    Raises:
        UserError: An option without --dry-run, or a number that is not above 0.
    """
    for name, value in (("--gpus", args.gpus), ("--gpu-memory", args.gpu_memory)):
        if value is not None and not args.dry_run:
            raise UserError(f"{name} goes with --dry-run: a run has the GPUs that torchrun starts")
        if value is not None and not value > 0:
            raise UserError(f"{name} {value:g}: a number above 0 is expected")
    return PlannedGPUs(args.gpus or launched_size(), args.gpu_memory)


@dataclass(frozen=True)
class PlannedGPUs:
    """The GPUs that a dry run plans for.

    Attributes:
        count: How many: as many as torchrun has started, unless --gpus says otherwise.
        gib: The memory of one; None: that of this machine's GPU.
    """

    count: int = 1
    gib: float | None = None


def recipe_settings(words: Sequence[str], resume: bool = False) -> Settings:
    """Return the settings of the words `[RECIPE] [KEY=VALUE ...]`; without a recipe, the demo's.

    Args:
        words: The recipe and the overrides.
        resume: True to read the run's own config.toml: the recipe then only says which run, and
            what it gives otherwise is printed.

    Raises:
        UserError: A second word is no override, or `load_config` refuses the settings.
    """
    from jetrl.runs.directory import RunDirectory
    from jetrl.settings.loading import load_config

    overrides = [word for word in words if "=" in word]
    recipes = [word for word in words if "=" not in word]
    if len(recipes) > 1:
        raise UserError(f"two recipes, {recipes[0]} and {recipes[1]}: settings are key=value")
    settings = load_config(recipes[0] if recipes else DEFAULT_RECIPE, overrides)
    own = Path(settings.run.dir) / str(settings.run.name) / "config.toml"
    if resume and own.is_file():
        given, settings = settings, load_config(own, overrides)
        unused = unused_of_recipe(recipes[0], given, settings, own) if recipes else ""
        if unused and launched_rank() == 0:
            tell(unused)
        settings = RunDirectory.settings_of_resume(settings)
    return settings


def settings_help() -> str:
    """Return every setting with type, default and meaning, as wide as the terminal."""
    from jetrl.settings.loading import describe

    width = max(shutil.get_terminal_size((120, 24)).columns, 100)
    lines = ["settings (type, default, meaning; lengths in tokens, times in seconds):"]
    section = ""
    for key, kind, default, words in describe():
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            lines.append("")
        head = f"  {key:32}  {kind} [{default}]"
        if len(head) > _MEANING - 2:
            lines.append(head)
            head = ""
        lines += textwrap.wrap(
            words, width, initial_indent=head.ljust(_MEANING), subsequent_indent=" " * _MEANING
        )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    resume = args.resume or goes_on(recipe_settings(args.words))
    settings, gpus = recipe_settings(args.words, resume), planned_gpus(args)
    if (args.dry_run or args.preflight) and launched_rank() > 0:
        return 0  # rank 0 shows it
    if args.dry_run:
        for part in dry_run(settings, gpus=gpus):
            print(part)
        return 0
    if args.preflight:
        return run_preflight(settings)
    from jetrl import loop

    try:
        with joined(settings, resume):
            result = loop.train(settings, resume=resume)
    except (KeyboardInterrupt, Terminated) as end:
        return say_how_to_go_on(end, "train", args, settings)
    print(closing_lines(result, settings))
    return exit_code(result)


def exit_code(result: RunResult) -> int:
    """Return the time limit's exit code where the limit ended the run, otherwise 0."""
    return TimeLimitReached.exit_code if result.stopped else 0


def say_how_to_go_on(
    end: BaseException, command: str, args: argparse.Namespace, settings: Settings
) -> int:
    """Print where the report of an ended run is and how to resume it; return the exit code.

    Args:
        end: The signal that ended the run.
        command: The command that ran: train or sft.
        args: The arguments of the command.
        settings: The settings of the run.
    """
    options = ["--task", "reward"] if getattr(args, "task", None) == "reward" else []
    options += ["--out", args.out] if getattr(args, "out", None) else []
    again = shlex.join(["jetrl", command, *args.words, *options, "--resume"])
    report = Path(settings.run.dir) / str(settings.run.name) / "report.html"
    if report.is_file():
        tell(f"report  {report}")
    what, code = ("terminated", 143) if isinstance(end, Terminated) else ("interrupted", 130)
    tell(f"{what}; to go on: {again}")
    return code


def run_preflight(settings: Settings) -> int:
    """Print a few prompts with the model's answers and their rewards, then warnings."""
    from jetrl.session.preflight import preflight

    result = preflight(settings)
    for _, samples in itertools.groupby(result.samples, key=lambda sample: sample.group):
        group = list(samples)
        lines = [line for sample in group for line in sample_lines(sample)]
        print("\n".join([*prompt_lines(group[0].prompt), *lines, ""]))
    if settings.sft.steps:
        print(f"the model is as it is before its {settings.sft.steps} supervised updates")
    return say_warnings(result.warnings)


def say_warnings(warnings: Sequence[str]) -> int:
    """Print the warnings of a preflight and return its exit code."""
    for warning in warnings:
        print(f"warning: {warning}")
    if not warnings:
        print("nothing to warn of")
    return 1 if warnings else 0


def sample_lines(sample: Sample) -> list[str]:
    """Return lines with a completion's reward, the facts about it, and its text."""
    from jetrl.runs.format import number, visible

    completion = sample.completion
    facts = [f"reward {number(sample.score.reward)}"]
    facts += [f"{name} {number(value)}" for name, value in sample.score.parts.items()]
    facts.append(f"{len(completion.token_ids)} tokens")
    if len(completion.turns) > 1:
        facts.append(f"{len(completion.turns)} turns")
    if completion.finish_reason == "length":
        facts.append("cut off")
    if sample.failure:
        facts.append(f"not judged: {sample.failure}")
    text = visible(completion.text, newlines=True)
    return ["  " + visible(", ".join(facts)), textwrap.indent(text or "(nothing)", "    ")]


def prompt_lines(prompt: Prompt) -> list[str]:
    """Return lines with a prompt's name, the right answer, and the text for the model."""
    from jetrl.runs.format import clip, visible

    text = prompt.text or ""
    if prompt.messages is not None:
        text = "\n".join(f"{m['role']}: {m['content']}" for m in prompt.messages)
    answer = "" if prompt.answer is None else f", answer {clip(prompt.answer, 80)}"
    head = visible(f"prompt {prompt.id}{answer}")
    return [head, textwrap.indent(visible(text, newlines=True).rstrip(), "    ")]


def closing_lines(result: RunResult, settings: Settings) -> str:
    """Return lines that say where report, checkpoint and model are, and what to type next."""
    from jetrl.runs import RunDirectory

    paths = {
        "run": result.run_path,
        "report": result.report_path,
        "checkpoint": result.checkpoint_path,
        "model": result.model_path,
    }
    lines = [table([(label, str(path)) for label, path in paths.items() if path is not None])]
    if result.model_path is not None:
        lines.append(f"sample from it: {sample_command(result.model_path, settings)}")
        reading = RunDirectory(result.run_path).reading()
        if reading:
            lines.append(f"in this task {reading}")
    return "\n".join(lines)


def sample_command(model: Path, settings: Settings) -> str:
    """Return a command that samples from a model: a sum for the demo's task, else PROMPT."""
    prompt = "12+07=" if settings.task.name == "arithmetic" else "PROMPT"
    chat = " --chat" if (model / "chat_template.jinja").is_file() else ""
    return f"jetrl sample {shlex.quote(str(model))}{chat} '{prompt}'"


def dry_run(
    settings: Settings, pairs: bool = False, gpus: PlannedGPUs = PlannedGPUs()
) -> Iterator[str]:
    """Yield the resolved settings (TOML), the precision plan by role, and the memory plan.

    Args:
        settings: The settings of the run.
        pairs: True to plan the training of a reward model.
        gpus: The GPUs that are planned for; by default this machine's.

    Raises:
        UserError: With prompts as long as answers the run would not fit on this machine; settings
            and precision plan have been yielded before.
    """
    from jetrl.memory.device import free_bytes
    from jetrl.memory.fitting import check_fits
    from jetrl.memory.plan import GIB, OtherModels, Workload
    from jetrl.memory.table import shown
    from jetrl.precision import PrecisionPlan
    from jetrl.session.building import choose_device, model_config
    from jetrl.session.reward_training import plan_reward_memory
    from jetrl.settings.loading import to_toml

    plan = PrecisionPlan.from_settings(settings.precision, settings.sampler_deviation)
    config = model_config(settings)
    yield to_toml(settings)
    yield f"# precision plan: {plan.name}"
    yield table(plan.describe(), indent="#   ") + "\n"
    device, load = choose_device(settings.run.device), Workload.of(settings, config)
    free = free_bytes(device)
    if gpus.gib is not None:
        device, free = "cuda", int((gpus.gib - _GIB_OF_CUDA) * GIB)
    elif gpus.count > 1 and device == "cpu" and not started_by_torchrun():
        device, free = "cuda", None  # of GPUs that are somewhere else
    try:
        if pairs:
            fitted = plan_reward_memory(settings, load.tokens, device, free, gpus.count)
        else:
            others = OtherModels.of(settings)
            fitted = check_fits(settings, config, others, load, device, free, gpus.count)
    except UserError as error:
        raise UserError(f"with prompts as long as answers, {error}") from None
    each = f" of each of {gpus.count} GPUs" if gpus.count > 1 else ""
    yield f"# memory plan{each}, with prompts as long as answers"
    yield shown(fitted.plan, indent="#   ")
