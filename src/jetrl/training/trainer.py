"""The trainer: scored samples in, updated weights and metrics out.

A step is one or more optimizer updates on disjoint parts of its samples (packing.py). The policy
that the samples came from is needed for the ratio. Under an exact plan it is known: the sampler's
log-probs are the trainer's, bit for bit, and nothing is recomputed. Under any other plan it is the
trainer's own policy before the step's first update: for the first update that is its forward,
detached; for later ones a forward without gradient is made beforehand.

Every step compares sampler and trainer on all trained tokens, before any weight changes. (With
several updates the later minibatches are therefore forwarded once without gradient under an exact
plan too.) Under an exact plan one different bit ends the step with `StepMismatchError`.

What is optimized is an `Objective` (objectives/), made of the pieces that the settings name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from jetrl.config import Settings
from jetrl.errors import RunStopped, UserError
from jetrl.training.advantages import StepRewards, check_rewards, overlong_penalties
from jetrl.training.forward import at_targets, batch_logprobs
from jetrl.training.mismatch import StepMismatchError, differences, mismatch_metrics
from jetrl.training.objectives import Objective, Tokens, UpdateSize
from jetrl.training.optimizer import Optimizer
from jetrl.training.packing import (
    by_sample,
    pack,
    split_minibatches,
    targets,
    trained_lengths,
    with_advantages,
)
from jetrl.types import Batch, Sample

if TYPE_CHECKING:
    from jetrl.policy import Policy


@dataclass(frozen=True)
class _MicroBatch:
    """A batch, and what of its N trained tokens was known before the step's first update. before:
    the trainer's log-probs, None in the first minibatch. ref_logprobs: the reference's, None
    without one. Both float32 [N], without gradient."""

    batch: Batch
    before: torch.Tensor | None
    ref_logprobs: torch.Tensor | None


@dataclass
class _Pass:
    """What the forwards (and backwards) of a minibatch gave. logprobs: float32 [N] of each of its
    batches, without gradient. sums: shares of the minibatch's means, added. peaks: largest."""

    logprobs: list[torch.Tensor]
    sums: dict[str, torch.Tensor]
    peaks: dict[str, torch.Tensor]

    @property
    def means(self) -> dict[str, float]:
        return {name: float(value) for name, value in self.sums.items()}


