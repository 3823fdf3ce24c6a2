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
    """The function that a run optimizes: an algorithm with all of its options.

    Attributes:
        algorithm: The record of the algorithm.
        settings: The section `[algorithm]`.
        max_tokens: rollout.max_tokens.
        advantages: Makes the advantages of a step's rewards, with its options.
        token_loss: Makes the loss of each token, with its options.
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
            max_tokens: rollout.max_tokens.

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
        token_loss: Callable[[Tokens], TokenLoss]
        if isinstance(loss, str):
            token_loss = LOSSES[loss](**_options(name, LOSSES[loss], values, settings.options))
        else:
            token_loss = UsersLoss(name, loss, _options(name, loss, values, settings.options))
        advantages: Estimator
        if isinstance(estimator, str):
            advantages = ESTIMATORS[estimator](**_options(name, ESTIMATORS[estimator], values))
        else:
            advantages = UsersEstimator(name, estimator, _options(name, estimator, values))
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
        """Return the loss of a micro-batch of N trained tokens: its share of the update's.

        Args:
            tokens: The tokens.
            size: The size of the whole update.
            rollout_logprobs: float32 [N], the sampler's log-probs.
            ref_logprobs: float32 [N], the log-probs of the frozen reference; None without one.

        Returns:
            The loss; metrics policy/clip_fraction; policy/kl_ref (mean k3, nats a token) with a
            reference; correction/* with a correction.
        """
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


def _options(
    name: str,
    piece: Callable[..., Any],
    values: Mapping[str, Any],
    own: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the options of one piece of an algorithm.

    Args:
        name: The algorithm's name in the settings, for messages.
        piece: A built-in piece, whose options are the fields of a record, or a user's function,
            whose options are its arguments after the first.
        values: The settings that the algorithm reads, by name.
        own: algorithm.options, of which the piece must have every one; None for a piece that does
            not get them.

    Raises:
        UserError: An option that the piece does not have, or one that it needs is missing.
    """
    is_record = isinstance(piece, type)
    arguments = list(inspect.signature(piece).parameters.values())[0 if is_record else 1 :]
    names = [argument.name for argument in arguments]
    for key in (own or {}).keys() - set(names):
        raise UserError(
            f"algorithm.options.{key}: {name} has no such argument; it has "
            f"{', '.join(names) or 'none'}"
        )
    known = {**values, **(own or {})}
    if known.get("clip_high") is None and "clip" in known:
        known["clip_high"] = known["clip"]
    for argument in arguments:
        if argument.default is inspect.Parameter.empty and argument.name not in known:
            raise UserError(f"{name} needs algorithm.options.{argument.name}")
    return {key: known[key] for key in names if key in known}
