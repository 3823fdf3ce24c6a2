"""The trainer: scored samples in, updated weights and metrics out.

A training step is one or more optimizer updates, on disjoint minibatches of its samples. Read
`Trainer.step` first: a batch goes through it from top to bottom.

The policy that the samples came from is needed for the ratio. Under an exact plan it is known: the
sampler's log-probs are the trainer's, bit for bit, and nothing is recomputed. Under any other plan
it is the trainer's own policy before the step's first update: for the first update that is its
forward, detached; for later ones a forward without gradient is made beforehand.

Every step compares sampler and trainer on all trained tokens, before any weight changes. (With
several updates the later minibatches are therefore forwarded once without gradient under an exact
plan too.) Under an exact plan one different bit ends the step with `StepMismatchError`.

What is optimized is an `Objective` (objectives/), made of the pieces that the settings name.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import torch

from jetrl.errors import UserError
from jetrl.models.model import Model
from jetrl.models.packed import upload
from jetrl.settings.loading import Settings
from jetrl.training.extras.calibration import ClipBounds, ClipCalibration
from jetrl.training.extras.critic import Critic
from jetrl.training.extras.draft_head import DraftHeadTraining
from jetrl.training.guard import Guard
from jetrl.training.losses import MicroBatchLoss
from jetrl.training.micro_batches import (
    MicroBatch,
    MicroBatchSize,
    Minibatch,
    at_targets,
    batch_logprobs,
)
from jetrl.training.minibatches import choose_minibatches
from jetrl.training.mismatch import (
    EXCESS,
    VARIANCE,
    StepMismatchError,
    compare_step,
    surprise_sums,
    surprise_z,
)
from jetrl.training.objectives import Objective, Tokens, UpdateSize
from jetrl.training.optimizer import Optimizer
from jetrl.training.packing import trained_lengths
from jetrl.training.preparation import Preparation
from jetrl.training.update import Update, UpdateStats
from jetrl.types import Sample

if TYPE_CHECKING:
    from jetrl.models.policy import Policy


@dataclass(frozen=True)
class TrainedStep:
    """The report of one training step.

    Attributes:
        metrics: Metrics by name, as `Trainer.step` lists them.
        timings: Seconds by phase: `update` (all but requantization), the part of it that is
            `optimizer` (AdamW), and `requantize`.
    """

    metrics: dict[str, float]
    timings: dict[str, float]


class Trainer:
    """An algorithm that trains a policy.

    Args:
        settings: `algorithm`, `train`, and rollout.{temperature, max_tokens} and loop.steps.
        guard: The run's guard, which refuses updates that are not finite; by default a new one.
        draft_head: The draft head that learns from the policy's forwards, or None.

    Attributes:
        draft_head: The draft head that learns from the policy's forwards, or None.
        calibration: Moves the clips of the ratio, where the settings ask for that; else None.

    Raises:
        UserError: algorithm.kl is positive without a reference; an algorithm that cannot be used.
    """

    def __init__(
        self,
        policy: Policy,
        settings: Settings,
        reference: Policy | None = None,
        critic: Critic | None = None,
        micro_batch_size: MicroBatchSize | None = None,
        guard: Guard | None = None,
        draft_head: DraftHeadTraining | None = None,
    ) -> None:
        if settings.algorithm.kl > 0 and reference is None:
            raise UserError(
                f"algorithm.kl = {settings.algorithm.kl} needs a reference policy; give one, or "
                "set algorithm.kl=0"
            )
        self.policy = policy
        self.settings = settings
        self.critic = critic
        self.draft_head = draft_head
        self.objective = Objective.from_settings(settings.algorithm, settings.rollout.max_tokens)
        if self.objective.algorithm.needs_critic and critic is None:
            raise UserError(
                f"algorithm.name = {settings.algorithm.name} needs a critic: set critic.path"
            )
        self.optimizer = Optimizer(
            policy.master_weights(),
            settings.train,
            total_updates=settings.loop.steps * settings.train.updates_per_step,
            shards=policy.weights.shards,
        )
        self.micro_batch_size = micro_batch_size or MicroBatchSize.of(settings.train)
        self.guard = guard or Guard(settings.train.on_nonfinite)
        # Greedy sampling reports the log-probs of temperature 1 (types.SamplingParams).
        self._temperature = settings.rollout.temperature or 1.0
        self._all_draws = _trains_on_all_draws(settings, self.objective)
        self.calibration = self._calibration()
        self.preparation = Preparation(
            policy,
            self.objective,
            reference,
            critic,
            self.micro_batch_size,
            lambda samples: choose_minibatches(samples, settings, self.optimizer.num_updates),
            self._temperature,
            settings.train.share_prompts,
        )
        self._update = Update(
            policy,
            self.optimizer,
            self.guard,
            self._loss,
            "policy",
            watched=("loss", "entropy"),
            synchronize=True,
        )

    @property
    def models(self) -> list[Model]:
        """The models that are trained: the policy, and the critic's where there is one."""
        return [self.policy, *([] if self.critic is None else [self.critic.model])]

    @property
    def tensors_beside(self) -> dict[str, torch.Tensor]:
        """The tensors of the draft head by name, which every rank has alike; {} without one."""
        return {} if self.draft_head is None else self.draft_head.state_tensors()

    def step(self, samples: Sequence[Sample], version: int = 0) -> TrainedStep:
        """Make `train.updates_per_step` updates on the samples of one training step.

        Args:
            version: The version of the policy; tokens of the samples that an earlier version drew
                are exempt from the comparison of sampler and trainer.

        Returns:
            The metrics and timings of the step. Metrics: policy/loss, policy/entropy (nats),
            policy/clip_fraction, policy/kl_ref (with a reference): means over the step's trained
            tokens. policy/grad_norm: mean over updates, before the clip. policy/lr: of the last
            update. policy/active_fraction: trained tokens whose advantage is not 0 (0: every group
            had equal rewards, and the policy gradient is zero). correction/* with a correction.
            And the `mismatch/*` of all trained tokens, sampling/surprise_z of those of the first
            update (`surprise_z`), and draft_head/* with a draft head. Where it
            happened, policy/skipped_updates and critic/skipped_updates (which are in none of the
            means) and memory/train_retries.

        Raises:
            StepMismatchError: Sampler and trainer differ under an exact plan; no weight changed.
            RunStopped: No sample has a token.
            NonFiniteError: A loss or a gradient, of the policy or of the critic, is not finite, and
                train.on_nonfinite is "stop" or too many were in a row; that update was not applied.
            OutOfMemoryStop: Memory ran out with one sequence in a micro-batch.
            UserError: Fewer samples than updates, an empty prompt, a reward that is not finite.
        """
        start = time.perf_counter()
        minibatches, metrics = self.preparation(samples)
        if self.calibration is not None:
            self.calibration.before_updates(minibatches)
        if self.draft_head is not None:
            self.draft_head.begin(version, minibatches[0].micro_batches)
        updates: list[UpdateStats] = []
        critic_updates: list[dict[str, float]] = []
        for k, minibatch in enumerate(minibatches):
            accumulated = self._update.accumulate(minibatch)
            # No weight of the step has changed before the first `finish`.
            if k == 0:
                outputs = accumulated.all_outputs()
                metrics |= self._compare(samples, version, minibatches, outputs)
                metrics |= {} if self.draft_head is None else self.draft_head.learn()
            if k == len(minibatches) - 1 and self.calibration is not None:
                outputs = accumulated.all_outputs()
                metrics |= self.calibration.before_last_update(minibatch, outputs)
            stats = self._update.finish(accumulated, k)
            metrics |= surprise_z(stats.metrics, self.policy.config.vocab_size)
            updates.append(stats)
            if stats.applied and self.critic is not None:
                critic_updates.append(self.critic.update(k, minibatch))
        if self.draft_head is not None:
            self.draft_head.round()
        metrics |= _update_metrics(updates, critic_updates) | self.micro_batch_size.take_metrics()
        requantize_s = sum(update.requantize_s for update in updates)
        return TrainedStep(
            metrics,
            timings={
                "update": time.perf_counter() - start - requantize_s,
                "optimizer": sum(update.optimizer_s for update in updates),
                "requantize": requantize_s,
            },
        )

    def _loss(self, micro: MicroBatch, minibatch: Minibatch) -> MicroBatchLoss:
        """Run the forward of a micro-batch, and return its share of the minibatch's loss."""
        batch, device = micro.batch, self.policy.device
        recompute = self.settings.train.activation_checkpointing
        seen = None if self.draft_head is None else self.draft_head.observer(batch)
        logprobs, moments = batch_logprobs(self.policy, batch, self._temperature, recompute, seen)
        rollout_logprobs = at_targets(batch.rollout_logprobs, batch, device)
        if self.policy.plan.exact:
            behavior = rollout_logprobs
        else:
            behavior = logprobs.detach() if micro.before is None else micro.before
        advantages = at_targets(batch.advantages, batch, device)
        lengths = upload(torch.from_numpy(trained_lengths(batch)), device)
        tokens = Tokens(logprobs, behavior, advantages, lengths)
        size = UpdateSize(
            minibatch.num_tokens, minibatch.num_sequences, self.settings.rollout.max_tokens
        )
        objective = self.objective
        if self.calibration is not None:
            bounds = self.calibration.bounds
            objective = objective.with_clips(1 - bounds.low, bounds.high - 1)
        loss = objective(tokens, size, rollout_logprobs, micro.ref_logprobs)
        metrics = {
            "policy/entropy": moments[0].double().sum() / size.tokens,
            "policy/active_fraction": (advantages != 0).double().sum() / size.tokens,
            **loss.metrics,
        }
        if self._all_draws and micro.before is None:  # of the first update, by the sampler's policy
            metrics |= surprise_sums(logprobs, moments)
        return replace(loss, metrics=metrics, outputs=logprobs.detach())

    def _compare(
        self,
        samples: Sequence[Sample],
        version: int,
        minibatches: Sequence[Minibatch],
        first_logprobs: Sequence[torch.Tensor],
    ) -> dict[str, float]:
        """Compare sampler and trainer on all trained tokens of the step; see `compare_step`."""
        micro_batches = list(chain(*(minibatch.micro_batches for minibatch in minibatches)))
        before = [micro.before for micro in micro_batches if micro.before is not None]
        plan = self.policy.plan
        try:
            return compare_step(
                plan.name,
                plan.exact,
                samples,
                version,
                [micro.batch for micro in micro_batches],
                [logprobs.cpu().numpy() for logprobs in (*first_logprobs, *before)],
            )
        except StepMismatchError:
            self.optimizer.zero_grad()
            raise

    def _calibration(self) -> ClipCalibration | None:
        """Return the calibration of the clips, if the settings ask for one."""
        every = self.settings.algorithm.calibrate_clip_every
        if not every:
            return None
        clip, clip_high = self.objective.clips
        bounds = ClipBounds(1 - clip, 1 + clip_high)
        return ClipCalibration(self.policy, bounds, every, self._temperature)


