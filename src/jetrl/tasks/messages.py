"""Pieces that tasks share: checks of their options, chat messages and error messages."""

from __future__ import annotations

import difflib
import traceback
from typing import Any

from jetrl.errors import UserError


def nearest(name: str, known: list[str]) -> str:
    """Return `; did you mean X?`, or `; there is: ` and the known names."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there is: {', '.join(known[:30]) or 'none'}"


def check_options(known: list[str], options: dict[str, Any], task: str) -> None:
    """Check that a task has every option that it is given.

    Args:
        known: Names of the task's options.
        options: The options given, by name.
        task: The task's name, for the message.

    Raises:
        UserError: The task does not have an option; the message offers the nearest one.
    """
    for option in options:
        if option not in known:
            key = "task.path" if option == "path" else f"task.options.{option}"
            raise UserError(f"{key}: task {task} has no such option{nearest(option, known)}")


def check_format(format: str) -> None:
    """Raise `UserError` unless the option `format` is "chat" or "text"."""
    if format not in ("chat", "text"):
        raise UserError(f"task.options.format = {format!r}: give 'chat' or 'text'")


def question_content(format: str, text: str) -> dict[str, Any]:
    """Return the fields of a `Prompt` that asks a text: plain, or as a user's chat message."""
    return (
        {"text": text} if format == "text" else {"messages": ({"role": "user", "content": text},)}
    )


def describe_error(error: BaseException) -> str:
    """Return an exception and where it was raised: `ValueError: text (a.py, line 3, in score)`."""
    text = f"{type(error).__name__}: {error}"[:500]
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    last = frames[-1]
    return f"{text} ({last.filename}, line {last.lineno}, in {last.name})"
