"""The trainer: scored samples in, updated weights and metrics out.

A step is one or more optimizer updates on disjoint parts of its samples (packing.py). The policy
that the samples came from is needed for the ratio of GRPO. Under an exact plan it is known: the
sampler's log-probs are the trainer's, bit for bit, and nothing is recomputed. Under any other plan
it is the trainer's own policy before the step's first update: for the first update that is its
forward, detached; for later ones a forward without gradient is made beforehand.

Every step compares sampler and trainer on all trained tokens, before any weight changes. (With
several updates the later minibatches are therefore forwarded once without gradient under an exact
plan too.) Under an exact plan one different bit ends the step with `StepMismatchError`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from jetrl.config import Settings
from jetrl.errors import RunStopped, UserError
from jetrl.training.advantages import group_advantages
from jetrl.training.forward import at_targets, batch_logprobs
from jetrl.training.losses import grpo_loss
from jetrl.training.mismatch import StepMismatchError, differences, mismatch_metrics
from jetrl.training.optimizer import Optimizer
from jetrl.training.packing import pack, split_minibatches, targets
from jetrl.types import Batch, Sample

if TYPE_CHECKING:
    from jetrl.policy import Policy


@dataclass(frozen=True)
class _Pass:
    """What the forwards (and backwards) of a minibatch gave. logprobs: float32 [N] of each of its
    batches, without gradient. metrics: means over its trained tokens."""

    logprobs: list[torch.Tensor]
    metrics: dict[str, float]


class Trainer:
    """GRPO on a policy.

    Args:
        policy: its masters are updated in place and requantized after every update.
        settings: `algorithm`, `train`, and rollout.temperature and loop.steps.
        reference: the frozen policy of the KL term; policy/kl_ref is measured when it is given.

    Attributes:
        optimizer: goes into checkpoints.
        timings: seconds of the last step: `update` (forward, backward, AdamW), `requantize`.

    Raises:
        UserError: algorithm.kl is positive without a reference.
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
            zero). And the `mismatch/*` of all trained tokens.

        Raises:
            StepMismatchError: sampler and trainer differ under an exact plan; no weight changed.
            RunStopped: no sample has a token, or a gradient is not finite (that update is not
                applied).
            UserError: fewer samples than updates, an empty prompt, a reward that is not finite.
        """
        start = time.perf_counter()
        minibatches = self._pack(samples)
        num_tokens = [_count(batches) for batches in minibatches]
        later = [self._forward(batches) for batches in minibatches[1:]]
        metrics: dict[str, float] = {}
        requantize_seconds = 0.0
        for k, batches in enumerate(minibatches):
            self.optimizer.zero_grad()
            done = self._accumulate(batches, None if k == 0 else later[k - 1])
            if k == 0:
                logprobs = [*done.logprobs, *chain(*later)]
                metrics |= self._measure_mismatch(samples, list(chain(*minibatches)), logprobs)
            metrics["policy/lr"] = self.optimizer.lr
            norm = self.optimizer.step()
            requantize_seconds += self._requantize()
            share = num_tokens[k] / sum(num_tokens)
            for name, value in done.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + share * value
            metrics["policy/grad_norm"] = metrics.get("policy/grad_norm", 0.0) + norm / len(
                minibatches
            )
        self.timings = {
            "update": time.perf_counter() - start - requantize_seconds,
            "requantize": requantize_seconds,
        }
        return metrics

    def _pack(self, samples: Sequence[Sample]) -> list[list[Batch]]:
        """The micro-batches of each update. An update without a trained token is left out."""
        train = self.settings.train
        groups = [sample.group for sample in samples]
        advantages = group_advantages(
            [sample.score.reward for sample in samples],
            groups,
            self.settings.algorithm.normalize_std,
        )
        minibatches = [
            pack(samples, advantages, train.tokens_per_micro_batch, sample_ids)
            for sample_ids in split_minibatches(groups, train.updates_per_step)
        ]
        minibatches = [batches for batches in minibatches if batches]
        if not minibatches:
            raise RunStopped(
                f"none of the step's {len(samples)} samples has a completion token: there is "
                "nothing to train on; look at the prompts and stop strings"
            )
        return minibatches

    @torch.no_grad()
    def _forward(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        return [batch_logprobs(self.policy, batch, self._temperature)[0] for batch in batches]

    def _accumulate(self, batches: Sequence[Batch], before: Sequence[torch.Tensor] | None) -> _Pass:
        """Forward and backward of one update. before: the trainer's log-probs before the step's
        first update, None if this is the first."""
        num_tokens = _count(batches)
        logprobs = []
        sums: dict[str, torch.Tensor] = {}
        for k, batch in enumerate(batches):
            shares, detached = self._backward(
                batch, None if before is None else before[k], num_tokens
            )
            logprobs.append(detached)
            for name, share in shares.items():
                sums[name] = sums[name] + share if name in sums else share
        return _Pass(logprobs, {name: float(value) for name, value in sums.items()})

    def _backward(
        self, batch: Batch, before: torch.Tensor | None, num_update_tokens: int
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """One micro-batch: its shares of the update's metrics, and its log-probs."""
        algorithm, device = self.settings.algorithm, self.policy.device
        logprobs, entropy = batch_logprobs(
            self.policy, batch, self._temperature, self.settings.train.activation_checkpointing
        )
        detached = logprobs.detach()
        if self.policy.plan.exact:
            behavior = at_targets(batch.rollout_logprobs, batch, device)
        else:
            behavior = detached if before is None else before
        advantages = at_targets(batch.advantages, batch, device)
        loss = grpo_loss(
            logprobs,
            behavior,
            advantages,
            num_update_tokens,
            clip_low=algorithm.clip,
            clip_high=algorithm.clip if algorithm.clip_high is None else algorithm.clip_high,
            ref_logprobs=self._reference_logprobs(batch),
            kl_weight=algorithm.kl,
        )
        loss.loss.backward()
        shares = {
            "policy/loss": loss.loss.detach().double(),
            "policy/entropy": entropy.double().sum() / num_update_tokens,
            "policy/active_fraction": (advantages != 0).double().sum() / num_update_tokens,
            **loss.metrics,
        }
        return shares, detached

    @torch.no_grad()
    def _reference_logprobs(self, batch: Batch) -> torch.Tensor | None:
        if self.reference is None:
            return None
        return batch_logprobs(self.reference, batch, self._temperature)[0]

    def _measure_mismatch(
        self, samples: Sequence[Sample], batches: Sequence[Batch], logprobs: Sequence[torch.Tensor]
    ) -> dict[str, float]:
        trainer_logprobs = [part.cpu().numpy() for part in logprobs]
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


def _count(batches: Sequence[Batch]) -> int:
    return sum(int(batch.loss_mask.sum()) for batch in batches)
