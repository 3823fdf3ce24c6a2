"""Evaluate a model on a task's held-out prompts: mean@n, pass@k and maj@k.

For example:

    jetrl eval runs/demo --samples 4              the run's own task
    jetrl eval models/qwen3-8b --task gsm8k --path data/gsm8k --samples 8 --temperature 0.6
    jetrl eval Qwen/Qwen3-8B --task math500,aime24,gpqa_diamond --samples 16 --temperature 0.6
    jetrl eval runs/mine --trust-task             the run's task is your own Python file

Without --task, options default to those of the run's own evaluations: [eval], its stop strings,
seed and scoring limits. With --task, the default is one greedy completion per prompt (several are
drawn at temperature 1) of up to 1024 tokens (known benchmarks have their usual limit), scored by
two processes with 10 s of CPU time per score.

Benchmarks known by name or hub id: gsm8k, math500, aime24, aime25, amc, gpqa_diamond, mmlu_pro.
They are read with the package `datasets` (pip install 'jetrl[data]'), or from --path.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetrl.cli.arguments import (
    add_model_arguments,
    add_sampling_arguments,
    print_json,
    sampling_params,
    table,
)
from jetrl.errors import UserError
from jetrl.randomness import derive_seed
from jetrl.untrusted import files_named, trust_only

if TYPE_CHECKING:
    from jetrl.models.policy import Policy
    from jetrl.session.evaluate import Evaluation
    from jetrl.settings.sections import Settings, TaskSettings
    from jetrl.tasks import Scorer, Task
    from jetrl.types import SamplingParams


RUNS_ON_RANKS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add(
        "--task",
        help="a built-in task, reasoning_gym:NAME, file.py:Class, or several of them separated by "
        "commas (default: the run's own task with its path, options, split and system prompt)",
    )
    add("--path", help="data file or folder of the task")
    add(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the task, as in [task.options] (repeatable)",
    )
    add("--split", help="split of the task (default: test)")
    add("--prompts", type=int, help="number of prompts, from the first; 0: all")
    add("--samples", type=int, help="completions per prompt")
    add_sampling_arguments(parser, max_tokens=None, temperature=None, top_p=None, seed=None)
    add("--system", metavar="TEXT", help="system prompt")
    add("--threshold", type=float, help="least reward of a solved prompt")
    add("--workers", type=int, help="number of scoring processes")
    add("--timeout", type=float, help="CPU seconds per score")
    add("--json", action="store_true", help="print JSON, with all completions")


def run(args: argparse.Namespace) -> int:
    names = [args.task] if args.task is None else _task_names(args)
    sets = [_one_set(args, name) for name in names]
    for own in sets[1:]:  # report a problem of any set before evaluating the first
        _build_scored(own)[1].close()
    results: dict[str, Evaluation] = {}
    policy: Policy | None = None
    for own in sets:
        task, scorer = _build_scored(own)
        with scorer:
            policy = policy or _opened(args)
            policy.plain_text = own.task.special_tokens_as_text
            results[own.label] = _evaluated(own, policy, task, scorer)
    if args.json:
        objects = {name: _as_object(result) for name, result in results.items()}
        one, *others = objects.values()
        print_json({"sets": objects} if others else one, indent=None)
    elif len(results) == 1:
        print(_as_text(next(iter(results.values())), sets[0].params.n))
    else:
        print(_as_table(results, sets[0].params.n))
    return 0


def _opened(args: argparse.Namespace) -> Policy:
    """Return the policy to evaluate; warn on stderr if its weights are rounded to BF16."""
    from jetrl.cli.opening import find_model, open_policy

    location = find_model(Path(args.model))
    policy = open_policy(args.model, args.plan, args.device)
    if location.run is not None and not location.is_checkpoint and policy.plan.rest != "fp32":
        print(
            f"{location.path} is rounded to BF16, and the run has no checkpoint of its last step: "
            "results may differ slightly from the run's own evaluations, which used FP32 weights",
            file=sys.stderr,
        )
    return policy


@dataclass(frozen=True)
class OneSet:
    """A set of prompts, with the settings of its evaluation."""

    label: str
    args: argparse.Namespace
    task: TaskSettings
    params: SamplingParams


def _task_names(args: argparse.Namespace) -> list[str]:
    """Return the comma-separated names of --task."""
    names = [name.strip() for name in args.task.split(",")]
    if len(set(names)) < len(names) or not all(names):
        raise UserError(f"--task {args.task}: name each set once, separated by commas")
    for option in ("path", "option", "split") if len(names) > 1 else ():
        if getattr(args, option):
            raise UserError(f"--{option} is for one set, but --task names {len(names)}")
    return names


def _one_set(args: argparse.Namespace, name: str | None) -> OneSet:
    """Return the set of a name; None: of the run's own task."""
    own = argparse.Namespace(**vars(args) | {"task": name})
    settings = _own_settings(own)
    fill_in(own, settings)
    params = _sampling_params(own, () if settings is None else settings.rollout.stop)
    return OneSet(name or "", own, _task_settings(own, settings), params)


