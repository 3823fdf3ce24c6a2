"""A user's algorithm: a loss function, or a whole record, in a Python file."""

from __future__ import annotations

import dataclasses
import importlib.util
import traceback
from pathlib import Path

from jetrl.algorithms import USERS, Algorithm
from jetrl.errors import UserError


def load_algorithm(name: str) -> Algorithm:
    """The algorithm at `file.py:name`: an `Algorithm`, or a loss function of (Tokens, **options),
    which is put into GRPO's place: group advantages, mean over the update's tokens.

    Raises:
        UserError: no such file, a file that does not run (with its line), nothing of that name in
            it, or something else.
    """
    path, _, member = name.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise UserError(
            f"algorithm.name = {name}: no such file (paths start at the working folder)"
        )
    spec = importlib.util.spec_from_file_location(f"jetrl_user_algorithm_{file.stem}", file)
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename) == file
        ]
        line = lines[-1] if lines else getattr(error, "lineno", None)
        raise UserError(
            f"algorithm file {file}, line {line}: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, member, None)
    if isinstance(found, Algorithm):
        return found
    if not callable(found):
        raise UserError(
            f"algorithm file {file}: {member!r} is no function and no Algorithm; it has "
            f"{', '.join(key for key, value in vars(module).items() if callable(value)) or 'none'}"
        )
    return dataclasses.replace(USERS, title=member, loss=found)
