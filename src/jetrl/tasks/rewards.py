"""Reward functions with the signatures of jetrl, TRL and verl, and weighted sums of several.

    f(prompt, completion)                                          a number or a Score
    f(completions, prompts, **columns)                             TRL: a list of numbers or None
    f(data_source, solution_str, ground_truth, extra_info)         verl: a number, or {"score": ...}

A function of TRL gets lists of one completion. As there, completions are texts if the row's prompt
is one, else lists of one message; every column of the row is a list of one value. The others may
return {"score": ...} too, and any may be async.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jetrl.errors import UserError
from jetrl.tasks.base import ScoreError, to_score
from jetrl.tasks.live import PREFIX, live
from jetrl.tasks.user_files import load_function
from jetrl.types import Prompt, Score

Checker = Callable[[Prompt, str], Any]
_FORMS = "f(prompt, completion), f(completions, **columns) or f(solution_str, ground_truth)"


def reward_function(name: str) -> Checker:
    """Return the function that `file.py:function` or `python:function` names, as a checker."""
    if name.startswith(PREFIX):
        function = live(name, "task.options.checker")
    else:
        file, _, word = name.rpartition(":")
        function = load_function(Path(file), word)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a C function
        return function
    parameters = signature.parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def called(*values: Any, **columns: Any) -> Any:
        given = {k: v for k, v in columns.items() if takes_all or k in parameters}
        try:
            signature.bind(*values, **given)
        except TypeError as error:
            there = f"there is: {', '.join(columns)}" if columns else f"write it as {_FORMS}"
            raise ScoreError(f"{name}: {error}; {there}") from None
        result = function(*values, **given)
        if not inspect.iscoroutine(result):
            return result
        with ThreadPoolExecutor(1) as thread:  # this one may have a notebook's loop
            return thread.submit(asyncio.run, result).result()

    if "completions" in parameters:
        return lambda prompt, text: _value_of_trl(called(**_of_trl(prompt, text)), name)
    if "solution_str" in parameters:
        return lambda prompt, text: _value_of_dict(called(**_of_verl(prompt, text)))
    if next(iter(parameters), "") == "completion":  # by name: it does not get the prompt
        return lambda prompt, text: _value_of_dict(called(prompt=prompt, completion=text))
    return lambda prompt, text: _value_of_dict(called(prompt, text))


def weighted(checkers: Mapping[str, Checker], weights: Sequence[float] | None) -> Checker:
    """Return the checker that adds several rewards, a part for each, without None and NaN."""
    factors = [1.0] * len(checkers) if weights is None else weights
    if len(factors) != len(checkers):
        what = f"{len(factors)} weights for {len(checkers)} reward functions"
        raise UserError(f"task.options.weights: {what} ({', '.join(checkers)})")

    def check(prompt: Prompt, completion: str) -> Score:
        total, parts = 0.0, {}
        for factor, (name, checker) in zip(factors, checkers.items(), strict=True):
            value = checker(prompt, completion)
            if value is None or (isinstance(value, float) and math.isnan(value)):
                continue
            parts[name] = to_score(value, name, prompt.id).reward
            total += factor * parts[name]
        if not parts:
            raise ScoreError(f"prompt {prompt.id!r}: no reward function gave a number")
        return Score(total, parts)

    return check


def _of_trl(prompt: Prompt, completion: str) -> dict[str, Any]:
    row = prompt.metadata
    columns = {key: [value] for key, value in row.items() if key not in ("prompt", "completion")}
    if prompt.messages is None or not any(map(_are_messages, row.values())):
        return {**columns, "prompts": [prompt.asked], "completions": [completion]}
    said = [{"role": "assistant", "content": completion}]
    return {**columns, "prompts": [list(prompt.messages)], "completions": [said]}


def _are_messages(value: object) -> bool:
    return isinstance(value, list | tuple) and any(
        isinstance(item, Mapping) and "role" in item for item in value
    )


def _value_of_trl(values: Any, name: str) -> Any:
    items = list(values) if isinstance(values, Iterable) else []
    if len(items) != 1:
        kind = f"{values!r:.60} ({type(values).__name__})"
        raise ScoreError(f"{name} returned {kind}; give a list with a number per completion")
    return items[0]


def _of_verl(prompt: Prompt, completion: str) -> dict[str, Any]:
    row = {key: prompt.metadata.get(key) for key in ("data_source", "extra_info")}
    return {**row, "solution_str": completion, "ground_truth": prompt.answer}


def _value_of_dict(value: Any) -> Any:
    if not isinstance(value, Mapping) or "score" not in value:
        return value
    parts = {k: v for k, v in value.items() if k != "score" and isinstance(v, int | float)}
    return Score(value["score"], parts)  # the scorer checks it
