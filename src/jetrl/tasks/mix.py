"""Several tasks as one: prompts drawn by weight, each scored by its own task.

    [task]
    name = "mix"

    [[task.options.tasks]]
    name = "gsm8k"
    path = "data/gsm8k"
    weight = 3

    [[task.options.tasks]]
    name = "reasoning_gym:chain_sum"
    options = { max_terms = 3 }

A prompt carries its task's name (`Prompt.task`), and metrics are kept for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jetrl.errors import UserError
from jetrl.tasks.base import Task
from jetrl.tasks.messages import nearest
from jetrl.tasks.single import get_single_task, read_prompts
from jetrl.types import Prompt, Reply, Score, Turn

KEYS = ("name", "path", "weight", "label", "system_prompt", "options")


class Mix(Task):
    """Several tasks, mixed by weight.

    A step's prompts are shared out by weight, to within one prompt; over the steps the shares are
    exact. Held-out prompts are taken from the start of each task's split, as many of each.

    Args:
        tasks: A table for each task, with `name` and, where needed, `path` and `options` as in
            [task]; `weight` (default 1), the task's share of the prompts of a step; `label`, the
            task's name in metrics (default: the task's own); `system_prompt`, put before the task's
            chat prompts.
    """

    name = "mix"

    def __init__(self, tasks: Sequence[Mapping[str, Any]]) -> None:
        if not isinstance(tasks, Sequence) or not tasks or isinstance(tasks, str):
            raise UserError("task.options.tasks: give one [[task.options.tasks]] table or more")
        self.tasks: dict[str, Task] = {}
        self.weights: dict[str, float] = {}
        self._system_prompts: dict[str, str | None] = {}
        for number, entry in enumerate(tasks):
            self._add(number, entry)
        if sum(self.weights.values()) <= 0:
            raise UserError("task.options.tasks: all weights are 0; at least one must be more")
        mixed = list(self.tasks.values())
        splits = [split for split in mixed[0].splits if all(split in t.splits for t in mixed)]
        self.splits = tuple(splits)
        self.max_turns = max(task.max_turns for task in mixed)
        alphabets = [task.alphabet for task in mixed if task.alphabet is not None]
        if len(alphabets) == len(mixed):
            self.alphabet = "".join(dict.fromkeys("".join(alphabets)))

    def _add(self, number: int, entry: Mapping[str, Any]) -> None:
        where = f"task.options.tasks[{number}]"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise UserError(f"{where}: a table with at least the `name` of a task is expected")
        for key in entry:
            if key not in KEYS:
                raise UserError(f"{where}.{key}: no such key{nearest(str(key), list(KEYS))}")
        weight = entry.get("weight", 1)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise UserError(f"{where}.weight = {weight!r}: give a number")
        if not 0 <= weight < math.inf:
            raise UserError(f"{where}.weight = {weight}: give 0 or more")
        if entry["name"] == "mix":
            raise UserError(f"{where}: a mix in a mix; list its tasks here")
        try:
            options = dict(entry.get("options", {}))
            if entry.get("path") is not None:
                options["path"] = str(entry["path"])
            task = get_single_task(entry["name"], options)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        label = str(entry.get("label", task.label))
        if label in self.tasks:
            raise UserError(
                f"{where}: a second task called {label!r}; give one a `label` of its own"
            )
        self.tasks[label] = task
        self.weights[label] = float(weight)
        self._system_prompts[label] = entry.get("system_prompt")

    def prompts(self, split: str) -> Iterable[Prompt]:
        """Return every task's prompts, one task after the other; their ids are `label/id`."""
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

    def _own(self, prompt: Prompt) -> tuple[Task, Prompt]:
        """Return a prompt's task, and the prompt as that task made it, but for a system prompt."""
        task = self.tasks[prompt.task]
        return task, replace(prompt, id=prompt.id.removeprefix(f"{prompt.task}/"), task="")

    def stops(self, prompt: Prompt) -> tuple[str, ...]:
        task, own = self._own(prompt)
        return task.stops(own)

    def score(self, prompt: Prompt, completion: str) -> float | Score:
        task, own = self._own(prompt)
        return task.score(own, completion)

    def score_turns(self, prompt: Prompt, turns: Sequence[Turn]) -> float | Score:
        task, own = self._own(prompt)
        return task.score_turns(own, turns)

    def step(self, prompt: Prompt, turns: Sequence[Turn], completion: str) -> Reply | None:
        task, own = self._own(prompt)
        return task.step(own, turns, completion) if len(turns) + 1 < task.max_turns else None

    def readable(self, prompt: Prompt, completion: str) -> str:
        task, own = self._own(prompt)
        return task.readable(own, completion)

    def vote(self, prompt: Prompt, completion: str) -> str | None:
        task, own = self._own(prompt)
        return task.vote(own, completion)

    def demonstration(self, prompt: Prompt) -> str | Sequence[Turn] | None:
        task, own = self._own(prompt)
        return task.demonstration(own)

    def preference(self, prompt: Prompt) -> tuple[str, str] | None:
        task, own = self._own(prompt)
        return task.preference(own)

    def self_test(self) -> Iterable[tuple[Prompt, str, float | None]]:
        for label, task in self.tasks.items():
            for prompt, completion, expected in task.self_test():
                yield self._mixed(label, prompt), completion, expected
