"""Reward functions with the signatures of jetrl, TRL or verl, and their weighted sums.

    f(prompt, completion)                                          a number or a Score
    f(completions, prompts, **columns)                             TRL: a list of numbers or None
    f(data_source, solution_str, ground_truth, extra_info)         verl: a number, or {"score": ...}

jetrl and verl functions get one completion, run while others are still being sampled, and may
return {"score": ...}. TRL functions are called once per step with all completions of this process
(whole groups). They get the arguments of TRL's GRPOTrainer: `completions` and `prompts` (texts, or
lists of messages for chat prompts), `completion_ids`, every data column as a list, `trainer_state`,
`log_extra` and `log_metric`. Any function may be async; async TRL functions run concurrently. None
and NaN exclude a function from a completion's sum, as in TRL.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from jetrl.errors import UserError
from jetrl.tasks.base import (
    Answer,
    CallResult,
    RewardCall,
    ScoreError,
    TrainerState,
    describe_error,
    to_number,
    to_score,
)
from jetrl.tasks.rows import value_at
from jetrl.tasks.user_files import PREFIX, live, load_function
from jetrl.types import Prompt, Score, Turn
from jetrl.untrusted import USERS_ERRORS

Checker = Callable[[Prompt, str], Any]
_FORMS = "f(prompt, completion), f(completions, **columns) or f(solution_str, ground_truth)"
_OF_TRL = {"completions", "prompts", "completion_ids"}
_GROUND_TRUTH = ("reward_model.ground_truth", "answer", "solution", "ground_truth")


@dataclass(frozen=True)
class UserFunction:
    """A user's reward function, called with only the arguments that it accepts."""

    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]

    @property
    def takes_all(self) -> bool:
        return any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())

    @property
    def is_of_trl(self) -> bool:
        only_keywords = self.takes_all and len(self.parameters) == 1
        return only_keywords or not _OF_TRL.isdisjoint(self.parameters)

    @property
    def is_async(self) -> bool:
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        # Instances may have an async __call__.
        forms = (function, getattr(type(function), "__call__", None))  # noqa: B004
        return any(map(inspect.iscoroutinefunction, forms))

    def called(self, *values: Any, **columns: Any) -> Any:
        """Return the function's result, or a coroutine if it is async."""
        given = {k: v for k, v in columns.items() if self.takes_all or k in self.parameters}
        try:
            inspect.Signature([*self.parameters.values()]).bind(*values, **given)
        except TypeError as error:
            there = f"there is: {', '.join(columns)}" if columns else f"write it as {_FORMS}"
            raise ScoreError(f"{self.name}: {error}; {there}") from None
        return self.function(*values, **given)

    def checker(self, answer: str | None) -> Checker:
        """Return a function of prompt and completion (see `_ground_truth`)."""
        first = next(iter(self.parameters), "")

        def check(prompt: Prompt, completion: str) -> Any:
            if "solution_str" in self.parameters:
                row = prompt.metadata
                value = self.called(
                    data_source=row.get("data_source"),
                    solution_str=completion,
                    ground_truth=_ground_truth(prompt, answer),
                    extra_info=row.get("extra_info") or {},
                )
            elif first == "completion":  # pass by name: it does not take the prompt
                value = self.called(prompt=prompt, completion=completion)
            else:
                value = self.called(prompt, completion)
            return _value_of_dict(_run(value) if inspect.iscoroutine(value) else value)

        return check


def reward_function(name: str) -> UserFunction | Checker:
    """Return the function named `file.py:function` or `python:function`."""
    if name.startswith(PREFIX):
        function = live(name, "task.options.checker")
    else:
        file, _, word = name.rpartition(":")
        function = load_function(Path(file), word)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a C function
        return function
    return UserFunction(name, function, signature.parameters)


