"""Tasks by settings name.

get_task("arithmetic", digits=2)              a built-in
get_task("mix", tasks=[...])                  a weighted mixture of tasks
get_task("reasoning_gym:chain_sum", seed=7)   any reasoning-gym data set
get_task("verifiers:wordle")                  any taskset of verifiers, over the task `endpoint`
get_task("mine.jsonl")                        your data: the task `dataset` with this path
get_task("my_task.py:MyTask", path="data/")   a class in your file
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from jetrl.errors import UserError, nearest
from jetrl.files import problem_of
from jetrl.settings.section import NonNegativeFloat, Section, Text
from jetrl.settings.sections import TaskSettings
from jetrl.tasks.base import (
    Answer,
    CallResult,
    RewardCall,
    Task,
    TrainerState,
    check_options,
    check_values,
    naming_errors,
    option_key,
)
from jetrl.tasks.dataset import Dataset
from jetrl.tasks.endpoint import Endpoint
from jetrl.tasks.questions import SOURCES, Benchmark, Gsm8k, benchmark_name
from jetrl.tasks.reasoning import ReasoningGym
from jetrl.tasks.rows import SUFFIXES
from jetrl.tasks.shapes import Shapes
from jetrl.tasks.text import RawText
from jetrl.tasks.toys import Arithmetic
from jetrl.tasks.user_files import PREFIX, live, load_task_class
from jetrl.types import Json, Prompt, Reply, Turn

_TASKS: tuple[type[Task], ...] = (Arithmetic, Dataset, Endpoint, Gsm8k, RawText, Shapes)
OWN = (*_TASKS, Benchmark, ReasoningGym)  # a user's class may have any annotations


def build(task_class: type[Task], name: str, options: Json) -> Task:
    """Build a task from its class; raise UserError for an unknown, missing or wrong option."""
    parameters = inspect.signature(task_class).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        check_options([parameter.name for parameter in named], options, name)
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in options:
            key = option_key(parameter.name)
            raise UserError(f"task {name} needs {key}; docs/tasks.md says what it is")
    if task_class in OWN:
        check_values(task_class, options)
    arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
    with naming_errors(f"task {name}: {task_class.__name__}({arguments}) raised"):
        return task_class(**options)


def read_prompts(task: Task, split: str) -> list[Prompt]:
    """Return all prompts of a split; raise UserError if the task fails to provide them."""
    with naming_errors(f"task {task.label}: prompts({split!r}) raised"):
        items = task.prompts(split)
        prompts = None if items is None else list(items)
    if prompts is None:
        raise UserError(f"task {task.label}: prompts({split!r}) returned nothing: add the return")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, Prompt):
            raise UserError(
                f"task {task.label}: item {number} of prompts({split!r}) is no Prompt but "
                f"{str(prompt)[:60]!r}; write Prompt(id=..., text=...)"
            )
    return prompts


def first_of_each(prompts: Iterable[Prompt], limit: int) -> list[Prompt]:
    """Return the first `limit` prompts of each mixed task, in order (0: all)."""
    num_seen: Counter[str] = Counter()
    first = []
    for prompt in prompts:
        num_seen[prompt.task] += 1
        if not limit or num_seen[prompt.task] <= limit:
            first.append(prompt)
    return first


def trained_on(task: Task, trained: Iterable[Prompt], held_out: Sequence[Prompt]) -> str:
    """Return a warning if eval prompts are also training prompts, else "".

    Prompts of mixed tasks with weight 0 are not trained on.
    """
    ids: dict[bytes, str] = {}
    for prompt in trained:
        if task.weights.get(prompt.task, 1.0) > 0:
            ids.setdefault(task.content_key(prompt), prompt.id)
    both = [(p.id, ids[key]) for p in held_out if (key := task.content_key(p)) in ids]
    if not both:
        return ""
    evaluated, known = both[0]
    return (
        f"{len(both):,} of {len(held_out):,} evaluation prompts are also trained on, such as "
        f"{evaluated} (in training: {known}): the evaluation overstates what the model can do; "
        "remove them from one of the splits"
    )


class _MixedTask(Section):
    """A table of `task.options.tasks`."""

    name: Text
    path: str | None = None
    weight: NonNegativeFloat = 1.0
    label: str | None = None
    system_prompt: str | None = None
    options: Json = Field(default_factory=dict)


def _asking_own(method: Callable[..., Any]) -> Any:
    """Return a method of `Mix` that asks a prompt's task, which gets the id that it gave."""

    def ask(mix: Mix, prompt: Prompt, *rest: Any) -> Any:
        asked = getattr(mix.tasks[prompt.task], method.__name__)
        return asked(_of_own_task(prompt), *rest)

    return ask


