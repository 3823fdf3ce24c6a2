"""Trainer: scored samples in, updated weights and metrics out.

A training step is one or more optimizer updates on disjoint minibatches of its samples. Start with
`Trainer.step`, which a batch passes from top to bottom.

The ratio needs log-probs of the policy that drew the samples. Under an exact plan, the sampler's
log-probs equal the trainer's bit for bit, and nothing is recomputed. Under any other plan, they
come from the trainer before the step's first update: for the first minibatch from its own forward,
detached; for later ones from an additional forward without gradient.

Every step compares sampler and trainer on all trained tokens before any weight changes. So under an
exact plan, later minibatches get this forward too, and one different bit ends the step with
`StepMismatchError`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.models.experts import observed_routes
from jetrl.models.model import Model
from jetrl.models.packed import upload
from jetrl.models.policy import Policy
from jetrl.settings.loading import Settings
from jetrl.training import loss_math, mismatch
from jetrl.training.distillation import Distillation
from jetrl.training.extras import Extra
from jetrl.training.graphs import training_graphs
from jetrl.training.guard import Guard
from jetrl.training.micro_batches import (
    MicroBatch,
    MicroBatchLoss,
    MicroBatchSize,
    Minibatch,
    at_targets,
    batch_logprobs,
    hidden_states,
    trained_filter,
)
from jetrl.training.objectives import Objective, Tokens, UpdateSize, token_weights
from jetrl.training.optimizer import Optimizer
from jetrl.training.packing import trained_lengths
from jetrl.training.preparation import Preparation
from jetrl.training.routes import check_balance, with_routes
from jetrl.training.update import Update, UpdateStats, mean_of_each
from jetrl.types import Metrics, Sample


class TrainedStep(NamedTuple):
    """Metrics of `Trainer.step`, and seconds: `update` (includes `optimizer`), `requantize`."""

    metrics: Metrics
    timings: Metrics


class Trainer:
    """Trains a policy with an RL algorithm.

    It reads the settings `algorithm`, `train`, rollout.{temperature, max_tokens} and loop.steps.
    `extras` are called in order during each step; they must include a critic if the algorithm needs
    one, and a `ClipCalibration` if algorithm.calibrate_clip_every is set.
    """

    def __init__(
        self,
        policy: Policy,
        settings: Settings,
        reference: Policy | None = None,
        extras: Sequence[Extra] = (),
        micro_batch_size: MicroBatchSize | None = None,
        guard: Guard | None = None,
        distillation: Distillation | None = None,
    ) -> None:
        self.policy = policy
        self.settings = settings
        self.extras = extras
        check_balance(policy.config, settings.train.router_aux_loss)
        self.objective = Objective.from_settings(settings.algorithm, settings.rollout.max_tokens)
        values = next((extra.values for extra in extras if extra.values is not None), None)
        if settings.algorithm.kl > 0 and reference is None:
            raise UserError(f"algorithm.kl = {settings.algorithm.kl} needs a reference policy")
        if self.objective.algorithm.needs_critic and values is None:
            raise UserError(f"algorithm.name = {settings.algorithm.name} needs a critic")
        self.distillation = distillation
        if self.objective.algorithm.needs_teacher and distillation is None:
            raise UserError(f"algorithm.name = {settings.algorithm.name} needs a teacher")
        if settings.algorithm.calibrate_clip_every and not any(e.calibrates for e in extras):
            raise UserError(
                f"algorithm.calibrate_clip_every = {settings.algorithm.calibrate_clip_every} needs "
                "a ClipCalibration among the extras (training/extras/calibration.py)"
            )
        self.optimizer = Optimizer(
            policy.master_weights(),
            settings.train,
            # The schedule counts updates; a step has several.
            total_updates=settings.loop.steps * settings.train.updates_per_step,
            shards=policy.weights.shards,
        )
        self.micro_batch_size = micro_batch_size or MicroBatchSize.of(settings.train)
        self.guard = guard or Guard(settings.train.on_nonfinite)
        # Greedy sampling reports log-probs at temperature 1 (types.SamplingParams).
        self._temperature = settings.rollout.temperature or 1.0
        self._all_draws = _trains_on_all_draws(settings, self.objective)
        self.preparation = Preparation(
            policy=policy,
            settings=settings,
            objective=self.objective,
            reference=reference,
            values=values,
            size=self.micro_batch_size,
            temperature=self._temperature,
            token_filter=trained_filter(settings.rollout),
        )
        self._update = Update(
            policy,
            self.optimizer,
            self.guard,
            loss=self._loss,
            prefix="policy",
            watched=("loss", "entropy"),
            synchronize=True,
            graphs=training_graphs(policy, settings.train),
            seed=settings.run.seed,
        )

    @property
    def models(self) -> list[Model]:
        """All trained models, the policy first."""
        return [self.policy, *chain(*(extra.models() for extra in self.extras))]

    @property
    def equal_tensors(self) -> dict[str, Tensor]:
        """Further tensors, by name, that must be equal on every rank."""
        return {n: t for extra in self.extras for n, t in extra.equal_tensors().items()}

    def step(self, samples: Sequence[Sample], version: int = 0) -> TrainedStep:
        """Run `train.updates_per_step` updates on the samples of one training step.

        Args:
            version: Policy version; tokens sampled by earlier versions are not compared.

        Returns:
            policy/{loss, entropy (nats), clip_fraction, kl_ref (with a reference)}: means over the
            step's trained tokens. policy/grad_norm: mean over updates, before the clip. policy/lr:
            of the last update. policy/active_fraction: trained tokens whose advantage is not 0.
            correction/* with a correction, `mismatch/*`, sampling/surprise_z of the first update,
            the extras' metrics, and experts/* of a mixture of experts. If any,
            policy/skipped_updates (in none of the means) and memory/train_retries.

        Raises:
            StepMismatchError: Sampler and trainer differ under an exact plan; no weight changed.
            RunStopped: No sample has a token.
            NonFiniteError: A loss or gradient is not finite, and train.on_nonfinite is "stop" or
                too many were in a row; that update was not applied.
            OutOfMemoryStop: Memory ran out with one sequence in a micro-batch.
            UserError: Too few samples, an empty prompt, an unknown token, a bad reward or log-prob.
        """
        start = time.perf_counter()
        # Before the first update: pack samples, compute advantages and log-probs of other models.
        minibatches, metrics = self.preparation(samples, self.optimizer.num_updates)
        for extra in self.extras:
            extra.begin(version, minibatches)
        updates: list[UpdateStats] = []
        for k, minibatch in enumerate(minibatches):
            accumulated = self._update.accumulate(minibatch)
            if k == 0:
                # No weight has changed yet: compare sampler and trainer on every token.
                metrics |= self._compare(samples, version, minibatches, accumulated.all_outputs())
                for extra in self.extras:
                    metrics |= extra.after_forward()
            if k == len(minibatches) - 1:
                for extra in self.extras:
                    metrics |= extra.before_last(accumulated)
            # The guard reads all values at once; then AdamW and requantization.
            stats = self._update.finish(accumulated, k)
            metrics |= mismatch.surprise_z(stats.metrics, self.policy.config.vocab_size)
            updates.append(stats)
            if stats.applied:
                for extra in self.extras:
                    extra.after_update(k, minibatch)
        metrics |= _update_metrics(updates)
        for extra in self.extras:
            metrics |= extra.after_updates()
        metrics |= self.micro_batch_size.take_metrics()
        # Requantization is timed separately; the rest of the step is the update.
        requantize_s = sum(update.requantize_s for update in updates)
        timings = {
            "update": time.perf_counter() - start - requantize_s,
            "optimizer": sum(update.optimizer_s for update in updates),
            "requantize": requantize_s,
        }
        return TrainedStep(metrics, timings)

    def _loss(self, micro: MicroBatch, minibatch: Minibatch) -> MicroBatchLoss:
        """Run the forward of a micro-batch; return its share of the minibatch's loss."""
        batch, device = micro.batch, self.policy.device
        decoder = self.policy.decoder

        def sampled_again() -> None:
            hidden_states(self.policy, batch, "rollout")

        # Without a gradient of drawn tokens, backward leaves their logits out.
        teacher, recompute = self.distillation, self.settings.train.activation_checkpointing
        drawn = teacher is None or teacher.uses_draws or self.settings.algorithm.kl > 0
        hidden: list[Tensor] = []
        observers = [*filter(None, (extra.observer(batch) for extra in self.extras))]
        if teacher is not None:
            observers.append(hidden.append)
        within = self.policy.plan.training_forward(decoder, sampled_again)
        with within, observed_routes(decoder) as routes:
            logprobs, moments = batch_logprobs(
                self.policy,
                batch,
                self._temperature,
                activation_checkpointing=recompute,
                seen=observers,
                token_filter=trained_filter(self.settings.rollout),
                differentiable=drawn,
            )
        # Behavior policy: the sampler's log-probs, or those of this policy before the first update.
        rollout_logprobs = at_targets(batch.rollout_logprobs, batch, device)
        if self.policy.plan.exact:
            behavior = rollout_logprobs
        else:
            behavior = logprobs.detach() if micro.before is None else micro.before
        advantages = at_targets(batch.advantages, batch, device)
        distilled = None
        if teacher is not None:
            # Only one gradient of logits is kept for backward: the KL's, or that of drawn tokens.
            distilled = teacher(
                self.policy, batch, hidden[0], advantages, behavior, recompute=drawn or recompute
            )
            advantages = distilled.advantages
        # Token weights depend on sequence lengths and the size of the whole update.
        lengths = upload(torch.from_numpy(trained_lengths(batch)), device)
        tokens = Tokens(logprobs, behavior, advantages, lengths)
        longest, objective = self.settings.rollout.max_tokens, self.objective
        size = UpdateSize(minibatch.num_tokens, minibatch.num_sequences, longest)
        for extra in self.extras:
            objective = extra.objective(objective)
        loss = objective(tokens, size, rollout_logprobs, micro.ref_logprobs)
        if distilled is not None:
            weights = token_weights(lengths, size, objective.aggregation, len(logprobs))
            loss = distilled.added_to(loss, weights, 1.0 / size.tokens)
        metrics = {
            "policy/entropy": loss_math.divided(loss_math.total(moments[0]), size.tokens),
            "policy/active_fraction": loss_math.divided(
                loss_math.total(advantages != 0), size.tokens
            ),
            **loss.metrics,
        }
        if self._all_draws and micro.before is None:  # weights are still the sampler's
            metrics |= mismatch.surprise_sums(logprobs, moments)
        loss = replace(loss, metrics=metrics, outputs=logprobs.detach())
        if not routes:
            return loss
        # Of an exact plan, equal log-probs already prove equal routes.
        compares = self.settings.train.compare_routes
        with observed_routes(decoder) as sampled:
            if not self.policy.plan.exact if compares == "auto" else compares:
                sampled_again()
        return with_routes(
            loss, routes, sampled, share=len(logprobs) / size.tokens, train=self.settings.train
        )

    def _compare(
        self, samples: Sequence[Sample], version: int, data: list[Minibatch], first: list[Tensor]
    ) -> Metrics:
        """Compare sampler and trainer on all trained tokens of the step (see `compare_step`)."""
        # Covers all tokens: the first minibatch's training forward and the earlier forward of the
        # others.
        micro_batches = list(chain(*(minibatch.micro_batches for minibatch in data)))
        before = [micro.before for micro in micro_batches if micro.before is not None]
        logprobs = [part.cpu().numpy() for part in (*first, *before)]
        batches = [micro.batch for micro in micro_batches]
        try:
            return mismatch.compare_step(self.policy.plan, samples, version, batches, logprobs)
        except mismatch.StepMismatchError:
            self.optimizer.zero_grad()
            raise


def _trains_on_all_draws(settings: Settings, objective: Objective) -> bool:
    """Return True if log-probs are of the sampled distribution and all tokens are trained on."""
    rollout = settings.rollout
    # Log-probs of all tokens are not those of the distribution that filters leave.
    whole = rollout.truncated_logprobs or not rollout.excludes_tokens
    whole = whole and rollout.temperature > 0
    data, chosen = settings.data, objective.dynamic_sampling or rollout.oversample > 0
    # Recorded and replayed tokens may be of other policies.
    chosen = chosen or data.batch != "all" or data.replay_steps > 0 or data.rollouts is not None
    return whole and not chosen


def _update_metrics(updates: Sequence[UpdateStats]) -> Metrics:
    """Return means over all tokens of applied updates, maximum peaks, and the mean norm."""
    applied = [update for update in updates if update.applied]
    metrics = {"policy/lr": applied[-1].lr} if applied else {}
    total = sum(update.num_tokens for update in applied)
    for update in applied:
        # Updates differ in size, so means are weighted by tokens.
        for name, mean in update.metrics.items():
            if name in (mismatch.EXCESS, mismatch.VARIANCE):
                continue
            metrics[name] = metrics.get(name, 0.0) + update.num_tokens / total * mean
        for name, peak in update.peaks.items():
            metrics[name] = max(metrics.get(name, 0.0), peak)
    metrics |= mean_of_each([{"policy/grad_norm": update.grad_norm} for update in applied])
    skipped = len(updates) - len(applied)
    return metrics | ({"policy/skipped_updates": float(skipped)} if skipped else {})
