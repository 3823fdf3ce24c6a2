"""Evaluate a model on a task's eval set: mean@n, pass@k and maj@k.

For example:

    jetrl eval runs/demo --samples 4              the run's own task
    jetrl eval models/qwen3-8b --task gsm8k --path data/gsm8k --samples 8 --temperature 0.6
    jetrl eval Qwen/Qwen3-8B --task math500,aime24,gpqa_diamond --samples 16 --temperature 0.6
    jetrl eval runs/mine --trust-task             for a task in your own Python file

Without --task, options default to the run's own evaluation settings: [eval], stop strings, seed and
scoring limits. With --task, the default is one greedy completion per prompt (temperature 1 if there
are several) of up to 1024 tokens (known benchmarks use their usual limit), scored by two processes
with 10 s of CPU time per score.

Benchmarks known by name or hub id: gsm8k, math500, aime24, aime25, amc, gpqa_diamond, mmlu_pro.
They are loaded with the `datasets` package (pip install 'jetrl[data]'), or from --path.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jetrl.cli import arguments
from jetrl.distributed.world import started_by_torchrun
from jetrl.errors import UserError
from jetrl.randomness import derive_seed
from jetrl.untrusted import files_named, trust_only

if TYPE_CHECKING:
    from jetrl.cli.opening import ModelLocation
    from jetrl.models.policy import Policy
    from jetrl.session.evaluate import Evaluation
    from jetrl.settings.sections import EvalSettings, Settings, TaskSettings
    from jetrl.tasks import Scorer, Task
    from jetrl.types import Prompt, SamplingParams


RUNS_ON_RANKS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arguments.add_model_arguments(parser)
    tasks = "built-in task, reasoning_gym:NAME, file.py:Class, or several of these separated by "
    tasks += "commas (default: the run's own task with its path, options, split and system prompt)"
    add("--task", help=tasks)
    add("--path", help="data file or folder of the task")
    add(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="task option, as in [task.options] (repeatable)",
    )
    add("--split", help="split of the task (default: test)")
    add("--prompts", type=int, help="number of prompts, taken from the start; 0: all")
    add("--samples", type=int, help="completions per prompt")
    unset = dict.fromkeys(("max_tokens", "temperature", "top_p", "min_p", "seed"))
    arguments.add_sampling_arguments(parser, **unset)
    add("--system", metavar="TEXT", help="system prompt")
    add("--threshold", type=float, help="minimum reward of a solved prompt")
    add("--workers", type=int, help="number of scoring processes")
    add("--timeout", type=float, help="CPU-time limit per score, in seconds")
    add("--json", action="store_true", help="print JSON, with all completions")


def run(args: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        if started_by_torchrun():
            from jetrl.session.ranks import joined_on

            stack.enter_context(joined_on(args.device))
        return _evaluated(args)


def _evaluated(args: argparse.Namespace) -> int:
    """Evaluate on each set of prompts, and print the results."""
    sets = [_one_set(args, name) for name in _task_names(args)]
    for own in sets[1:]:  # report problems of every set before evaluating the first
        _build_scored(args, own)[1].close()
    results: dict[str, Evaluation] = {}
    sizes: list[int] = []
    policy: Policy | None = None
    from jetrl.cli.opening import find_model
    from jetrl.rollout.engine import RolloutEngine
    from jetrl.session.evaluate import evaluate_model
    from jetrl.tasks import read_prompts

    location = find_model(Path(args.model))  # a running run may write newer checkpoints meanwhile
    for own in sets:
        task, scorer = _build_scored(args, own)
        with scorer:
            policy = policy or _opened(args, location)
            policy.plain_text = own.task.special_tokens_as_text
            prompts = read_prompts(task, own.task.eval_split)
            sizes.append(len(prompts))
            _say_which_prompts(args, location, own, task, prompts)
            results[task.label if not args.task else own.task.name] = evaluate_model(
                RolloutEngine(policy),
                task,
                scorer,
                section=own.task,
                own=own.eval,
                params=own.params,
            )
    samples = sets[0].params.n
    if args.json:
        objects = {
            name: {**_as_object(result), "split": own.task.eval_split, "prompts_of_split": size}
            for (name, result), own, size in zip(results.items(), sets, sizes, strict=True)
        }
        one, *others = objects.values()
        arguments.print_json({"sets": objects} if others else one, indent=None)
    else:
        assert policy is not None
        tasks = ", ".join(
            f"{name} ({own.task.eval_split})" for name, own in zip(results, sets, strict=True)
        )
        print(f"{location.path}: task {tasks}, plan {policy.plan.name} on {policy.device.type}")
        print(_as_text(results, samples, sizes))
    return 0


def _say_which_prompts(
    args: argparse.Namespace,
    location: ModelLocation,
    own: OneSet,
    task: Task,
    prompts: list[Prompt],
) -> None:
    """Report on stderr if a file or --prompts has more, or if the run trained on the prompts."""
    from jetrl.settings.loading import load_config
    from jetrl.tasks import build_task, read_prompts
    from jetrl.tasks.registry import first_of_each, trained_on

    split = own.task.eval_split
    about = task.about_split(split) if args.task and not args.split else ""
    if about:
        print(f"{about}; --split all evaluates all of them", file=sys.stderr)
    for part, size in Counter(prompt.task for prompt in prompts).items():
        if args.prompts and size < args.prompts:
            name = f"{part} of task {task.label}" if part else f"task {task.label}"
            print(
                f"--prompts {args.prompts}: {name} has only {size} in split {split}, and all are "
                "evaluated",
                file=sys.stderr,
            )
    if location.run is None:
        return
    # Read the run's training data with its own options: another seed splits the data differently.
    try:
        trained = load_config(location.run / "config.toml").task
        if (trained.path or trained.name) != (own.task.path or own.task.name):
            return
        with _trusting(args, own):
            known = read_prompts(build_task(trained), trained.split)
        problem = trained_on(task, known, first_of_each(prompts, own.eval.prompts))
    except UserError as error:
        problem = f"could not check whether the run was trained on these prompts: {error}"
    if problem:
        print(f"warning: {problem}", file=sys.stderr)


def _opened(args: argparse.Namespace, location: ModelLocation) -> Policy:
    """Return the policy to evaluate; warn on stderr if its weights are rounded to BF16."""
    from jetrl.cli.opening import open_policy
    from jetrl.models.chat_template import set_template_args
    from jetrl.training.checkpoint_files import masters_of

    policy = open_policy(args.model, args.plan, args.device)
    given = arguments.key_values(args.template_arg, "--template-arg")
    set_template_args(policy.tokenizer, given, "--template-arg")
    rounded = location.run is not None and masters_of(location.path) is None
    if rounded and not policy.plan.reads_masters:
        print(
            f"{location.path} is rounded to BF16, and the run's last step has no checkpoint: "
            "results may differ slightly from the run's own evaluations, which used FP32 weights",
            file=sys.stderr,
        )
    return policy


class OneSet(NamedTuple):
    """An eval task with its settings and sampling parameters."""

    task: TaskSettings
    eval: EvalSettings
    params: SamplingParams


def _task_names(args: argparse.Namespace) -> list[str | None]:
    if args.task is None:
        return [None]
    names = [name.strip() for name in args.task.split(",")]
    if len(set(names)) < len(names) or not all(names):
        raise UserError(f"--task {args.task}: name each task once, separated by commas")
    for option in ("path", "option", "split") if len(names) > 1 else ():
        if getattr(args, option):
            raise UserError(f"--{option} applies to one task, but --task names {len(names)}")
    return list(names)


def _one_set(args: argparse.Namespace, name: str | None) -> OneSet:
    """Return the task and settings for a name (None: the run's own task), with options applied."""
    from jetrl.settings.sections import EvalSettings, TaskSettings
    from jetrl.tasks.questions import SOURCES, benchmark_name

    if name is None:
        settings = _own_settings(args)
        task, own, seed = settings.task, settings.eval, derive_seed(settings.run.seed, "eval")
        stop, max_tokens = settings.rollout.stop, own.max_tokens or settings.rollout.max_tokens
    else:
        task, own, seed = TaskSettings(name=name), EvalSettings(prompts=0), 0
        known = benchmark_name(name)
        stop, max_tokens = (), SOURCES[known].max_tokens if known else 1024

    def given(**options: str) -> dict[str, Any]:
        values = {key: getattr(args, option) for key, option in options.items()}
        return {key: value for key, value in values.items() if value is not None}

    options = {**task.options, **arguments.key_values(args.option, "--option")}
    of_task = given(path="path", eval_split="split", system_prompt="system", workers="workers")
    of_task |= given(timeout_s="timeout")
    task = task.model_copy(update={"options": options, **of_task})
    own = own.model_copy(update=given(**{k: k for k in ("prompts", "samples", "threshold")}))
    if own.prompts < 0:
        raise UserError(f"--prompts {own.prompts}: 0 (all) or more")
    if args.temperature == 0 and own.samples > 1:
        raise UserError(
            f"--samples {own.samples} with --temperature 0 samples the same completion each time"
        )
    temperature = own.temperature if args.temperature is None else args.temperature
    if temperature == 0 and own.samples > 1:
        temperature = 1.0  # greedy completions would all be the same
    usual = {"max_tokens": max_tokens, "top_p": own.top_p, "min_p": own.min_p, "seed": seed}
    params = arguments.sampling_params(
        **usual | given(**{key: key for key in (*usual, "top_k")}),
        **{"n": own.samples, "temperature": temperature, "stop": tuple(stop)},
    )
    return OneSet(task, own, params)


def _build_scored(args: argparse.Namespace, one: OneSet) -> tuple[Task, Scorer]:
    """Return task and scorer; files named by the run need --trust-task to be imported."""
    from jetrl.tasks import Scorer, build_task
    from jetrl.tasks.endpoint import Endpoint

    with _trusting(args, one):
        task = build_task(one.task)
        if isinstance(task, Endpoint):
            raise UserError(
                f"task {one.task.name}: jetrl eval plays no episodes of a harness; a run does "
                "with eval.every, or let the harness talk to jetrl serve"
            )
        return task, Scorer.from_settings(one.task, one.params.n)


def _trusting(args: argparse.Namespace, one: OneSet) -> contextlib.AbstractContextManager[None]:
    """Allow imports only of files typed by the user, or of all files with --trust-task."""
    typed = files_named(
        [(args.task and one.task.name) or "", arguments.key_values(args.option, "--option")]
    )
    return contextlib.nullcontext() if args.trust_task else trust_only(typed)


def _own_settings(args: argparse.Namespace) -> Settings:
    """Return the settings of the run that contains MODEL."""
    from jetrl.cli.opening import find_model
    from jetrl.settings.loading import load_config

    run = find_model(Path(args.model)).run
    if run is None:
        raise UserError(
            f"{args.model} is not a run directory, so there is no task to evaluate: add --task NAME"
        )
    return load_config(run / "config.toml")


def _as_text(results: Mapping[str, Evaluation], samples: int, sizes: Sequence[int]) -> str:
    """Return the results as a table with a column per task; print scoring failures on stderr."""
    from jetrl.runs.format import visible

    columns: dict[str, dict[str, str]] = {}
    for (name, result), size in zip(results.items(), sizes, strict=True):
        interval = ""
        if result.interval is not None:
            interval = " (95%: {:.4f} to {:.4f})".format(*result.interval)
        count = len(result.samples) // samples
        column = columns[visible(name)] = {
            "prompts": f"{count} of {size}" if count < size else str(count),
            f"mean@{samples}": f"{result.mean:.4f}{interval}",
            **({"accuracy": f"{result.accuracy:.4f}"} if result.has_partial_credit else {}),
            **{f"pass@{k}": f"{share:.4f}" for k, share in result.pass_at_k.items()},
            **{f"maj@{k}": f"{share:.4f}" for k, share in result.maj_at_k.items() if k > 1},
            "response length": f"{result.response_length:.1f} tokens",
            "truncated": f"{100 * result.clip_ratio:.1f}%",
        }
        for task, own in result.by_task.items():
            column[f"{visible(task)}: mean@{samples}"] = f"{own.mean:.4f}"
            if own.has_partial_credit:
                column[f"{visible(task)}: accuracy"] = f"{own.accuracy:.4f}"
            if samples > 1:
                column[f"{visible(task)}: pass@{samples}"] = f"{own.pass_at_k[samples]:.4f}"
        if result.left_out:
            column["left out"] = (
                f"{result.left_out} of {len(result.samples)} completions (reward None)"
            )
        if result.failures:
            column["not scored"] = f"{result.failures} (counted as 0)"
            reason = next(sample.failure for sample in result.samples if sample.failure)
            print(f"first failure: {visible(reason, newlines=True)}", file=sys.stderr)
    several = len(columns) > 1
    if several:
        mean = sum(result.mean for result in results.values()) / len(results)
        columns["mean"] = {f"mean@{samples}": f"{mean:.4f}"}
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [[name, *(column.get(name, "") for column in columns.values())] for name in names]
    return arguments.table([["", *columns], *rows] if several else rows)


def _as_object(result: Evaluation) -> dict[str, Any]:

    def numbers(own: Evaluation) -> dict[str, Any]:
        names = (
            "mean margin interval accuracy pass_at_k maj_at_k response_length clip_ratio failures"
        )
        return {name: getattr(own, name) for name in names.split()}

    return {
        **numbers(result),
        "tasks": {task: numbers(own) for task, own in result.by_task.items()},
        "samples": [
            {
                "id": sample.prompt.id,
                "completion": sample.completion.text,
                "reward": sample.score.reward,
                "answer": sample.prompt.answer,
                "finish_reason": sample.completion.finish_reason,
                "failure": sample.failure,
            }
            for sample in result.samples
        ],
    }
