r"""Checkers by name: functions that say whether a completion gives a prompt's answer.

    math                math-verify on the answer that the completion marks, or on its last number
                        (answers.py); `strict` takes marked answers only
    exact               the whole completion, spaces around it aside
    regex               the first group of the last match of `pattern`, spaces around it aside;
                        where the prompt has no answer, that there is a match
    file.py:function    function(prompt, completion) of a file of yours: a number or a Score

The first three give 1 or 0. `math` and `regex` have a part `answered`: 1 where the completion holds
an answer in the form that is looked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from jetrl.errors import UserError
from jetrl.tasks.answers import final_answer, gold_answer, is_right
from jetrl.tasks.equality import load_math_verify
from jetrl.tasks.messages import nearest
from jetrl.tasks.user_files import load_function
from jetrl.types import Prompt, Score

Checker = Callable[[Prompt, str], float | Score]
NAMES = ("math", "exact", "regex")


def get_checker(name: str, pattern: str | None = None, strict: bool = False) -> Checker:
    """Return the checker of a name.

    Args:
        name: `math`, `exact`, `regex` or `file.py:function`.
        pattern: The regular expression of `regex`.
        strict: Whether `math` takes marked answers only.

    Raises:
        UserError: There is no such checker, file or function, or the pattern is missing, is no
            regular expression, or would not be used.
    """
    file, colon, function = name.rpartition(":")
    if pattern is not None and name != "regex":
        raise UserError("task.options.pattern: only the checker 'regex' has one")
    if strict and name != "math":
        raise UserError("task.options.strict: only the checker 'math' takes it")
    if colon and file.endswith(".py"):
        return load_function(Path(file), function)
    if name == "math":
        load_math_verify()
        return lambda prompt, completion: check_math(prompt.answer or "", completion, strict)
    if name == "exact":
        return check_exact
    if name == "regex":
        return _regex(pattern)
    raise UserError(
        f"task.options.checker = {name!r}{nearest(name, list(NAMES))} (also possible: "
        "file.py:function)"
    )


def check_math(gold: str, completion: str, strict: bool = False) -> Score:
    """Return the score of a completion: 1 where its answer has the value of the right one.

    Args:
        strict: Whether only a marked answer counts.
    """
    answer = final_answer(completion, strict=strict)
    if answer is None:
        return Score(0.0, {"answered": 0.0})
    right = is_right(gold_answer(gold), answer)
    return Score(float(right), {"answered": float(answer.marked)})


def check_exact(prompt: Prompt, completion: str) -> float:
    """Return 1 for the prompt's answer and nothing else, otherwise 0."""
    return float(completion.strip() == (prompt.answer or "").strip())


def _regex(pattern: str | None) -> Checker:
    if pattern is None:
        raise UserError(
            "task.options.pattern: the checker 'regex' needs one, such as '<answer>(.*?)</answer>'"
        )
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(
            f"task.options.pattern = {pattern!r}: not a regular expression: {error}"
        ) from None

    def check(prompt: Prompt, completion: str) -> Score:
        matches = list(compiled.finditer(completion))
        if not matches:
            return Score(0.0, {"answered": 0.0})
        answer = matches[-1].group(1 if compiled.groups else 0) or ""
        right = prompt.answer is None or answer.strip() == prompt.answer.strip()
        return Score(float(right), {"answered": 1.0})

    return check
