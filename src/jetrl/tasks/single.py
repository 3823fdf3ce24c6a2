"""A single task by its name: built in, a data set of reasoning-gym, or a class of a user's file.

A mix of several tasks is made of these (mix.py); `registry.get_task` knows both.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from jetrl.errors import UserError
from jetrl.tasks.arithmetic import Arithmetic
from jetrl.tasks.base import Task
from jetrl.tasks.benchmarks import SOURCES, Benchmark, benchmark_name
from jetrl.tasks.dataset import Dataset
from jetrl.tasks.gsm8k import Gsm8k
from jetrl.tasks.messages import check_options, describe_error, nearest
from jetrl.tasks.multiplication import Multiplication
from jetrl.tasks.program import Program
from jetrl.tasks.reasoning import ReasoningGym
from jetrl.tasks.user_files import load_task_class
from jetrl.types import Prompt
from jetrl.users_code import USERS_ERRORS

GSM8K_ON_THE_HUB = "openai/gsm8k"
BUILT_IN: dict[str, type[Task]] = {
    task.name: task for task in (Arithmetic, Dataset, Gsm8k, Multiplication, Program)
}


def get_single_task(name: str, options: dict[str, Any]) -> Task:
    """Return the task of a name, built with its options; see `registry.get_task`."""
    if name.startswith("reasoning_gym:"):
        return ReasoningGym(name.removeprefix("reasoning_gym:"), **options)
    file, colon, class_name = name.rpartition(":")
    if name.endswith(".py"):
        raise UserError(f"task {name}: add the class, as in {name}:MyTask")
    if colon and file.endswith(".py"):
        return build(load_task_class(Path(file), class_name), name, options)
    benchmark = benchmark_name(name)
    if benchmark is not None and name not in BUILT_IN:
        return build(Benchmark, name, {**options, "set": benchmark})
    if name == GSM8K_ON_THE_HUB:
        return build(Gsm8k, name, options)
    if name not in BUILT_IN:
        raise UserError(
            f"unknown task {name!r}{nearest(name, [*BUILT_IN, 'mix', *SOURCES])} "
            "(also possible: reasoning_gym:NAME, file.py:Class)"
        )
    return build(BUILT_IN[name], name, options)


def build(task_class: type[Task], name: str, options: dict[str, Any]) -> Task:
    """Return a task of a class, after a check that the class takes these options.

    Raises:
        UserError: An option is unknown or missing, or the class raised an error.
    """
    parameters = inspect.signature(task_class).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        check_options([p.name for p in parameters if p.kind is not p.VAR_POSITIONAL], options, name)
    for parameter in parameters:
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if required and parameter.name not in options:
            key = "task.path" if parameter.name == "path" else f"task.options.{parameter.name}"
            raise UserError(f"task {name} needs {key}; docs/tasks.md says what it is")
    try:
        return task_class(**options)
    except UserError:
        raise
    except USERS_ERRORS as error:
        arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise UserError(
            f"task {name}: {task_class.__name__}({arguments}) raised {describe_error(error)}"
        ) from error


def read_prompts(task: Task, split: str) -> list[Prompt]:
    """Return all prompts of a split.

    Raises:
        UserError: The task raised this error itself, `prompts` raised another (with file and line),
            or `prompts` gave something that is no `Prompt`.
    """
    try:
        items = task.prompts(split)
        prompts = None if items is None else list(items)
    except UserError:
        raise
    except USERS_ERRORS as error:
        raise UserError(
            f"task {task.label}: prompts({split!r}) raised {describe_error(error)}"
        ) from error
    if prompts is None:
        raise UserError(f"task {task.label}: prompts({split!r}) returned nothing: add the return")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, Prompt):
            raise UserError(
                f"task {task.label}: item {number} of prompts({split!r}) is no Prompt but "
                f"{str(prompt)[:60]!r}; write Prompt(id=..., text=...), from jetrl.types"
            )
    return prompts