def _of_own_task(prompt: Prompt) -> Prompt:
    return replace(prompt, id=prompt.id.removeprefix(f"{prompt.task}/"), task="")


class Mix(Task):
    """A weighted mixture of tasks.

    Prompts per step are split by weight, to within one prompt; over many steps the fractions are
    exact. Eval prompts come from the start of each task's split, the same number from each.

    Args:
        tasks: A table per task, with `name`, and `path` and `options` as in [task]; `weight`
            (default 1), its share of a step's prompts; `label`, its name in metrics (default: the
            task's own, of rows the file's); `system_prompt`, put before its chat prompts.
    """

    name = "mix"

    def __init__(self, tasks: Sequence[Json]) -> None:
        if not isinstance(tasks, list | tuple) or not all(
            isinstance(t, Mapping) for t in tasks or [0]
        ):
            raise UserError("task.options.tasks: give one [[task.options.tasks]] table or more")
        self.tasks: dict[str, Task] = {}
        self.weights: dict[str, float] = {}
        self._system_prompts: dict[str, str | None] = {}
        for number, entry in enumerate(tasks):
            self._add(number, entry)
        if sum(self.weights.values()) <= 0:
            raise UserError("task.options.tasks: all weights are 0; at least one must be more")
        mixed = list(self.tasks.values())
        self.reward_calls = tuple(
            replace(call, task=label)
            for label, task in self.tasks.items()
            for call in task.reward_calls
        )
        self.splits = tuple(s for s in mixed[0].splits if all(s in task.splits for task in mixed))
        self.max_turns = max(task.max_turns for task in mixed)
        self.partial_credit = any(task.partial_credit for task in mixed)
        alphabets = [task.alphabet for task in mixed if task.alphabet is not None]
        if len(alphabets) == len(mixed):
            self.alphabet = "".join(dict.fromkeys("".join(alphabets)))

    def _add(self, number: int, entry: Json) -> None:
        where = f"task.options.tasks[{number}]"
        for key in entry:
            if key not in _MixedTask.model_fields:
                near = nearest(str(key), _MixedTask.model_fields)
                raise UserError(f"{where}.{key}: no such key{near}")
        try:
            mixed = _MixedTask.model_validate(entry, strict=True)
        except ValidationError as error:
            raise UserError(f"{where}.{problem_of(error)}") from None
        if mixed.name == "mix":
            raise UserError(f"{where}: a mix in a mix; list its tasks here")
        try:
            task = get_task(mixed.name, **with_path(mixed.options, mixed.path))
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        if isinstance(task, Endpoint):
            raise UserError(f"{where}: the episodes of a harness cannot be mixed with other tasks")
        label = mixed.label or task.label  # the prompt order depends on it
        shown = _shown(label)
        if shown == self.name:
            raise UserError(f"{where}: {shown!r} is the name of the whole mix; give it a `label`")
        if shown in map(_shown, self.tasks):
            raise UserError(f"{where}: a second task called {shown!r}; give one a `label`")
        self.tasks[label] = task
        self.weights[label] = mixed.weight
        self._system_prompts[label] = mixed.system_prompt

    def prompts(self, split: str) -> Iterable[Prompt]:
        """Return the prompts of all tasks in order; ids are `label/id`."""
        self.check_split(split)
        for label, task in self.tasks.items():
            prompts = read_prompts(task, split)
            if not prompts:
                raise UserError(f"task.options.tasks: {label} has no prompts in split {split!r}")
            for prompt in prompts:
                yield self._mixed(label, prompt)

    def _mixed(self, label: str, prompt: Prompt) -> Prompt:
        messages, system = prompt.messages, self._system_prompts[label]
        if system is not None:
            if messages is None or any(message.get("role") == "system" for message in messages):
                what = "is plain text" if messages is None else "has a system message of its own"
                raise UserError(f"{label} has a system_prompt, but its prompt {prompt.id!r} {what}")
            messages = ({"role": "system", "content": system}, *messages)
        return replace(prompt, id=f"{label}/{prompt.id}", messages=messages, task=label)

    def content_key(self, prompt: Prompt) -> bytes:
        """Return the hash without the task's `system_prompt`: tasks may share questions."""
        if prompt.messages is not None and self._system_prompts[prompt.task] is not None:
            prompt = replace(prompt, messages=prompt.messages[1:])
        return self._own_content_key(prompt)

    stops = _asking_own(Task.stops)
    _own_content_key = _asking_own(Task.content_key)
    score = _asking_own(Task.score)
    score_turns = _asking_own(Task.score_turns)
    score_alone = _asking_own(Task.score_alone)
    readable = _asking_own(Task.readable)
    vote = _asking_own(Task.vote)
    demonstration = _asking_own(Task.demonstration)
    preference = _asking_own(Task.preference)
    _own_step = _asking_own(Task.step)

    def call_rewards(
        self, call: RewardCall, answers: Sequence[Answer], state: TrainerState
    ) -> CallResult:
        own = [replace(answer, prompt=_of_own_task(answer.prompt)) for answer in answers]
        return self.tasks[call.task].call_rewards(replace(call, task=""), own, state)

    def step(self, prompt: Prompt, turns: Sequence[Turn], completion: str) -> Reply | None:
        over = len(turns) + 1 >= self.tasks[prompt.task].max_turns
        return None if over else self._own_step(prompt, turns, completion)

    def self_test(self) -> Iterable[tuple[Prompt, str, float | None]]:
        for label, task in self.tasks.items():
            for prompt, completion, expected in task.self_test():
                yield self._mixed(label, prompt), completion, expected


