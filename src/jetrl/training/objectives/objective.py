"""The objective of a run: an algorithm's pieces, put together once, as the settings say."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from jetrl.errors import UserError
from jetrl.settings import AlgorithmSettings
from jetrl.settings.algorithms import ALGORITHMS, Aggregation, Algorithm
from jetrl.training.advantages import ESTIMATORS, Estimator
from jetrl.training.losses import MicroBatchLoss
from jetrl.training.objectives import kl
from jetrl.training.objectives.aggregation import UpdateSize, token_weights
from jetrl.training.objectives.corrections import Correction
from jetrl.training.objectives.token_losses import LOSSES, ClippedRatio
from jetrl.training.objectives.tokens import TokenLoss, Tokens
from jetrl.training.objectives.users import UsersEstimator, UsersLoss, load_algorithm


@dataclass(frozen=True)
class Objective:
    """The function that a run optimizes: an algorithm with the values of all options.

    Attributes:
        settings: The section `[algorithm]`.
        aggregation: How the tokens of an update are weighted.
        correction: Weighs tokens against the mismatch between sampler and trainer; None for none.
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
        """Return the objective that the settings ask for.

        Args:
            settings: The section `[algorithm]`.

        Raises:
            UserError: A user's file that does not import, or options that its function lacks.
        """
        name = settings.name
        algorithm = load_algorithm(name) if settings.from_file else ALGORITHMS[name]
        problems = list(settings.problems(algorithm))
        if problems:
            raise UserError("; ".join(problems))
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
        """Return the same objective with other clips of token ratios."""
        assert isinstance(self.token_loss, ClippedRatio)
        return replace(self, token_loss=replace(self.token_loss, clip=clip, clip_high=clip_high))

    @property
    def overlong_buffer(self) -> int:
        """Return how many tokens before the limit the reward begins to fall; 0 for off."""
        buffer = self.settings.value("overlong_buffer", self.algorithm)
        return self.max_tokens // 5 if buffer is None else int(buffer)

    @property
    def dynamic_sampling(self) -> bool:
        """Return whether more prompts are drawn in place of groups with equal rewards."""
        return bool(self.settings.value("dynamic_sampling", self.algorithm))

    @property
    def kl_in_reward(self) -> bool:
        """Return whether a KL to the reference is taken from the rewards."""
        return self.settings.kl > 0 and self.settings.kl_term(self.algorithm)[1] == "reward"

    def penalty(self, logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
        """Return the weighted KL of each token, float32 [N], from log-probs float32 [N]."""
        estimate = kl.ESTIMATORS[self.settings.kl_term(self.algorithm)[0]]
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
                measured = kl.k3(tokens.trainer_logprobs, ref_logprobs)
            metrics["policy/kl_ref"] = measured.double().sum() * share
            if self.settings.kl and not self.kl_in_reward:
                loss = loss + self.penalty(tokens.trainer_logprobs, ref_logprobs)
        weights = token_weights(tokens.lengths, size, self.aggregation, len(loss))
        return MicroBatchLoss((loss * weights).sum(), metrics, peaks)


def _check_own_options(name: str, own: Mapping[str, Any], algorithm: Algorithm) -> None:
    """Check that each of algorithm.options is an argument of the loss or of a user's estimator."""
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
    """Return the options of one piece of an algorithm."""
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
