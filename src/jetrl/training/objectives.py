"""Training objective of a run: an algorithm's loss functions (pure, on log-probs) and options.

Token losses, by algorithm.loss:
    clipped_ratio    PPO's clipped token ratios                 PPO, GRPO, DAPO, REINFORCE++
    sequence_ratio   clipped sequence ratios                    GSPO
    detached_ratio   log-likelihood, weighted by a capped ratio CISPO
    ratio            plain ratio                                REINFORCE, RLOO

Aggregations, the weight of a token in the update's loss:
    token_mean     1 / tokens of the update                             DAPO eq. 8
    sequence_mean  1 / (sequences of the update x tokens of its own)    GRPO eq. 3
    sequence_sum   1 / sequences of the update                          a completion is one action
    constant       1 / (sequences of the update x rollout.max_tokens)   Dr. GRPO

Corrections of the mismatch, by w = trainer / sampler (1 in an exact flow), per token or sequence:
    tis            min(w, high)                        truncated: biased, of bounded variance
    mis            w if low <= w <= high, else 0       masked
    icepop         mis of tokens, with wide bounds
    sequence_mask  1 if low <= w <= high, else 0       drops sequences by their geometric mean

On a CPU a loss and its gradient have one set of bits (`loss_math`). Per token, in float32, with the
constants 1 - clip and 1 + clip_high rounded from float64, A the advantage, w the weight, c the
correction's weight and k the KL's:

    ratio = exp(min(trainer - behavior, log of the largest float32))
    loss  = -min(ratio * A, clamp(ratio, 1 - clip, 1 + clip_high) * A)       clipped ratios
    each  = (loss * c + k * estimate) * w,      L = loss_sum(each)
    dL / dtrainer = ((-(w * c) * A) * ratio, or 0 where clipped) + (w * k) * slope of the estimate

"clipped" is where the clamp changes the ratio and its product is the smaller one. The slope of k3
is added as -((g * (expm1 + 1)) - g), g = w * k. Ratios of sequences take `sequence_mean` of
trainer - behavior, and of the gradient that reaches it.

Weights refer to the whole update, so micro-batch losses are summed. Masked tokens count in the
denominator of the mean. Default bounds and sources are in `jetrl.settings.algorithms`.
"""

from __future__ import annotations

import importlib.util
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.memory.out_of_memory import is_out_of_memory
from jetrl.settings import algorithms
from jetrl.training import loss_math
from jetrl.training.advantages import ESTIMATORS, Advantages, StepRewards
from jetrl.training.micro_batches import MicroBatchLoss
from jetrl.types import Json
from jetrl.untrusted import USERS_ERRORS, check_trusted

MAX_LOG_RATIO = 88.72283172607422
"""Largest float32 number whose exponential is finite in float32."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), float32, clamped to the largest finite number.

    An infinite ratio would produce a NaN gradient even if the loss ignores it, for example behind a
    clip.
    """
    return loss_math.exp(torch.clamp(log_ratio, max=MAX_LOG_RATIO))


@dataclass(frozen=True)
class Tokens:
    """The N trained tokens of S sequences, concatenated in order.

    Attributes:
        trainer_logprobs: float32 [N], differentiable.
        behavior_logprobs: float32 [N], from the policy that drew the samples (the sampler, or the
            trainer before the step's first update); without gradient.
        advantages: float32 [N].
        lengths: int64 [S], trained tokens per sequence, positive, summing to N.
    """

    trainer_logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    lengths: Tensor

    @property
    def log_ratio(self) -> Tensor:
        """Return log (trainer / behavior), float32 [N], differentiable."""
        return self.trainer_logprobs - self.behavior_logprobs.detach()

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Return, at each token, the sum of float32 [N] values over its sequence: [N]."""
        return loss_math.sequence_sum(values, self.lengths)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return, at each token, the mean of float32 [N] values over its sequence: [N]."""
        return loss_math.sequence_mean(values, self.lengths)