def _build_scored(one: OneSet) -> tuple[Task, Scorer]:
    from jetrl.tasks import Scorer, build_task

    limits = {"workers": one.args.workers, "timeout_s": one.args.timeout}
    with _typed_files_trusted(one.args):
        task = build_task(one.task)
        return task, Scorer.from_settings(one.task.model_copy(update=limits))


def _evaluated(one: OneSet, policy: Policy, task: Task, scorer: Scorer) -> Evaluation:
    from jetrl.session.evaluate import evaluate_model

    return evaluate_model(
        policy,
        task,
        scorer,
        one.params,
        split=one.task.eval_split,
        num_prompts=one.args.prompts,
        threshold=one.args.threshold,
        system_prompt=one.task.system_prompt,
        max_turns=one.task.max_turns,
    )


def _own_settings(args: argparse.Namespace) -> Settings | None:
    """Return the settings of the run MODEL, whose own task is evaluated; None with --task."""
    from jetrl.settings.loading import load_config

    if args.task is not None:
        return None
    run = _run_of(Path(args.model))
    if run is None:
        raise UserError(
            f"{args.model} is not a run directory, so there is no task to evaluate: add --task NAME"
        )
    return load_config(run / "config.toml")


def _typed_files_trusted(args: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """Return a context that allows imports of the Python files in --task and --option.

    The files named in the settings of the run MODEL need --trust-task.
    """
    if args.trust_task:
        return contextlib.nullcontext()
    return trust_only(files_named([args.task or "", task_options(args.option)]))


def fill_in(args: argparse.Namespace, settings: Settings | None) -> None:
    """Set missing arguments to those of the run's own evaluations, or to the defaults."""
    usual: dict[str, Any] = {
        "prompts": 0,
        "samples": 1,
        "top_p": 1.0,
        "threshold": 1.0,
        "max_tokens": _usual_tokens(args.task),
        "seed": 0,
        "workers": 2,
        "timeout": 10.0,
    }
    if settings is not None:
        own = settings.eval
        usual = {
            "prompts": own.prompts,
            "samples": own.samples,
            "top_p": own.top_p,
            "threshold": own.threshold,
            "max_tokens": own.max_tokens or settings.rollout.max_tokens,
            "seed": derive_seed(settings.run.seed, "eval"),
            "workers": settings.task.workers,
            "timeout": settings.task.timeout_s,
        }
    for name, value in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.temperature is None and settings is not None:
        several_greedy = settings.eval.temperature == 0 and args.samples > 1
        args.temperature = None if several_greedy else settings.eval.temperature


def _usual_tokens(task: str | None) -> int:
    """Return the default of --max-tokens for a task."""
    from jetrl.tasks.questions import SOURCES, benchmark_name

    known = benchmark_name(task or "")
    return SOURCES[known].max_tokens if known else 1024


def _task_settings(args: argparse.Namespace, settings: Settings | None) -> TaskSettings:
    """Return the settings of the task, with --path, --option, --split and --system applied."""
    from jetrl.settings.sections import TaskSettings

    task = TaskSettings(name=args.task) if settings is None else settings.task
    changes: dict[str, Any] = {"options": {**task.options, **task_options(args.option)}}
    given = {"path": args.path, "eval_split": args.split, "system_prompt": args.system}
    changes |= {key: value for key, value in given.items() if value is not None}
    return task.model_copy(update=changes)


def _run_of(model: Path) -> Path | None:
    """Return the run directory that MODEL is or lies in; None: it belongs to no run."""
    folders = (model, *model.absolute().parents[:2])
    return next((folder for folder in folders if (folder / "config.toml").is_file()), None)


def _sampling_params(args: argparse.Namespace, stop: Sequence[str]) -> SamplingParams:
    """Return how to sample; by default greedily, or at temperature 1 for several completions."""
    temperature = args.temperature
    if temperature is None:
        temperature = 0.0 if args.samples == 1 else 1.0
    if temperature == 0 and args.samples > 1:
        raise UserError(
            f"--samples {args.samples} with --temperature 0 draws the same completion each time"
        )
    if args.prompts < 0:
        raise UserError(f"--prompts {args.prompts}: 0 (all) or more")
    return sampling_params(args, args.samples, temperature, stop)


def task_options(options: Sequence[str]) -> dict[str, Any]:
    """Return `KEY=VALUE` words as a dict; a value that is not TOML is a string."""
    values: dict[str, Any] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals or not key:
            raise UserError(f"--option {option!r}: write it as KEY=VALUE")
        try:
            values[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key] = text
    return values


def _as_text(result: Evaluation, samples: int) -> str:
    """Return the results as a table; print the first scoring failure on stderr."""
    num_prompts = len(result.samples) // samples
    from jetrl.runs.format import visible

    rows = [
        ("prompts", str(num_prompts)),
        (f"mean@{samples}", f"{result.mean:.4f}"),
        *((f"pass@{k}", f"{share:.4f}") for k, share in result.pass_at_k.items()),
        *((f"maj@{k}", f"{share:.4f}") for k, share in result.maj_at_k.items() if k > 1),
        ("response length", f"{result.response_length:.1f} tokens"),
        ("cut off", f"{100 * result.clip_ratio:.1f}%"),
    ]
    for name, own in result.by_task.items():
        task = visible(name)
        rows.append((f"{task}: mean@{samples}", f"{own.mean:.4f}"))
        if samples > 1:
            rows.append((f"{task}: pass@{samples}", f"{own.pass_at_k[samples]:.4f}"))
    if result.failures:
        rows.append(("not judged", f"{result.failures} (counted as 0)"))
        reason = next(sample.failure for sample in result.samples if sample.failure)
        print(f"first failure: {visible(reason, newlines=True)}", file=sys.stderr)
    return table(rows)


def _as_table(results: Mapping[str, Evaluation], samples: int) -> str:
    """Return the results of several sets as a table, with their mean in the last line."""
    from jetrl.runs.format import visible

    several = samples > 1
    head = ["", "prompts", f"mean@{samples}"]
    head += [f"pass@{samples}", f"maj@{samples}"] if several else []
    rows: list[list[str]] = []
    for name, result in results.items():
        row = [visible(name), str(len(result.samples) // samples), f"{result.mean:.4f}"]
        if several:
            majority = result.maj_at_k.get(samples)
            row.append(f"{result.pass_at_k[samples]:.4f}")
            row.append("-" if majority is None else f"{majority:.4f}")
        cut, failures = f"{100 * result.clip_ratio:.1f}%", str(result.failures)
        rows.append([*row, f"{result.response_length:.1f}", cut, failures])
    mean = sum(result.mean for result in results.values()) / len(results)
    return table([[*head, "tokens", "cut off", "not judged"], *rows, ["mean", "", f"{mean:.4f}"]])


def _as_object(result: Evaluation) -> dict[str, Any]:
    """Return the results, also by task of a mixture, with every completion, for --json."""
    names = ("mean", "pass_at_k", "maj_at_k", "response_length", "clip_ratio", "failures")
    return {
        **{name: getattr(result, name) for name in names},
        "tasks": {
            task: {name: getattr(own, name) for name in names}
            for task, own in result.by_task.items()
        },
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