def _trains_on_all_draws(settings: Settings, objective: Objective) -> bool:
    """Return whether tokens are drawn from the policy's whole distribution, and all trained on."""
    rollout = settings.rollout
    whole = rollout.temperature > 0 and rollout.top_p == 1 and rollout.top_k == 0
    chosen = objective.dynamic_sampling or settings.data.batch != "all" or rollout.oversample > 0
    return whole and not chosen


def _update_metrics(
    updates: Sequence[UpdateStats], critic_updates: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Return the metrics of a step's updates."""
    applied = [update for update in updates if update.applied]
    metrics = {"policy/lr": applied[-1].lr} if applied else {}
    metrics |= _means(applied) | _mean([metrics for metrics in critic_updates if metrics])
    skipped = {
        "policy/skipped_updates": len(updates) - len(applied),
        "critic/skipped_updates": sum(not metrics for metrics in critic_updates),
    }
    return metrics | {name: float(count) for name, count in skipped.items() if count}


def _means(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Return means over all tokens of some updates, the largest peaks, and the mean norm."""
    metrics: dict[str, float] = {}
    total = sum(update.num_tokens for update in updates)
    for update in updates:
        for name, mean in update.metrics.items():
            if name in (EXCESS, VARIANCE):
                continue
            metrics[name] = metrics.get(name, 0.0) + update.num_tokens / total * mean
        for name, peak in update.peaks.items():
            metrics[name] = max(metrics.get(name, 0.0), peak)
    return metrics | _mean([{"policy/grad_norm": update.grad_norm} for update in updates])


def _mean(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number over records that all have it; {} for no record."""
    names = records[0] if records else {}
    return {name: sum(record[name] for record in records) / len(records) for name in names}