class Trainer:
    """An algorithm on a policy.

    Args:
        policy: its masters are updated in place and requantized after every update.
        settings: `algorithm`, `train`, and rollout.{temperature, max_tokens} and loop.steps.
        reference: the frozen policy of the KL term; policy/kl_ref is measured when it is given.

    Attributes:
        objective: what is optimized.
        optimizer: goes into checkpoints.
        timings: seconds of the last step: `update` (forward, backward, AdamW), `requantize`.

    Raises:
        UserError: algorithm.kl is positive without a reference; an algorithm that cannot be used.
    """

    def __init__(self, policy: Policy, settings: Settings, reference: Policy | None = None) -> None:
        if settings.algorithm.kl > 0 and reference is None:
            raise UserError(
                f"algorithm.kl = {settings.algorithm.kl} needs a reference policy; give one, or "
                "set algorithm.kl=0"
            )
        self.policy = policy
        self.settings = settings
        self.reference = reference
        self.objective = Objective.from_settings(settings.algorithm, settings.rollout.max_tokens)
        if self.objective.algorithm.needs_critic:
            raise UserError(f"algorithm.name = {settings.algorithm.name} needs a critic")
        self.optimizer = Optimizer(
            policy.named_masters(),
            settings.train,
            total_updates=settings.loop.steps * settings.train.updates_per_step,
        )
        self.timings = {"update": 0.0, "requantize": 0.0}
        # Greedy sampling reports the log-probs of temperature 1 (types.SamplingParams).
        self._temperature = settings.rollout.temperature or 1.0

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """`train.updates_per_step` updates on the samples of one step.

        Returns:
            policy/loss, policy/entropy (nats), policy/clip_fraction, policy/kl_ref (with a
            reference): means over the step's trained tokens. policy/grad_norm: mean over updates,
            before the clip. policy/lr: of the last update. policy/active_fraction: trained tokens
            whose advantage is not 0 (0: every group had equal rewards, and the policy gradient is
            zero). correction/* with a correction. And the `mismatch/*` of all trained tokens.

        Raises:
            StepMismatchError: sampler and trainer differ under an exact plan; no weight changed.
            RunStopped: no sample has a token, or a gradient is not finite (that update is not
                applied).
            UserError: fewer samples than updates, an empty prompt, a reward that is not finite.
        """
        start = time.perf_counter()
        minibatches, metrics = self._prepare(samples)
        num_tokens = [_size_of(batches, 1).tokens for batches in minibatches]
        requantize_seconds = 0.0
        for k, batches in enumerate(minibatches):
            self.optimizer.zero_grad()
            done = self._accumulate(batches)
            if k == 0:
                metrics |= self._measure_mismatch(samples, minibatches, done.logprobs)
            metrics["policy/lr"] = self.optimizer.lr
            norm = self.optimizer.step()
            requantize_seconds += self._requantize()
            share = num_tokens[k] / sum(num_tokens)
            for name, value in done.means.items():
                metrics[name] = metrics.get(name, 0.0) + share * value
            for name, peak in done.peaks.items():
                metrics[name] = max(metrics.get(name, 0.0), float(peak))
            metrics["policy/grad_norm"] = metrics.get("policy/grad_norm", 0.0) + norm / len(
                minibatches
            )
        self.timings = {
            "update": time.perf_counter() - start - requantize_seconds,
            "requantize": requantize_seconds,
        }
        return metrics

    def _prepare(
        self, samples: Sequence[Sample]
    ) -> tuple[list[list[_MicroBatch]], dict[str, float]]:
        """The micro-batches of each update, with their advantages and all that must be known
        before the first update; metrics of the rewards."""
        reference = self.reference
        prepared = [
            [
                _MicroBatch(
                    batch,
                    before=self._forward(self.policy, batch) if k else None,
                    ref_logprobs=None if reference is None else self._forward(reference, batch),
                )
                for batch in batches
            ]
            for k, batches in enumerate(self._pack(samples))
        ]
        rewards, metrics = self._rewards(samples, list(chain(*prepared)))
        found = self.objective.advantages(rewards)
        return [
            [replace(m, batch=with_advantages(m.batch, found.advantages)) for m in micro_batches]
            for micro_batches in prepared
        ], metrics

    def _pack(self, samples: Sequence[Sample]) -> list[list[Batch]]:
        """The batches of each update. An update without a trained token is left out."""
        train = self.settings.train
        groups = [sample.group for sample in samples]
        minibatches = [
            pack(samples, train.tokens_per_micro_batch, sample_ids)
            for sample_ids in split_minibatches(groups, train.updates_per_step)
        ]
        minibatches = [batches for batches in minibatches if batches]
        if not minibatches:
            raise RunStopped(
                f"none of the step's {len(samples)} samples has a completion token: there is "
                "nothing to train on; look at the prompts and stop strings"
            )
        return minibatches

    def _rewards(
        self, samples: Sequence[Sample], micro_batches: Sequence[_MicroBatch]
    ) -> tuple[StepRewards, dict[str, float]]:
        """What the advantages are made of, and the means of what was taken from the rewards."""
        objective, metrics = self.objective, {}
        reward_S, group_S = check_rewards(
            [sample.score.reward for sample in samples], [sample.group for sample in samples]
        )
        if objective.overlong_buffer:
            lengths = np.array([sample.completion.num_sampled for sample in samples])
            overlong = overlong_penalties(lengths, objective.max_tokens, objective.overlong_buffer)
            reward_S = reward_S - overlong
            metrics["reward/overlong_penalty"] = float(overlong.mean())
        batches = [micro.batch for micro in micro_batches]
        penalties = by_sample(batches, [self._penalty(m) for m in micro_batches], len(samples))
        if objective.kl_in_reward:
            metrics["reward/kl_penalty"] = sum(float(p.sum()) for p in penalties) / len(samples)
        return StepRewards(reward_S, group_S, penalties), metrics

    def _penalty(self, micro: _MicroBatch) -> np.ndarray:
        """What the KL takes from the reward of each trained token: float64 [N]."""
        batch, ref_logprobs = micro.batch, micro.ref_logprobs
        if ref_logprobs is None or not self.objective.kl_in_reward:
            return np.zeros(int(batch.loss_mask.sum()))
        logprobs = at_targets(batch.rollout_logprobs, batch, self.policy.device)
        return self.objective.penalty(logprobs, ref_logprobs).double().cpu().numpy()

    @torch.no_grad()
    def _forward(self, policy: Policy, batch: Batch) -> torch.Tensor:
        return batch_logprobs(policy, batch, self._temperature)[0]

    def _accumulate(self, batches: Sequence[_MicroBatch]) -> _Pass:
        """Forward and backward of one update."""
        size = _size_of(batches, self.settings.rollout.max_tokens)
        done = _Pass([], {}, {})
        for batch in batches:
            self._backward(batch, size, done)
        return done

    def _backward(self, micro: _MicroBatch, size: UpdateSize, done: _Pass) -> None:
        """One micro-batch: its gradients, and its part of `done`."""
        batch, device = micro.batch, self.policy.device
        logprobs, entropy = batch_logprobs(
            self.policy, batch, self._temperature, self.settings.train.activation_checkpointing
        )
        detached = logprobs.detach()
        rollout_logprobs = at_targets(batch.rollout_logprobs, batch, device)
        if self.policy.plan.exact:
            behavior = rollout_logprobs
        else:
            behavior = detached if micro.before is None else micro.before
        advantages = at_targets(batch.advantages, batch, device)
        lengths = torch.from_numpy(trained_lengths(batch)).to(device)
        tokens = Tokens(logprobs, behavior, advantages, lengths)
        loss = self.objective(tokens, size, rollout_logprobs, micro.ref_logprobs)
        loss.loss.backward()
        shares = {
            "policy/loss": loss.loss.detach().double(),
            "policy/entropy": entropy.double().sum() / size.tokens,
            "policy/active_fraction": (advantages != 0).double().sum() / size.tokens,
            **loss.metrics,
        }
        done.logprobs.append(detached)
        for name, share in shares.items():
            done.sums[name] = done.sums[name] + share if name in done.sums else share
        for name, peak in loss.peaks.items():
            done.peaks[name] = torch.maximum(done.peaks.get(name, peak), peak)

    def _measure_mismatch(
        self,
        samples: Sequence[Sample],
        minibatches: Sequence[Sequence[_MicroBatch]],
        first: Sequence[torch.Tensor],
    ) -> dict[str, float]:
        """Of all minibatches; first: the trainer's log-probs of the first one's batches."""
        later = [micro.before for micro in chain(*minibatches[1:]) if micro.before is not None]
        trainer_logprobs = [part.cpu().numpy() for part in (*first, *later)]
        batches = [micro.batch for micro in chain(*minibatches)]
        rollout_logprobs = [batch.rollout_logprobs[targets(batch)] for batch in batches]
        metrics = mismatch_metrics(
            np.concatenate(trainer_logprobs), np.concatenate(rollout_logprobs)
        )
        if self.policy.plan.exact and metrics["mismatch/num_different"]:
            self.optimizer.zero_grad()
            found = [
                difference
                for batch, part in zip(batches, trainer_logprobs, strict=True)
                for difference in differences(batch, part)
            ]
            raise StepMismatchError(
                self.policy.plan.name,
                samples,
                sorted({difference.sample for difference in found}),
                min(found, key=lambda difference: (difference.sample, difference.token)),
                metrics,
            )
        return metrics

    def _requantize(self) -> float:
        """Seconds it took."""
        start = time.perf_counter()
        self.policy.requantize()
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize(self.policy.device)
        return time.perf_counter() - start


def _size_of(batches: Sequence[_MicroBatch], max_tokens: int) -> UpdateSize:
    return UpdateSize(
        tokens=sum(int(micro.batch.loss_mask.sum()) for micro in batches),
        sequences=sum(micro.batch.num_sequences for micro in batches),
        max_tokens=max_tokens,
    )
