"""Preparation of a training step: from scored samples to micro-batches with advantages.

Before the first update, it computes trainer and reference log-probs and critic values, and from
these and the rewards the advantages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from jetrl.distributed.world import world
from jetrl.errors import RunStopped
from jetrl.memory.out_of_memory import on_all_ranks, within_memory
from jetrl.models.policy import Policy
from jetrl.settings.loading import Settings
from jetrl.training import packing
from jetrl.training.advantages import (
    Advantages,
    StepRewards,
    check_rewards,
    of_episodes,
    overlong_penalties,
)
from jetrl.training.host_math import exact_sum, mean, variance
from jetrl.training.micro_batches import (
    MicroBatch,
    MicroBatchSize,
    Minibatch,
    at_targets,
    batch_logprobs,
    sizes_of,
)
from jetrl.training.objectives import Objective
from jetrl.types import Batch, Metrics, Sample, TokenFilter

Prepared = tuple[list[Minibatch], Metrics]


@dataclass(frozen=True)
class Preparation:
    """Prepares the samples of a training step for the updates of a policy.

    `values` computes a critic's expected return before each of a batch's N trained tokens, float32
    [N], without gradient.
    """

    policy: Policy
    settings: Settings
    objective: Objective
    reference: Policy | None
    values: Callable[[Batch], Tensor] | None
    size: MicroBatchSize
    temperature: float
    token_filter: TokenFilter

    def __call__(self, samples: Sequence[Sample], num_updates: int) -> Prepared:
        """Return the minibatch of each update, and metrics of rewards and critic."""
        packing.check_samples(samples, self.policy.plan.exact)
        chosen = packing.choose_minibatches(samples, self.settings, num_updates)

        # Forwards without gradient can run out of memory too: pack again with a smaller limit.
        def shrink(problem: str) -> None:
            packed = self._pack(samples, chosen)
            self.size.halve([sizes_of(batch) for batch in chain(*packed)], problem)

        return within_memory(lambda: self._prepare(samples, self._pack(samples, chosen)), shrink)

    def _prepare(self, samples: Sequence[Sample], packed: list[list[Batch]]) -> Prepared:
        # Minibatches stay separate; each is split into micro-batches.
        forwarded = self._forward_all(packed)
        # Rewards minus penalties, then one advantage per trained token.
        rewards, metrics = self._rewards(samples, list(chain(*forwarded)))
        continues = [sample.continues for sample in samples]
        advantages = of_episodes(self.objective.advantages, rewards, continues)
        if rewards.values is not None and advantages.returns is not None:
            metrics |= value_metrics(rewards.values, advantages.returns)
        return [
            Minibatch([_with_advantages(micro, advantages) for micro in micro_batches], self.size)
            for micro_batches in forwarded
        ], metrics

    def _forward_all(self, packed: Sequence[Sequence[Batch]]) -> list[list[MicroBatch]]:
        """Return each update's batches with log-probs (trainer, reference) and values filled in."""
        batches = [(batch, k == 0) for k, batches in enumerate(packed) for batch in batches]

        def forward_share() -> list[MicroBatch]:
            with contextlib.nullcontext() if self.reference is None else self.reference.used():
                return [self._forward(batch, first) for batch, first in world().share(batches)]

        # Each rank runs its share of forwards; log-probs and values are then gathered in order.
        own = on_all_ranks(forward_share)
        if world().size > 1:
            of_own = [{name: tensor.cpu() for name, tensor in m.known().items()} for m in own]
            known = world().gather_in_order("numbers from before the updates", of_own)
            own = [
                MicroBatch(batch, **{n: t.to(self.policy.device) for n, t in tensors.items()})
                for (batch, _), tensors in zip(batches, known, strict=True)
            ]
        micro_batches = iter(own)
        return [[next(micro_batches) for _ in batches] for batches in packed]

    def _pack(self, samples: Sequence[Sample], chosen: list[list[int]]) -> list[list[Batch]]:
        """Return the batches of each update, without updates that have no trained tokens."""
        size, share = self.size.tokens, self.settings.train.share_prompts
        packed = [
            packing.pack(samples, size, ids, packing.shares_prompts(share, samples, ids))
            for ids in chosen
        ]
        packed = [batches for batches in packed if batches]
        if not packed:
            raise RunStopped(
                f"none of the step's {len(samples)} samples has a completion token: look at the "
                "prompts and stop strings"
            )
        return packed

    def _forward(self, batch: Batch, first: bool) -> MicroBatch:
        reference = self.reference
        return MicroBatch(
            batch,
            # The first minibatch's training forward computes these log-probs; later minibatches
            # need a forward now.
            before=None if first else self._logprobs(self.policy, batch),
            ref_logprobs=None if reference is None else self._logprobs(reference, batch),
            values=None if self.values is None else self.values(batch),
        )

    @torch.no_grad()
    def _logprobs(self, policy: Policy, batch: Batch) -> Tensor:
        # A reference has its own set of tokens, with the drawn one: equal weights have a KL of 0.
        return batch_logprobs(policy, batch, self.temperature, token_filter=self.token_filter)[0]

    def _rewards(
        self, samples: Sequence[Sample], micro_batches: Sequence[MicroBatch]
    ) -> tuple[StepRewards, Metrics]:
        """Return the input of the advantage estimator, and the means of the penalties."""
        objective, metrics = self.objective, {}
        # A non-finite reward would corrupt its whole group.
        reward_S, group_S = check_rewards(
            [sample.score.reward for sample in samples], [sample.group for sample in samples]
        )
        if objective.overlong_buffer:
            # Count all tokens, including the environment's, as for the limit.
            lengths = np.array([len(sample.completion.token_ids) for sample in samples])
            # The limit is that of a sample, so an episode has the penalty of its longest one.
            starts = np.flatnonzero([not sample.continues for sample in samples])
            longest = np.maximum.reduceat(lengths, starts)
            overlong = overlong_penalties(longest, objective.max_tokens, objective.overlong_buffer)
            reward_S = reward_S - np.repeat(overlong, np.diff([*starts, len(samples)]))
            metrics["reward/overlong_penalty"] = mean(overlong)
        batches = [micro.batch for micro in micro_batches]
        of_batches = [self._penalty(micro) for micro in micro_batches]
        penalties = packing.by_sample(batches, of_batches, len(samples))
        if objective.kl_in_reward:
            metrics["reward/kl_penalty"] = mean(map(exact_sum, penalties))
        # Regroup packed values by sample for the advantage estimator.
        values = [m.values.cpu().numpy() for m in micro_batches if m.values is not None]
        by_token = packing.by_sample(batches, values, len(samples)) if values else None
        return StepRewards(reward_S, group_S, penalties, by_token), metrics

    def _penalty(self, micro: MicroBatch) -> np.ndarray:
        """Return the KL penalty on the reward per trained token, float64 [N]."""
        batch, ref_logprobs = micro.batch, micro.ref_logprobs
        if ref_logprobs is None or not self.objective.kl_in_reward:
            return np.zeros(int(batch.loss_mask.sum()))
        logprobs = at_targets(batch.rollout_logprobs, batch, self.policy.device)
        return self.objective.penalty(logprobs, ref_logprobs).double().cpu().numpy()


def _with_advantages(micro: MicroBatch, advantages: Advantages) -> MicroBatch:
    # Store advantages per token, and returns next to the values.
    batch = packing.with_advantages(micro.batch, advantages.advantages)
    if advantages.returns is None:
        return replace(micro, batch=batch)
    returns = torch.from_numpy(packing.by_batch(micro.batch, advantages.returns))
    return replace(micro, batch=batch, returns=returns)


def value_metrics(values: Sequence[np.ndarray], returns: Sequence[np.ndarray]) -> Metrics:
    """Return critic/{value_mean, return_mean, explained_variance} of float32 [n] per sample.

    The last is 1 - var(returns - values) / var(returns), or 0 if all returns are equal.
    """
    value_N, return_N = np.concatenate(values), np.concatenate(returns)
    spread = variance(return_N)
    unexplained = variance(return_N - value_N)
    return {
        "critic/value_mean": mean(value_N),
        "critic/return_mean": mean(return_N),
        "critic/explained_variance": 1.0 - unexplained / spread if spread else 0.0,
    }
