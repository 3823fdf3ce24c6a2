"""The objective of a run: an algorithm's pieces with the values of all options.

An algorithm may be a user's: a loss function or a whole record in a Python file. Each value that a
user's function returns or raises is checked; the message names file and line.
"""

from __future__ import annotations

import importlib.util
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jetrl.errors import UserError
from jetrl.memory.out_of_memory import is_out_of_memory
from jetrl.settings.algorithms import ALGORITHMS, USERS, Aggregation, Algorithm, AlgorithmSettings
from jetrl.training.advantages import ESTIMATORS, Advantages, Estimator, StepRewards
from jetrl.training.losses import MicroBatchLoss
from jetrl.training.objectives.pieces import (
    KL_ESTIMATORS,
    LOSSES,
    ClippedRatio,
    Correction,
    TokenLoss,
    Tokens,
    UpdateSize,
    k3,
    token_weights,
)
from jetrl.untrusted import USERS_ERRORS, check_trusted


@dataclass(frozen=True)
class Objective:
    """The function that a run optimizes: an algorithm with the values of all options.

    Attributes:
        settings: The section `[algorithm]`.
        correction: Weighs tokens against the mismatch between sampler and trainer, if any.
    """

    algorithm: Algorithm
    settings: AlgorithmSettings
    max_tokens: int
    advantages: Estimator
    token_loss: Callable[[Tokens], TokenLoss]
    aggregation: Aggregation
    correction: Correction | None

    @classmethod
    def from_settings(cls, settings: AlgorithmSettings, max_tokens: int) -> Objective:
        """Return the objective that the section `[algorithm]` asks for.

        Raises:
            UserError: A user's file does not import, or its function lacks given options.
        """
        name = settings.name
        algorithm = load_algorithm(name) if settings.from_file else ALGORITHMS[name]
        problems = list(settings.problems(algorithm))
        if problems:
            raise UserError("; ".join(problems))
        # A set option, else the algorithm's own default.
        values = {key: settings.value(key, algorithm) for key in algorithm.options}
        loss, estimator = algorithm.loss, algorithm.advantages
        own = settings.options
        _check_own_options(name, own, algorithm)
        token_loss: Callable[[Tokens], TokenLoss]
        if isinstance(loss, str):
            token_loss = LOSSES[loss](**_options(name, LOSSES[loss], {**values, **own}))
        else:
            token_loss = UsersLoss(name, loss, _options(name, loss, {**values, **own}))
        advantages: Estimator
        if isinstance(estimator, str):
            advantages = ESTIMATORS[estimator](**_options(name, ESTIMATORS[estimator], values))
        else:
            users_options = _options(name, estimator, {**values, **own})
            advantages = UsersEstimator(name, estimator, users_options)
        aggregation = settings.aggregation or algorithm.aggregation
        correction = Correction.from_settings(settings)
        return cls(algorithm, settings, max_tokens, advantages, token_loss, aggregation, correction)

    @property
    def clips(self) -> tuple[float, float]:
        """Return clip and clip_high of a loss that clips token ratios."""
        assert isinstance(self.token_loss, ClippedRatio)
        return self.token_loss.clip, self.token_loss.clip_high

    def with_clips(self, clip: float, clip_high: float) -> Objective:
        assert isinstance(self.token_loss, ClippedRatio)
        return replace(self, token_loss=replace(self.token_loss, clip=clip, clip_high=clip_high))

    @property
    def overlong_buffer(self) -> int:
        """Return the tokens before the limit over which the reward falls; 0 for off."""
        buffer = self.settings.value("overlong_buffer", self.algorithm)
        return self.max_tokens // 5 if buffer is None else int(buffer)

    @property
    def dynamic_sampling(self) -> bool:
        """Return whether more prompts are drawn in place of groups with equal rewards."""
        return bool(self.settings.value("dynamic_sampling", self.algorithm))

    @property
    def kl_in_reward(self) -> bool:
        """Return whether a KL to the reference is subtracted from the rewards."""
        return self.settings.kl > 0 and self.settings.kl_term(self.algorithm)[1] == "reward"

    def penalty(self, logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
        """Return the weighted KL of each token, float32 [N], from log-probs float32 [N]."""
        estimate = KL_ESTIMATORS[self.settings.kl_term(self.algorithm)[0]]
        return self.settings.kl * estimate(logprobs, ref_logprobs)

    def __call__(
        self,
        tokens: Tokens,
        size: UpdateSize,
        rollout_logprobs: torch.Tensor,
        ref_logprobs: torch.Tensor | None = None,
    ) -> MicroBatchLoss:
        """Return the loss of a micro-batch of N trained tokens: its share of the update's."""
        share = 1.0 / size.tokens
        # The algorithm's loss of each token, then the correction's weight.
        token_loss = self.token_loss(tokens)
        loss = token_loss.loss
        metrics = {"policy/clip_fraction": token_loss.clipped.double().sum() * share}
        peaks = {}
        if self.correction is not None:
            bounded = self.correction(tokens, rollout_logprobs)
            loss = loss * bounded.weights
            metrics["correction/weight_mean"] = bounded.weights.double().sum() * share
            metrics["correction/touched_fraction"] = bounded.touched.double().sum() * share
            peaks["correction/weight_max"] = bounded.weights.double().max()
            peaks["correction/ratio_max"] = bounded.ratio.double().max()
        if ref_logprobs is not None:
            with torch.no_grad():
                # Measured with a reference, also if it is not in the loss.
                measured = k3(tokens.trainer_logprobs, ref_logprobs)
            metrics["policy/kl_ref"] = measured.double().sum() * share
            if self.settings.kl and not self.kl_in_reward:
                loss = loss + self.penalty(tokens.trainer_logprobs, ref_logprobs)
        # Weighed by the whole update's size: shares of micro-batches add up.
        weights = token_weights(tokens.lengths, size, self.aggregation, len(loss))
        return MicroBatchLoss((loss * weights).sum(), metrics, peaks)


def _check_own_options(name: str, own: Mapping[str, Any], algorithm: Algorithm) -> None:
    """Check that each of algorithm.options is an argument of the loss or a user's estimator."""
    loss, estimator = algorithm.loss, algorithm.advantages
    taking = [LOSSES[loss] if isinstance(loss, str) else loss]
    taking += [] if isinstance(estimator, str) else [estimator]
    known = [argument.name for piece in taking for argument in _arguments(piece)]
    for key in own:
        if key not in known:
            raise UserError(
                f"algorithm.options.{key}: {name} has no such argument; it has "
                f"{', '.join(dict.fromkeys(known)) or 'none'}"
            )


def _arguments(piece: Callable[..., Any]) -> list[inspect.Parameter]:
    is_record = isinstance(piece, type)
    return list(inspect.signature(piece).parameters.values())[0 if is_record else 1 :]


def _options(name: str, piece: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(known)
    if values.get("clip_high") is None and "clip" in values:
        values["clip_high"] = values["clip"]
    arguments = _arguments(piece)
    for argument in arguments:
        if argument.default is inspect.Parameter.empty and argument.name not in values:
            problem = f"{name} needs algorithm.options.{argument.name}"
            if isinstance(piece, type):
                default = f"Algorithm(options={{{argument.name!r}: ...}})"
                problem += f", or a default in its record: {default}"
            raise UserError(problem)
    return {
        argument.name: values[argument.name] for argument in arguments if argument.name in values
    }


def load_algorithm(name: str) -> Algorithm:
    """Return the algorithm at `file.py:name`.

    That is an `Algorithm`, or a loss function of (Tokens, **options), which takes GRPO's place:
    group advantages, mean over the update's tokens.

    Raises:
        UserError: There is no such file, it does not run (with its line), or it has no such member.
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
            f"algorithm file {file}: {member!r} is not a function or an Algorithm; the file has "
            f"{', '.join(key for key, value in vars(module).items() if callable(value)) or 'none'}"
        )
    return replace(USERS, title=member, loss=algorithm)


@dataclass(frozen=True)
class UsersFunction:
    """A user's function with its options, which are passed as keyword arguments.

    Attributes:
        name: The algorithm's name in the settings, for messages.
    """

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any]

    def _call(self, argument: object, subject: str) -> Any:
        """Return the function's result; an error in the function becomes a `UserError`."""
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
        return UserError(f"algorithm.name = {self.name}: {problem}")


class UsersLoss(UsersFunction):
    """A user's loss: a function of (Tokens, **options)."""

    def __call__(self, tokens: Tokens) -> TokenLoss:
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
    """A user's advantage estimator: a function of (StepRewards, **options)."""

    def __call__(self, step: StepRewards) -> Advantages:
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
    """Return what is wrong with a user's advantages or returns, or an empty text."""
    arrays = []
    if isinstance(per_sample, Sequence | np.ndarray):
        try:
            arrays = list(map(np.asarray, per_sample))
        except (RuntimeError, TypeError, ValueError) as error:  # as of a tensor with a gradient
            return f"cannot be made NumPy arrays ({type(error).__name__}: {error})"
    if len(arrays) != len(lengths) or any(array.ndim != 1 for array in arrays):
        return (
            f"must be one array for each of the {len(lengths)} samples, with a number per token; "
            "step.at_tokens(values) makes these from one number per sample"
        )
    for i, (array, length) in enumerate(zip(arrays, lengths, strict=True)):
        if len(array) != length:
            return f"of sample {i} are {len(array)} numbers for its {length} tokens"
        if array.dtype.kind not in "fiub":
            return f"of sample {i} are {array.dtype}, and must be real numbers"
        if not np.isfinite(array).all():
            return f"of sample {i} are not finite"
    return ""