def _shown(label: str) -> str:
    """Return a label as names of metrics have it (`runs.metrics`)."""
    return re.sub(r"[<>\s]", "_", label.rpartition("/")[2])


def get_task(name: str, /, *, path: str | Path | None = None, **options: Any) -> Task:
    """Return the task for a name, built with its options (`[task.options]` in a recipe).

    Raises UserError if the task or an option is unknown (with a suggestion), a file does not import
    or lacks the class (with file and line), or a package or data is missing.
    """
    options = with_path(options, path)
    if name.startswith("reasoning_gym:"):
        dataset = name.removeprefix("reasoning_gym:")
        return build(ReasoningGym, name, {**options, "dataset": dataset})
    if name.startswith("verifiers:"):
        return build(Endpoint, name, {**options, "harness": name})
    if name.startswith(PREFIX):
        task = live(name, "task.name")
        if not isinstance(task, Task):
            return build(task, name, options)
        check_options([], options, f"{name} (an instance)")
        return task
    file, colon, class_name = name.rpartition(":")
    if name.endswith(".py"):
        raise UserError(f"task {name}: add the class, as in {name}:MyTask")
    if colon and file.endswith(".py"):
        return build(load_task_class(Path(file), class_name), name, options)
    if name in BUILT_IN:
        return build(BUILT_IN[name], name, options)
    benchmark = benchmark_name(name)
    if benchmark is None and (Path(name).suffix in SUFFIXES or Path(name).expanduser().is_dir()):
        if path is not None:
            raise UserError(f"task {name} names rows, and so does task.path = {path}: give one")
        return build(Dataset, "dataset", {**options, "path": name})
    if benchmark is None:
        raise UserError(
            f"unknown task {name!r}{nearest(name, [*BUILT_IN, *SOURCES])} (also possible: rows "
            "such as mine.jsonl, reasoning_gym:NAME, file.py:Class)"
        )
    return build(Benchmark, name, {**options, "set": benchmark})


def with_path(options: Mapping[str, Any], path: str | Path | None) -> Json:
    """Return a task's options including its path, if any."""
    return {**options} if path is None else {**options, "path": str(path)}


def build_task(settings: TaskSettings) -> Task:
    """Return a run's task; raises UserError like `get_task`."""
    return get_task(settings.name, **with_path(settings.options, settings.path))


BUILT_IN: dict[str, type[Task]] = {task.name: task for task in _TASKS}
BUILT_IN |= {"openai/gsm8k": Gsm8k, "mix": Mix}