@dataclass(frozen=True)
class TokenLoss:
    """Losses of the N tokens of a micro-batch.

    `loss`, float32 [N]: unweighted contribution per token; differentiable. `clipped`, bool [N]:
    True if the clip removed the token's gradient or reduced its weight.
    """

    loss: Tensor
    clipped: Tensor


def clipped_ratio(
    tokens: Tokens, clip: float, clip_high: float, dual_clip: float | None = None
) -> TokenLoss:
    """Return -min(ratio A, clip(ratio, 1 - clip, 1 + clip_high) A) per token.

    Schulman et al. 2017, "PPO", eq. 7; asymmetric clips: Yu et al. 2025, "DAPO", eq. 10. A
    `dual_clip` of c limits the loss at negative advantages to -c A (Ye et al. 2020, arXiv
    1912.09729, eq. 5).
    """
    ratio, advantages = bounded_exp(tokens.log_ratio), tokens.advantages
    clipped = _clipped(ratio, advantages, clip, clip_high)
    if dual_clip is None:
        return clipped
    over = (advantages < 0) & (ratio > dual_clip)
    loss = torch.where(over, -dual_clip * advantages, clipped.loss)
    return TokenLoss(loss, clipped.clipped | over)


def sequence_ratio(tokens: Tokens, clip: float, clip_high: float) -> TokenLoss:
    """Return -min(s A, clip(s, 1 - clip, 1 + clip_high) A) with the sequence ratio s.

    s = exp(mean log-ratio) (Zheng et al. 2025, "GSPO", eq. 5 to 7); its clips are 3e-4 and 4e-4.
    """
    ratio = bounded_exp(tokens.sequence_mean(tokens.log_ratio))
    return _clipped(ratio, tokens.advantages, clip, clip_high)


def detached_ratio(tokens: Tokens, clip_high: float) -> TokenLoss:
    """Return -sg(min(ratio, 1 + clip_high)) A log p per token ("MiniMax-M1", eq. 4 and 5).

    The ratio is only a weight: no token loses its gradient. As in the paper, it has no lower bound.
    """
    ratio = bounded_exp(tokens.log_ratio.detach())
    # Detached weight: the gradient flows through log p only.
    weight = torch.clamp(ratio, max=1.0 + clip_high)
    return TokenLoss(-weight * tokens.advantages * tokens.trainer_logprobs, ratio > weight)


def _plain_ratio(tokens: Tokens) -> TokenLoss:
    """Return -ratio A, the REINFORCE gradient in a step's first update (Williams 1992)."""
    loss = -bounded_exp(tokens.log_ratio) * tokens.advantages
    return TokenLoss(loss, torch.zeros_like(loss, dtype=torch.bool))


LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "clipped_ratio": clipped_ratio,
    "sequence_ratio": sequence_ratio,
    "detached_ratio": detached_ratio,
    "ratio": _plain_ratio,
}


def _clipped(ratio: Tensor, advantages: Tensor, clip: float, clip_high: float) -> TokenLoss:
    """Return the larger of the plain and the clipped loss, for float32 ratios [N]."""
    # Pessimistic bound: the smaller of the two surrogates.
    held = torch.clamp(ratio, 1.0 - clip, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, held * advantages)
    too_high = (ratio > 1.0 + clip_high) & (advantages > 0)
    too_low = (ratio < 1.0 - clip) & (advantages < 0)
    return TokenLoss(loss, too_high | too_low)


class UpdateSize(NamedTuple):
    """Size of one update, which determines its token weights."""

    tokens: int
    sequences: int
    max_tokens: int


def token_weights(
    lengths: Tensor,
    size: UpdateSize,
    aggregation: algorithms.Aggregation,
    num_tokens: int | None = None,
) -> Tensor:
    """Return the loss weight of each token, float32 [N], from sequence lengths int64 [S].

    `num_tokens` is N; if None, the host synchronizes with the GPU to sum the lengths.
    """
    # One weight per sequence, repeated for its tokens.
    if aggregation == "sequence_mean":
        weights = (1.0 / (size.sequences * lengths.double())).float()
    else:
        divisor = {
            "token_mean": size.tokens,
            "sequence_sum": size.sequences,
            "constant": size.sequences * size.max_tokens,
        }[aggregation]
        weights = torch.full_like(lengths, 1.0 / divisor, dtype=torch.float32)
    return weights.repeat_interleave(lengths, output_size=num_tokens)