class Rewards:
    """Sum of named reward functions, ignoring None and NaN.

    Called with a prompt and a completion, it returns the value of a single function, or the sum. A
    scorer uses two parts: `alone` for per-completion functions, and `call` for TRL functions, which
    get all completions of a step.

    Args:
        answer: The field of the right answer, for functions of verl; see `_ground_truth`.
        as_parts: Whether each function's reward is a part of the score.
    """

    def __init__(
        self,
        functions: Mapping[str, UserFunction | Checker],
        weights: Sequence[float] | None = None,
        as_parts: bool = True,
        answer: str | None = None,
    ) -> None:
        factors = [1.0] * len(functions) if weights is None else weights
        if len(factors) != len(functions):
            raise UserError(
                f"task.options.weights: {len(factors)} weights for {len(functions)} reward "
                f"functions ({', '.join(functions)})"
            )
        self._factors = dict(zip(functions, factors, strict=True))
        self._as_parts = as_parts
        self._together: dict[str, UserFunction] = {}
        self._checkers: dict[str, Checker] = {}
        for label, function in functions.items():
            if isinstance(function, UserFunction) and function.is_of_trl:
                self._together[label] = function
            elif isinstance(function, UserFunction):
                self._checkers[label] = function.checker(answer)
            else:
                self._checkers[label] = function
        # As in TRL: sync functions first, then all async ones concurrently.
        waiting = tuple(label for label, f in self._together.items() if f.is_async)
        groups = [(label,) for label in self._together if label not in waiting]
        self.calls = tuple(
            RewardCall(names, tuple(self._factors[n] for n in names), as_parts)
            for names in (*groups, waiting)
            if names
        )

    def __call__(self, prompt: Prompt, completion: str) -> Any:
        if not self.calls:
            return self.alone(prompt, completion)
        score = to_score(self.alone(prompt, completion), "dataset", prompt.id)
        for call in self.calls:
            result = self.call(call, [Answer(prompt, completion)], TrainerState())
            score = added(score, call, {name: r[0] for name, r in result.rewards.items()})
        return score

    def alone(self, prompt: Prompt, completion: str) -> Any:
        """Return the sum of the per-completion functions; Score(None) if none gives a number."""
        values = {name: check(prompt, completion) for name, check in self._checkers.items()}
        if values and not self._as_parts:
            return next(iter(values.values()))
        score = Score(None)
        for name, value in values.items():
            own = Score(None) if _is_none(value) else to_score(value, name, prompt.id)
            parts = {k if k not in score.parts else f"{name}_{k}": v for k, v in own.parts.items()}
            score = Score(score.reward, {**score.parts, **parts})
            score = _plus(score, name, own.reward, self._factors[name], as_part=True)
        return score

    def call(self, call: RewardCall, answers: Sequence[Answer], state: TrainerState) -> CallResult:
        """Call TRL functions with all completions of a step."""
        notes = _Notes(len(answers))
        given = _of_trl(answers) | {"trainer_state": state}
        given |= {"log_extra": notes.extra, "log_metric": notes.metric}
        values = {name: self._together[name].called(**given) for name in call.names}
        waiting = {name: value for name, value in values.items() if inspect.iscoroutine(value)}
        if waiting:
            results = _run(_all(waiting.values()))
            for name, result in zip(waiting, results, strict=True):
                if isinstance(result, USERS_ERRORS):
                    raise ScoreError(
                        f"reward function {name} raised {describe_error(result)}"
                    ) from result
                values[name] = result
        rewards = {name: _numbers(name, value, len(answers)) for name, value in values.items()}
        means = {name: fmean(numbers) for name, numbers in notes.metrics.items()}
        return CallResult(rewards, means, notes.columns)


def added(score: Score, call: RewardCall, rewards: Mapping[str, float | None]) -> Score:
    """Return a score plus the rewards that a call gave to its completion."""
    for name, factor in zip(call.names, call.factors, strict=True):
        score = _plus(score, name, rewards[name], factor, call.as_parts)
    return score


def _plus(score: Score, name: str, reward: float | None, factor: float, as_part: bool) -> Score:
    if reward is None:
        return score
    parts = {**score.parts, name: reward} if as_part else score.parts
    return Score((score.reward or 0.0) + factor * reward, parts)


