"""The objective of a run: an algorithm's pieces, put together as the settings say."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from jetrl.errors import UserError
from jetrl.memory.out_of_memory import is_out_of_memory
from jetrl.settings import AlgorithmSettings
from jetrl.settings.algorithms import ALGORITHMS, Aggregation, Algorithm, KlEstimator, KlPlace
from jetrl.training.advantages import ESTIMATORS, Advantages, StepRewards
from jetrl.training.losses import MicroBatchLoss
from jetrl.training.objectives import kl
from jetrl.training.objectives.aggregation import UpdateSize, token_weights
from jetrl.training.objectives.clipped_ratio import clipped_ratio
from jetrl.training.objectives.corrections import Correction
from jetrl.training.objectives.detached_ratio import detached_ratio
from jetrl.training.objectives.ratio import ratio
from jetrl.training.objectives.sequence_ratio import sequence_ratio
from jetrl.training.objectives.tokens import TokenLoss, Tokens
from jetrl.training.objectives.users import load_algorithm, users_advantages_problem

LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "clipped_ratio": clipped_ratio,
    "sequence_ratio": sequence_ratio,
    "detached_ratio": detached_ratio,
    "ratio": ratio,
}


@dataclass(frozen=True)
class Objective:
    """What a run optimizes.

    Args:
        name: as in the settings. algorithm: its record. settings: `[algorithm]`. max_tokens:
            rollout.max_tokens. clips: in place of clip and clip_high, as calibrated.

    Raises:
        UserError: a user's file that does not import, or options that its function does not have.
    """

    name: str
    algorithm: Algorithm
    settings: AlgorithmSettings
    max_tokens: int
    clips: tuple[float, float] | None = None

    @classmethod
    def from_settings(cls, settings: AlgorithmSettings, max_tokens: int) -> Objective:
        name = settings.name
        algorithm = load_algorithm(name) if settings.from_file else ALGORITHMS[name]
        problems = list(settings.problems(algorithm))
        if problems:
            raise UserError("; ".join(problems))
        objective = cls(name, algorithm, settings, max_tokens)
        objective._arguments(objective._loss)  # a missing or unknown option is an error at start
        objective._arguments(objective._estimator)
        return objective

    @property
    def aggregation(self) -> Aggregation:
        return self.settings.aggregation or self.algorithm.aggregation

    @property
    def overlong_buffer(self) -> int:
        """Tokens before the limit in which the reward falls; 0: off."""
        buffer = self._option("overlong_buffer")
        return self.max_tokens // 5 if buffer is None else int(buffer)

    @property
    def dynamic_sampling(self) -> bool:
        """Whether more prompts are drawn in place of groups with equal rewards."""
        return bool(self._option("dynamic_sampling"))

    @property
    def correction(self) -> Correction | None:
        return Correction.from_settings(self.settings)

    @property
    def clip_arguments(self) -> tuple[float, float]:
        """clip and clip_high, of a loss that has both."""
        arguments = self._arguments(self._loss)
        return arguments["clip"], arguments["clip_high"]

    def advantages(self, step: StepRewards) -> Advantages:
        """The advantages of a step, by the algorithm's estimator.

        Raises:
            UserError: a user's estimator that raises, or gives something else.
        """
        arguments = self._arguments(self._estimator)
        if isinstance(self.algorithm.advantages, str):
            built_in: Advantages = self._estimator(step, **arguments)
            return built_in
        try:
            found = self._estimator(step, **arguments)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise UserError(
                f"algorithm.name = {self.name}: its advantages raised {_raised(error)}"
            ) from error
        problem = users_advantages_problem(found, [len(penalty) for penalty in step.penalties])
        if problem:
            raise UserError(f"algorithm.name = {self.name}: its advantages {problem}")
        return found if isinstance(found, Advantages) else Advantages(list(found))

    @property
    def kl_in_reward(self) -> bool:
        return self.settings.kl > 0 and self._kl_term[1] == "reward"

    def penalty(self, logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
        """What a KL in the reward takes from each token's: float32 [N]."""
        return self.settings.kl * kl.ESTIMATORS[self._kl_term[0]](logprobs, ref_logprobs)

    def __call__(
        self,
        tokens: Tokens,
        size: UpdateSize,
        rollout_logprobs: torch.Tensor,
        ref_logprobs: torch.Tensor | None = None,
    ) -> MicroBatchLoss:
        """The loss of a micro-batch of N trained tokens: its share of the update's.

        Args:
            size: of the whole update.
            rollout_logprobs: float32 [N], the sampler's. ref_logprobs: float32 [N] of the frozen
                reference, or None.

        Returns:
            The loss; metrics policy/clip_fraction; policy/kl_ref (mean k3, nats a token) with a
            reference; correction/* with a correction.
        """
        share = 1.0 / size.tokens
        found = self._token_loss(tokens)
        loss = found.loss
        metrics = {"policy/clip_fraction": found.clipped.double().sum() * share}
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
                estimate = kl.ESTIMATORS[self._kl_term[0]]
                term = estimate(tokens.trainer_logprobs, ref_logprobs)
                loss = loss + self.settings.kl * term
        weights = token_weights(tokens.lengths, size, self.aggregation, len(loss))
        return MicroBatchLoss((loss * weights).sum(), metrics, peaks)

    def _token_loss(self, tokens: Tokens) -> TokenLoss:
        arguments = self._arguments(self._loss)
        try:
            found = self._loss(tokens, **arguments)
        except Exception as error:
            if isinstance(self.algorithm.loss, str) or is_out_of_memory(error):
                raise
            raise UserError(f"algorithm.name = {self.name}: it raised {_raised(error)}") from error
        if isinstance(found, torch.Tensor):
            found = TokenLoss(found, torch.zeros_like(found, dtype=torch.bool))
        if not isinstance(found, TokenLoss) or found.loss.shape != tokens.advantages.shape:
            shape = list(found.loss.shape) if isinstance(found, TokenLoss) else type(found).__name__
            raise UserError(
                f"algorithm.name = {self.name}: it must return one loss for each of the "
                f"{len(tokens.advantages)} tokens, not {shape}"
            )
        if tokens.trainer_logprobs.requires_grad and not found.loss.requires_grad:
            raise UserError(
                f"algorithm.name = {self.name}: its loss has no gradient; make it of "
                "tokens.trainer_logprobs or tokens.log_ratio, and detach neither"
            )
        return found

    @property
    def _loss(self) -> Callable[..., Any]:
        loss = self.algorithm.loss
        return LOSSES[loss] if isinstance(loss, str) else loss

    @property
    def _estimator(self) -> Callable[..., Any]:
        estimator = self.algorithm.advantages
        return ESTIMATORS[estimator] if isinstance(estimator, str) else estimator

    @property
    def _kl_term(self) -> tuple[KlEstimator, KlPlace]:
        return self.settings.kl_term(self.algorithm)

    def _option(self, key: str) -> Any:
        return self.settings.value(key, self.algorithm)

    def _arguments(self, function: Callable[..., Any]) -> Mapping[str, Any]:
        """The settings that a piece has a parameter for."""
        own = self.settings.options
        known = {key: self._option(key) for key in self.algorithm.options}
        known["clip_high"] = known.get("clip_high") or known.get("clip")
        if self.clips is not None:
            known["clip"], known["clip_high"] = self.clips
        parameters = list(inspect.signature(function).parameters.values())[1:]
        if function is self._loss:
            names = [parameter.name for parameter in parameters]
            for key in own.keys() - set(names):
                raise UserError(
                    f"algorithm.options.{key}: {self.name} has no such argument; it has "
                    f"{', '.join(names) or 'none'}"
                )
            known |= own
        missing = [
            p.name
            for p in parameters
            if p.name not in known and p.default is inspect.Parameter.empty
        ]
        if missing:
            raise UserError(f"{self.name} needs algorithm.options.{missing[0]}")
        return {p.name: known[p.name] for p in parameters if p.name in known}


def _raised(error: Exception) -> str:
    """The exception, and the line of Python that it came from."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
