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

What is optimized is an `Objective` (objectives/), built from the pieces that the settings name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import torch

from jetrl.errors import UserError
from jetrl.models.model import Model
from jetrl.models.packed import upload
from jetrl.settings.loading import Settings
from jetrl.training.extras import Extra
from jetrl.training.extras.calibration import ClipCalibration
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
from jetrl.training.update import Update, UpdateStats, mean_of_each
from jetrl.types import Sample

if TYPE_CHECKING:
    from jetrl.models.policy import Policy


@dataclass(frozen=True)
class TrainedStep:
    """Metrics as `Trainer.step` lists them, and seconds of one training step.

    `update` is all but requantization; `optimizer` (AdamW) is a part of it; `requantize`.
    """

    metrics: dict[str, float]
    timings: dict[str, float]


class Trainer:
    """An algorithm that trains a policy.

    Args:
        settings: `algorithm`, `train`, and rollout.{temperature, max_tokens} and loop.steps.
        guard: The run's guard against updates that are not finite; by default a new one.

    Attributes:
        extras: What else takes part in steps, in the order in which it is called.
        calibration: Moves the clips of the ratio, if the settings ask for that; else None.

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
        self.objective = Objective.from_settings(settings.algorithm, settings.rollout.max_tokens)
        if self.objective.algorithm.needs_critic and critic is None:
            raise UserError(
                f"algorithm.name = {settings.algorithm.name} needs a critic: set critic.path"
            )
        # The schedule counts updates, of which a step makes several.
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
        every = settings.algorithm.calibrate_clip_every
        self.calibration = ClipCalibration.of(policy, self.objective, every, self._temperature)
        parts: tuple[Extra | None, ...] = (self.calibration, draft_head, critic)
        self.extras = [extra for extra in parts if extra is not None]
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
        """The models that are trained, the policy first."""
        return [self.policy, *chain(*(extra.models() for extra in self.extras))]

    @property
    def tensors_beside(self) -> dict[str, torch.Tensor]:
        """Other tensors, by name, that are equal on every rank."""
        return {n: t for extra in self.extras for n, t in extra.equal_tensors().items()}

    def step(self, samples: Sequence[Sample], version: int = 0) -> TrainedStep:
        """Make `train.updates_per_step` updates on the samples of one training step.

        Args:
            version: The policy's version; tokens that an earlier version drew are exempt from the
                comparison of sampler and trainer.

        Returns:
            policy/{loss, entropy (nats), clip_fraction, kl_ref (with a reference)}: means over the
            step's trained tokens. policy/grad_norm: mean over updates, before the clip. policy/lr:
            of the last update. policy/active_fraction: trained tokens whose advantage is not 0.
            correction/* with a correction. `mismatch/*` of all trained tokens, sampling/surprise_z
            of the first update's, and the extras' metrics. If it happened, policy/skipped_updates
            (in none of the means) and memory/train_retries.

        Raises:
            StepMismatchError: Sampler and trainer differ under an exact plan; no weight changed.
            RunStopped: No sample has a token.
            NonFiniteError: A loss or a gradient is not finite, and train.on_nonfinite is "stop" or
                too many were in a row; that update was not applied.
            OutOfMemoryStop: Memory ran out with one sequence in a micro-batch.
            UserError: Fewer samples than updates, an empty prompt, a reward that is not finite.
        """
        start = time.perf_counter()
        # What is known before the first update: packed samples, advantages, log-probs of others.
        minibatches, metrics = self.preparation(samples)
        for extra in self.extras:
            extra.begin(version, minibatches)
        updates: list[UpdateStats] = []
        for k, minibatch in enumerate(minibatches):
            accumulated = self._update.accumulate(minibatch)
            if k == 0:
                # No weight has changed yet, so sampler and trainer must agree on every token.
                metrics |= self._compare(samples, version, minibatches, accumulated.all_outputs())
                for extra in self.extras:
                    metrics |= extra.after_forward()
            if k == len(minibatches) - 1:
                for extra in self.extras:
                    metrics |= extra.before_last(accumulated)
            # The guard reads all numbers at once; then AdamW and requantization.
            stats = self._update.finish(accumulated, k)
            metrics |= surprise_z(stats.metrics, self.policy.config.vocab_size)
            updates.append(stats)
            if stats.applied:
                for extra in self.extras:
                    extra.after_update(k, minibatch)
        metrics |= _update_metrics(updates)
        for extra in self.extras:
            metrics |= extra.after_updates()
        metrics |= self.micro_batch_size.take_metrics()
        # Requantization is its own phase; the rest of the step is the update.
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
        observers = [seen for extra in self.extras if (seen := extra.observer(batch)) is not None]
        logprobs, moments = batch_logprobs(
            self.policy, batch, self._temperature, recompute, observers
        )
        # The policy that drew the tokens: the sampler's, or this one before the first update.
        # Of the tokens that are trained on; the sampler reported these log-probs.
        rollout_logprobs = at_targets(batch.rollout_logprobs, batch, device)
        if self.policy.plan.exact:
            behavior = rollout_logprobs
        else:
            behavior = logprobs.detach() if micro.before is None else micro.before
        advantages = at_targets(batch.advantages, batch, device)
        # Sequence lengths and update sizes weigh the tokens; they are those of the whole update.
        lengths = upload(torch.from_numpy(trained_lengths(batch)), device)
        tokens = Tokens(logprobs, behavior, advantages, lengths)
        size = UpdateSize(
            minibatch.num_tokens, minibatch.num_sequences, self.settings.rollout.max_tokens
        )
        objective = self.objective
        for extra in self.extras:
            objective = extra.objective(objective)
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
        # The first minibatch's training forward and the others' earlier one cover all tokens.
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


def _trains_on_all_draws(settings: Settings, objective: Objective) -> bool:
    """Return whether tokens come from the policy's whole distribution, and all are trained on."""
    rollout = settings.rollout
    whole = rollout.temperature > 0 and rollout.top_p == 1 and rollout.top_k == 0
    chosen = objective.dynamic_sampling or settings.data.batch != "all" or rollout.oversample > 0
    return whole and not chosen


def _update_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    applied = [update for update in updates if update.applied]
    metrics = {"policy/lr": applied[-1].lr} if applied else {}
    metrics |= _means(applied)
    skipped = len(updates) - len(applied)
    return metrics | ({"policy/skipped_updates": float(skipped)} if skipped else {})


def _means(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Return means over all tokens of some updates, the largest peaks, and the mean norm."""
    metrics: dict[str, float] = {}
    total = sum(update.num_tokens for update in updates)
    for update in updates:
        # Updates differ in size: a mean over all tokens weighs each by its own.
        for name, mean in update.metrics.items():
            if name in (EXCESS, VARIANCE):
                continue
            metrics[name] = metrics.get(name, 0.0) + update.num_tokens / total * mean
        for name, peak in update.peaks.items():
            metrics[name] = max(metrics.get(name, 0.0), peak)
    return metrics | mean_of_each([{"policy/grad_norm": update.grad_norm} for update in updates])