class _Notes:
    """Metrics and notes logged by the functions of a call, as in TRL."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.columns: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def extra(self, column: str, values: Iterable[Any]) -> None:
        """Record one value per completion; stored with the rollouts."""
        noted = [_note(value) for value in values]
        if len(noted) != self._count:
            raise ScoreError(
                f"log_extra({column!r}): {len(noted)} values for {self._count} completions"
            )
        self.columns[str(column)] = noted

    def metric(self, name: str, value: Any) -> None:
        """Record a number; its mean over the step is the metric reward/part/NAME."""
        self.metrics.setdefault(str(name), []).append(to_number(value, f"log_metric({name!r})"))


def _numbers(name: str, values: Any, count: int) -> list[float | None]:
    """Return a function's rewards, one per completion; NaN becomes None, as in TRL."""
    items = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else []
    if len(items) != count:
        raise ScoreError(
            f"reward function {name} returned {values!r:.60} ({type(values).__name__}); give a "
            f"list with a number or None per completion, {count} here"
        )
    what = f"reward function {name}: completion {{}} of {count}"
    return [
        None if _is_none(item) else to_number(item, what.format(number))
        for number, item in enumerate(items, start=1)
    ]


def _note(value: Any) -> float | str | None:
    if _is_none(value):
        return None
    with contextlib.suppress(ScoreError):
        return to_number(value, "note")
    return str(value)


def _is_none(value: Any) -> bool:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # NumPy or torch scalar
    return value is None or (isinstance(value, float) and math.isnan(value))


def _of_trl(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return TRL arguments: lists with a value per completion."""
    rows = [answer.prompt.metadata for answer in answers]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    for name in ("prompt", "completion", "completion_ids"):
        columns.pop(name, None)
    prompts, completions = zip(*map(_asked_and_said, answers), strict=True)
    ids = [list(answer.token_ids) for answer in answers]
    given = {"prompts": [*prompts], "completions": [*completions], "completion_ids": ids}
    return columns | given


def _asked_and_said(answer: Answer) -> tuple[Any, Any]:
    """Return a prompt and its completion, both as text or both as messages."""
    prompt, completion = answer.prompt, answer.completion
    turns = [Turn(completion)] if isinstance(completion, str) else completion
    if prompt.messages is None or not any(map(_are_messages, prompt.metadata.values())):
        texts = [text for turn in turns for text in (turn.text, turn.reply)]
        return prompt.asked, "".join(text for text in texts if isinstance(text, str))
    said: list[Mapping[str, str]] = []
    for turn in turns:
        said.append({"role": "assistant", "content": turn.text})
        said += [turn.reply] if isinstance(turn.reply, Mapping) else []
    return list(prompt.messages), said


def _are_messages(value: object) -> bool:
    return isinstance(value, list | tuple) and any(
        isinstance(item, Mapping) and "role" in item for item in value
    )


def _ground_truth(prompt: Prompt, answer: str | None) -> Any:
    """Return the correct answer as stored in the row, for verl functions.

    `answer` is the field named by task.options.answer; if None or "", the first default field in
    the row.
    """
    if answer:
        return value_at(prompt.metadata, answer)
    values = (value_at(prompt.metadata, name) for name in _GROUND_TRUTH)
    return next((value for value in values if value is not None), prompt.answer)


def _value_of_dict(value: Any) -> Any:
    if not isinstance(value, Mapping) or "score" not in value:
        return value
    parts = {k: v for k, v in value.items() if k != "score" and isinstance(v, int | float)}
    return Score(value["score"], parts)  # validated by the scorer


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return this process's event loop: clients in user modules stay bound to it."""
    return asyncio.new_event_loop()


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _loop().run_until_complete(coroutine)
    with ThreadPoolExecutor(1) as thread:  # a notebook already runs a loop in this thread
        return thread.submit(_loop().run_until_complete, coroutine).result()


async def _all(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    return await asyncio.gather(*coroutines, return_exceptions=True)