@dataclass(frozen=True)
class Correction:
    """Mismatch correction with its level and bounds; `low` is 0 if there is no lower bound."""

    name: str
    level: algorithms.Level
    low: float
    high: float

    @classmethod
    def from_settings(cls, settings: algorithms.AlgorithmSettings) -> Correction | None:
        if settings.correction == "none":
            return None
        bounds = algorithms.CORRECTIONS[settings.correction]
        level = settings.correction_level or bounds.levels[0]
        low = settings.correction_low or bounds.low or 0.0
        return cls(settings.correction, level, low, settings.correction_high or bounds.high)

    def __call__(self, tokens: Tokens, rollout_logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights of N tokens, float32 [N], and two measurements.

        These are a mask of weights changed by a bound, bool [N], and the unbounded weights, float32
        [N].
        """
        log_ratio = tokens.behavior_logprobs.detach() - rollout_logprobs
        # One ratio per sequence or per token.
        if self.level == "sequence":
            log_ratio = tokens.sequence_sum(log_ratio)
        elif self.level == "geometric":
            log_ratio = tokens.sequence_mean(log_ratio)
        ratio = bounded_exp(log_ratio)
        if self.name == "tis":
            weights = torch.clamp(ratio, max=self.high)
            return weights, ratio > self.high, ratio
        # The other corrections mask weights outside the bounds.
        inside = (ratio >= self.low) & (ratio <= self.high)
        kept = torch.ones_like(ratio) if self.name == "sequence_mask" else ratio
        return torch.where(inside, kept, 0.0), ~inside, ratio


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return log p - log ref: unbiased, but its expected gradient is 0, so only for rewards."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return (log p - log ref)^2 / 2: biased, but with the expected gradient of the KL."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return exp(d) - d - 1 with d = log ref - log p: unbiased and never negative."""
    difference = ref_logprobs - logprobs
    return loss_math.expm1(torch.clamp(difference, max=MAX_LOG_RATIO)) - difference


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True)
class Objective:
    """The loss function of a run: an algorithm with the values of all its options."""

    algorithm: algorithms.Algorithm
    settings: algorithms.AlgorithmSettings
    max_tokens: int
    advantages: Callable[[StepRewards], Advantages]
    token_loss: Callable[..., TokenLoss]
    aggregation: algorithms.Aggregation
    correction: Correction | None

    @classmethod
    def from_settings(cls, settings: algorithms.AlgorithmSettings, max_tokens: int) -> Objective:
        """Return the objective for the section `[algorithm]`."""
        name = settings.name
        algorithm = load_algorithm(name) if settings.from_file else algorithms.ALGORITHMS[name]
        # Reject settings that the algorithm ignores, which only its record tells.
        problems = list(settings.problems(algorithm))
        if problems:
            raise UserError("; ".join(problems))
        # Use the setting if given, else the algorithm's default.
        values = {key: settings.value(key, algorithm) for key in algorithm.options}
        own = settings.options
        _check_own_options(name, own, algorithm)
        token_loss = _piece(name, algorithm.loss, (LOSSES, UsersLoss), values | own)
        if not isinstance(algorithm.advantages, str):
            values |= own
        advantages = _piece(name, algorithm.advantages, (ESTIMATORS, UsersEstimator), values)
        aggregation = settings.aggregation or algorithm.aggregation
        correction = Correction.from_settings(settings)
        return cls(algorithm, settings, max_tokens, advantages, token_loss, aggregation, correction)

    @property
    def clips(self) -> tuple[float, float]:
        """Return clip and clip_high if the loss clips token ratios."""
        assert isinstance(self.token_loss, partial)
        return self.token_loss.keywords["clip"], self.token_loss.keywords["clip_high"]

    def with_clips(self, clip: float, clip_high: float) -> Objective:
        return replace(self, token_loss=partial(self.token_loss, clip=clip, clip_high=clip_high))

    @property
    def overlong_buffer(self) -> int:
        """Return the tokens before the limit over which the reward drops; 0 if off."""
        buffer = self.settings.value("overlong_buffer", self.algorithm)
        return self.max_tokens // 5 if buffer is None else int(buffer)

    @property
    def dynamic_sampling(self) -> bool:
        """Return True if zero-advantage groups are replaced by sampling more prompts."""
        return bool(self.settings.value("dynamic_sampling", self.algorithm))

    @property
    def kl_in_reward(self) -> bool:
        """Return True if a KL to the reference is subtracted from the rewards."""
        return self.settings.kl > 0 and self.settings.kl_term(self.algorithm)[1] == "reward"

    def penalty(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Return the weighted KL per token, float32 [N], from log-probs float32 [N]."""
        estimate = KL_ESTIMATORS[self.settings.kl_term(self.algorithm)[0]]
        return self.settings.kl * estimate(logprobs, ref_logprobs)

    def __call__(
        self,
        tokens: Tokens,
        size: UpdateSize,
        rollout_logprobs: Tensor,
        ref_logprobs: Tensor | None = None,
    ) -> MicroBatchLoss:
        """Return the loss of a micro-batch of N trained tokens, as a share of the update's loss."""
        share = 1.0 / size.tokens
        # Per-token loss, times the correction's weight.
        token_loss = self.token_loss(tokens)
        loss = token_loss.loss
        metrics = {"policy/clip_fraction": loss_math.total(token_loss.clipped) * share}
        peaks = {}
        if self.correction is not None:
            weights, touched, ratio = self.correction(tokens, rollout_logprobs)
            loss = loss * weights
            metrics["correction/weight_mean"] = loss_math.total(weights) * share
            metrics["correction/touched_fraction"] = loss_math.total(touched) * share
            peaks["correction/weight_max"] = weights.double().max()
            peaks["correction/ratio_max"] = ratio.double().max()
        if ref_logprobs is not None:
            with torch.no_grad():
                # Measured whenever there is a reference, even if the KL is not in the loss.
                measured = k3(tokens.trainer_logprobs, ref_logprobs)
            metrics["policy/kl_ref"] = loss_math.total(measured) * share
            if self.settings.kl and not self.kl_in_reward:
                loss = loss + self.penalty(tokens.trainer_logprobs, ref_logprobs)
        # Weights refer to the whole update: micro-batch shares are summed.
        weights = token_weights(tokens.lengths, size, self.aggregation, len(loss))
        return MicroBatchLoss(loss_math.loss_sum(loss * weights), metrics, peaks)


def _check_own_options(name: str, own: Json, algorithm: algorithms.Algorithm) -> None:
    """Check that the loss or estimator of a user has an argument for each algorithm option."""
    loss, estimator = algorithm.loss, algorithm.advantages
    known = _arguments(LOSSES[loss] if isinstance(loss, str) else loss)
    known |= {} if isinstance(estimator, str) else _arguments(estimator)
    # Otherwise a misspelled option would be ignored silently.
    for key in own:
        if key not in known:
            has = ", ".join(known) or "none"
            raise UserError(f"algorithm.options.{key}: {name} has no such argument; it has {has}")


def _arguments(piece: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the options of a function by name: every argument except the first."""
    return dict(list(inspect.signature(piece).parameters.items())[1:])


_Pieces = tuple[Mapping[str, Callable[..., Any]], Callable[..., Any]]


def _piece(name: str, piece: str | Callable[..., Any], kinds: _Pieces, values: Json) -> Any:
    """Return a built-in or user-defined loss or estimator with its options bound."""
    built_in, users = kinds
    function = built_in[piece] if isinstance(piece, str) else piece
    if values.get("clip_high") is None and "clip" in values:
        values = {**values, "clip_high": values["clip"]}
    arguments = _arguments(function)
    for key, argument in arguments.items():
        if argument.default is inspect.Parameter.empty and key not in values:
            raise UserError(
                f"{name} needs algorithm.options.{key}, or a default in its record: "
                f"Algorithm(options={{{key!r}: ...}})"
            )
    options = {key: values[key] for key in arguments if key in values}
    if isinstance(piece, str):
        return partial(function, **options)
    return users(name, function, options)  # validates the function's result


def load_algorithm(name: str) -> algorithms.Algorithm:
    """Load the algorithm given as `file.py:name`; errors in the file are UserErrors.

    The object is an `Algorithm`, or a loss function of (Tokens, **options), which is combined with
    group advantages and token-mean aggregation.
    """
    path, _, member = name.rpartition(":")
    file = Path(path)
    check_trusted(file)
    if not file.is_file():
        raise UserError(
            f"algorithm.name = {name}: no such file (paths start at the working folder)"
        )
    # A fresh module per load, so that nothing is shared with an earlier load.
    spec = importlib.util.spec_from_file_location(f"jetrl_user_algorithm_{file.stem}", file)
    assert spec is not None  # the path ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except USERS_ERRORS as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename) == file]
        line = lines[-1] if lines else getattr(error, "lineno", None)
        raise UserError(
            f"algorithm file {file}, line {line}: {type(error).__name__}: {error}"
        ) from error
    algorithm = getattr(module, member, None)
    if isinstance(algorithm, algorithms.Algorithm):
        return algorithm
    if not callable(algorithm):
        raise UserError(
            f"algorithm file {file}: {member!r} is not a function or an Algorithm; the file has "
            f"{', '.join(key for key, value in vars(module).items() if callable(value)) or 'none'}"
        )
    return replace(algorithms.USERS, title=member, loss=algorithm)


@dataclass(frozen=True)
class UsersFunction:
    """A user-defined function with keyword options; `name` is the algorithm's setting."""

    name: str
    function: Callable[..., Any]
    options: Json

    def _call(self, argument: object, subject: str) -> Any:
        """Call the function; errors in it become `UserError`."""
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
    """User-defined loss: a function of (Tokens, **options)."""

    def __call__(self, tokens: Tokens) -> TokenLoss:
        loss = self._call(tokens, "it")
        # A plain tensor carries no clip mask.
        if isinstance(loss, Tensor):
            loss = TokenLoss(loss, torch.zeros_like(loss, dtype=torch.bool))
        if not isinstance(loss, TokenLoss) or loss.loss.shape != tokens.advantages.shape:
            shape = list(loss.loss.shape) if isinstance(loss, TokenLoss) else type(loss).__name__
            count = len(tokens.advantages)
            raise self._error(
                f"it must return one loss for each of the {count} tokens, not {shape}"
            )
        if tokens.trainer_logprobs.requires_grad and not loss.loss.requires_grad:
            raise self._error("its loss has no gradient; make it of tokens.trainer_logprobs")
        return loss


class UsersEstimator(UsersFunction):
    """User-defined advantage estimator: a function of (StepRewards, **options)."""

    def __call__(self, step: StepRewards) -> Advantages:
        returned = self._call(step, "its advantages")
        lengths = [len(penalty) for penalty in step.penalties]
        # Either a list of advantage arrays, or an `Advantages` with returns for a critic.
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
    """Return a description of a value: type, and shape and dtype of arrays."""
    name = type(value).__name__
    if isinstance(value, np.ndarray | Tensor):
        return f"{name} of shape {list(value.shape)}, {value.dtype}"
    if isinstance(value, list | tuple):
        first = f", the first {_described(value[0])}" if value else ""
        return f"{name} of {len(value)}{first}"
    return "None" if value is None else name


def _problem(per_sample: object, lengths: Sequence[int]) -> str:
    """Return the problem with user-defined advantages or returns, or ""."""
    arrays = []
    if isinstance(per_sample, Sequence | np.ndarray):
        try:
            arrays = list(map(np.asarray, per_sample))
        except (RuntimeError, TypeError, ValueError) as error:  # such as a tensor with a gradient
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
