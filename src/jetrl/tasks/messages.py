"""What error messages of tasks are made of: nearest names, and where an exception was raised."""

from __future__ import annotations

import difflib
import traceback
from typing import Any

from jetrl.errors import UserError


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean X?`, or the names there are."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there is: {', '.join(known[:30]) or 'none'}"


def check_options(known: list[str], options: dict[str, Any], task: str) -> None:
    """Raise `UserError` for an option the task does not have, offering the nearest one."""
    for option in options:
        if option not in known:
            key = "task.path" if option == "path" else f"task.options.{option}"
            raise UserError(f"{key}: task {task} has no such option{nearest(option, known)}")


def describe_error(error: BaseException) -> str:
    """`ValueError: text (file.py, line 3, in score)`: the exception and where it was raised."""
    text = f"{type(error).__name__}: {error}"[:500]
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    last = frames[-1]
    return f"{text} ({last.filename}, line {last.lineno}, in {last.name})"
