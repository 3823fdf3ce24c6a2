"""A user's algorithm: a loss function, or a whole record, in a Python file.

What a user's function returns, and raises, is checked at each call: a mistake is named with the
file and line that it came from.
"""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jetrl.errors import UserError
from jetrl.memory.out_of_memory import is_out_of_memory
from jetrl.settings.algorithms import USERS, Algorithm
from jetrl.training.advantages import Advantages, StepRewards
from jetrl.training.objectives.tokens import TokenLoss, Tokens
from jetrl.users_code import USERS_ERRORS, check_trusted


def load_algorithm(name: str) -> Algorithm:
    """Return the algorithm at `file.py:name`.

    That is an `Algorithm`, or a loss function of (Tokens, **options), which takes GRPO's place:
    group advantages, mean over the update's tokens.

    Raises:
        UserError: No such file, a file that does not run (with its line), no member of that name,
            or one that is something else.
    """
    path, _, member = name.rpartition(":")
    file = Path(path)
    check_trusted(file)
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
    except USERS_ERRORS as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename) == file
        ]
        line = lines[-1] if lines else getattr(error, "lineno", None)
        raise UserError(
            f"algorithm file {file}, line {line}: {type(error).__name__}: {error}"
        ) from error
    algorithm = getattr(module, member, None)
    if isinstance(algorithm, Algorithm):
        return algorithm
    if not callable(algorithm):
        raise UserError(
            f"algorithm file {file}: {member!r} is no function and no Algorithm; it has "
            f"{', '.join(key for key, value in vars(module).items() if callable(value)) or 'none'}"
        )
    return replace(USERS, title=member, loss=algorithm)


@dataclass(frozen=True)
class UsersFunction:
    """A function of a user's file with its options.

    Attributes:
        name: The algorithm's name in the settings, for messages.
        function: The function, which takes one argument and the options.
        options: The keyword arguments that the function gets.
    """

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any]

    def _call(self, argument: object, subject: str) -> Any:
        """Return what the function returns; an error in the function becomes a `UserError`."""
        try:
            return self.function(argument, **self.options)
        except USERS_ERRORS as error:
            if is_out_of_memory(error):
                raise
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename}, line {last.lineno}"
            if last.filename == __file__:  # the call itself failed
                place = "it is called with one argument, and with algorithm.options by name"
            raise self._error(
                f"{subject} raised {type(error).__name__}: {error} ({place})"
            ) from error

    def _error(self, problem: str) -> UserError:
        """Return the error that names the algorithm."""
        return UserError(f"algorithm.name = {self.name}: {problem}")


class UsersLoss(UsersFunction):
    """A loss function of a user's file: a function of (Tokens, **options)."""

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Return the losses of the tokens."""
        loss = self._call(tokens, "it")
        if isinstance(loss, torch.Tensor):
            loss = TokenLoss(loss, torch.zeros_like(loss, dtype=torch.bool))
        if not isinstance(loss, TokenLoss) or loss.loss.shape != tokens.advantages.shape:
            shape = list(loss.loss.shape) if isinstance(loss, TokenLoss) else type(loss).__name__
            raise self._error(
                "it must return one loss for each of the "
                f"{len(tokens.advantages)} tokens, not {shape}"
            )
        if tokens.trainer_logprobs.requires_grad and not loss.loss.requires_grad:
            raise self._error(
                "its loss has no gradient; make it of tokens.trainer_logprobs or "
                "tokens.log_ratio, and detach neither"
            )
        return loss


class UsersEstimator(UsersFunction):
    """An advantage estimator of a user's file: a function of (StepRewards, **options)."""

    def __call__(self, step: StepRewards) -> Advantages:
        """Return the advantages of a step."""
        returned = self._call(step, "its advantages")
        lengths = [len(penalty) for penalty in step.penalties]
        whole = returned if isinstance(returned, Advantages) else Advantages(returned)
        problem = _problem(whole.advantages, lengths)
        if not problem and step.values is not None:
            problem = "have no returns, which the critic learns: return Advantages(..., returns)"
            if whole.returns is not None:
                problem = _problem(whole.returns, lengths)
                problem = problem and f"have returns that do not fit: they {problem}"
        if problem:
            name = getattr(self.function, "__name__", type(self.function).__name__)
            raise self._error(f"its advantages {problem}; {name} returned {_described(returned)}")
        return replace(whole, advantages=list(whole.advantages))


def _described(value: object) -> str:
    """Return the type of a value in words, with the shape and dtype of arrays."""
    if isinstance(value, Advantages):
        return f"Advantages of {_described(value.advantages)}"
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"{type(value).__name__} of shape {list(value.shape)}, {value.dtype}"
    if isinstance(value, list | tuple):
        first = f", the first {_described(value[0])}" if value else ""
        return f"{type(value).__name__} of {len(value)}{first}"
    return "None" if value is None else type(value).__name__


def _problem(per_sample: object, lengths: Sequence[int]) -> str:
    """Return what is wrong with the advantages or returns of a user's estimator, or ""."""
    arrays = []
    if isinstance(per_sample, Sequence | np.ndarray):
        try:
            arrays = list(map(np.asarray, per_sample))
        except (RuntimeError, TypeError, ValueError) as error:  # as of a tensor with a gradient
            return f"cannot be made NumPy arrays ({type(error).__name__}: {error})"
    if len(arrays) != len(lengths) or any(array.ndim != 1 for array in arrays):
        return (
            f"must be one array for each of the {len(lengths)} samples, of a number a token; "
            "step.at_tokens(values) makes these of one number a sample"
        )
    for i, (array, length) in enumerate(zip(arrays, lengths, strict=True)):
        if len(array) != length:
            return f"of sample {i} are {len(array)}, and must be as many as its {length} tokens"
        if array.dtype.kind not in "fiub":
            return f"of sample {i} are {array.dtype}, and must be real numbers"
        if not np.isfinite(array).all():
            return f"of sample {i} are not finite"
    return ""
