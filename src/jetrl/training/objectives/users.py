"""A user's algorithm: a loss function, or a whole record, in a Python file."""

from __future__ import annotations

import dataclasses
import importlib.util
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jetrl.errors import UserError
from jetrl.settings.algorithms import USERS, Algorithm
from jetrl.training.advantages import Advantages


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


def users_advantages_problem(found: object, lengths: Sequence[int]) -> str:
    """What is wrong with what a user's estimator gave, "" if nothing is. lengths: trained tokens of
    each sample."""
    parts = found.advantages if isinstance(found, Advantages) else found
    arrays = list(map(np.asarray, parts)) if isinstance(parts, Sequence | np.ndarray) else []
    if len(arrays) != len(lengths) or any(array.ndim != 1 for array in arrays):
        return f"must be one array for each of the {len(lengths)} samples, of a number a token"
    for i, (array, length) in enumerate(zip(arrays, lengths, strict=True)):
        if len(array) != length:
            return f"of sample {i} are {len(array)}, and must be as many as its {length} tokens"
        if not np.isfinite(array).all():
            return f"of sample {i} are not finite"
    return ""
