"""What is made of a step's samples before the first update: micro-batches, with their advantages
and all that is known of their tokens by then (log-probs of the trainer and of the reference, values
of the critic)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from jetrl.errors import RunStopped
from jetrl.training.advantages import (
    Advantages,
    StepRewards,
    check_rewards,
    overlong_penalties,
)
from jetrl.training.extras.critic import Critic, value_metrics
from jetrl.training.forward import at_targets, batch_logprobs
from jetrl.training.micro_batches import MicroBatch, MicroBatchSize
from jetrl.training.objectives import Objective
from jetrl.training.packing import by_batch, by_sample, pack, with_advantages
from jetrl.types import Batch, Sample

if TYPE_CHECKING:
    from jetrl.models.policy import Policy


class Preparation:
    """Prepares samples for updates of a policy.

    Args:
        reference: frozen, for the KL; None without one. critic: None without one.
        size: what a micro-batch may have now. minibatches: the samples of each update of a step.
            temperature: of the log-probs.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        reference: Policy | None,
        critic: Critic | None,
        size: MicroBatchSize,
        minibatches: Callable[[Sequence[Sample]], list[list[int]]],
        temperature: float,
    ) -> None:
        self._policy, self._objective = policy, objective
        self._reference, self._critic = reference, critic
        self._size, self._minibatches, self._temperature = size, minibatches, temperature

    def __call__(
        self, samples: Sequence[Sample]
    ) -> tuple[list[list[MicroBatch]], dict[str, float]]:
        """The micro-batches of each update; metrics of the rewards and of the critic.

        Raises:
            RunStopped: no sample has a token.
            UserError: fewer samples than updates, an empty prompt, a reward that is not finite.
        """
        minibatches = self.pack(samples)
        with contextlib.nullcontext() if self._reference is None else self._reference.used():
            prepared = [
                [self._known(batch, first=k == 0) for batch in batches]
                for k, batches in enumerate(minibatches)
            ]
        rewards, metrics = self._rewards(samples, list(chain(*prepared)))
        found = self._objective.advantages(rewards)
        if rewards.values is not None and found.returns is not None:
            metrics |= value_metrics(rewards.values, found.returns)
        return [[_told(micro, found) for micro in batches] for batches in prepared], metrics

    def pack(self, samples: Sequence[Sample]) -> list[list[Batch]]:
        """The batches of each update. An update without a trained token is left out."""
        minibatches = [
            pack(samples, self._size.tokens, sample_ids)
            for sample_ids in self._minibatches(samples)
        ]
        minibatches = [batches for batches in minibatches if batches]
        if not minibatches:
            raise RunStopped(
                f"none of the step's {len(samples)} samples has a completion token: there is "
                "nothing to train on; look at the prompts and stop strings"
            )
        return minibatches

    def _known(self, batch: Batch, first: bool) -> MicroBatch:
        """A batch of the step's first update, or of a later one, and what is known of it."""
        reference, critic = self._reference, self._critic
        return MicroBatch(
            batch,
            before=None if first else self._logprobs(self._policy, batch),
            ref_logprobs=None if reference is None else self._logprobs(reference, batch),
            values=None if critic is None else critic.values(batch),
        )

    @torch.no_grad()
    def _logprobs(self, policy: Policy, batch: Batch) -> torch.Tensor:
        return batch_logprobs(policy, batch, self._temperature)[0]

    def _rewards(
        self, samples: Sequence[Sample], micro_batches: Sequence[MicroBatch]
    ) -> tuple[StepRewards, dict[str, float]]:
        """What the advantages are made of, and the means of what was taken from the rewards."""
        objective, metrics = self._objective, {}
        reward_S, group_S = check_rewards(
            [sample.score.reward for sample in samples], [sample.group for sample in samples]
        )
        if objective.overlong_buffer:
            # Of all tokens, as the limit: an environment's are among them.
            lengths = np.array([len(sample.completion.token_ids) for sample in samples])
            overlong = overlong_penalties(lengths, objective.max_tokens, objective.overlong_buffer)
            reward_S = reward_S - overlong
            metrics["reward/overlong_penalty"] = float(overlong.mean())
        batches = [micro.batch for micro in micro_batches]
        penalties = by_sample(batches, [self._penalty(m) for m in micro_batches], len(samples))
        if objective.kl_in_reward:
            metrics["reward/kl_penalty"] = sum(float(p.sum()) for p in penalties) / len(samples)
        values = [m.values.cpu().numpy() for m in micro_batches if m.values is not None]
        by_token = by_sample(batches, values, len(samples)) if values else None
        return StepRewards(reward_S, group_S, penalties, by_token), metrics

    def _penalty(self, micro: MicroBatch) -> np.ndarray:
        """What the KL takes from the reward of each trained token: float64 [N]."""
        batch, ref_logprobs = micro.batch, micro.ref_logprobs
        if ref_logprobs is None or not self._objective.kl_in_reward:
            return np.zeros(int(batch.loss_mask.sum()))
        logprobs = at_targets(batch.rollout_logprobs, batch, self._policy.device)
        return self._objective.penalty(logprobs, ref_logprobs).double().cpu().numpy()


def _told(micro: MicroBatch, found: Advantages) -> MicroBatch:
    """The micro-batch with its part of what was found."""
    batch = with_advantages(micro.batch, found.advantages)
    if found.returns is None:
        return replace(micro, batch=batch)
    returns = torch.from_numpy(by_batch(micro.batch, found.returns))
    return replace(micro, batch=batch, returns=returns)
