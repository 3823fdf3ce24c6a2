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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from jetrl.errors import UserError
from jetrl.memory.out_of_memory import explained, within_memory
from jetrl.models.packed import upload
from jetrl.settings.loading import Settings
from jetrl.training.extras.calibration import Bounds, ClipCalibration
from jetrl.training.extras.critic import Critic
from jetrl.training.forward import at_targets, batch_logprobs
from jetrl.training.guard import Guard, NonFiniteUpdate
from jetrl.training.micro_batches import MicroBatch, MicroBatchSize, sizes_of
from jetrl.training.minibatches import choose_minibatches
from jetrl.training.mismatch import (
    StepMismatchError,
    differences,
    mismatch_metrics,
    present_tokens,
)
from jetrl.training.objectives import Objective, Tokens, UpdateSize
from jetrl.training.optimizer import ADVICE, Optimizer
from jetrl.training.packing import targets, trained_lengths
from jetrl.training.preparation import Preparation
from jetrl.types import Sample

if TYPE_CHECKING:
    from jetrl.models.policy import Policy


@dataclass
class _Pass:
    """What the forwards (and backwards) of a minibatch gave. logprobs: float32 [N] of each of its
    batches, without gradient. sums: shares of the minibatch's means, added. peaks: largest."""

    logprobs: list[torch.Tensor]
    sums: dict[str, torch.Tensor]
    peaks: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Numbers:
    """What was measured of an update: the means over its trained tokens, the largest values, what
    the guard watches beside them, and the critic's own metrics, none where it was not updated."""

    tokens: int
    means: dict[str, float]
    peaks: dict[str, float]
    grad_norm: float
    weight_scales: float
    critic: Mapping[str, float] = field(default_factory=dict)

    @property
    def watched(self) -> dict[str, float]:
        return {
            "policy/loss": self.means["policy/loss"],
            "policy/entropy": self.means["policy/entropy"],
            "policy/grad_norm": self.grad_norm,
            "norm of the FP8 scales": self.weight_scales,
        }


class Trainer:
    """An algorithm on a policy.

    Args:
        policy: its masters are updated in place and requantized after every update.
        settings: `algorithm`, `train`, and rollout.{temperature, max_tokens} and loop.steps.
        reference: the frozen policy of the KL term; policy/kl_ref is measured when it is given.
        critic: the value model of an algorithm that needs one, updated beside the policy.
        micro_batch_size: of train.tokens_per_micro_batch, or less once memory ran out.
        guard: refuses updates that are not finite. Both are the run's; by default the trainer's.

    Attributes:
        objective: what is optimized. preparation: what is made of samples before the first update.
        optimizer: goes into checkpoints.
        timings: seconds of the last step: `update` (forward, backward, AdamW), of these `optimizer`
            (AdamW), and `requantize`.

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
    ) -> None:
        if settings.algorithm.kl > 0 and reference is None:
            raise UserError(
                f"algorithm.kl = {settings.algorithm.kl} needs a reference policy; give one, or "
                "set algorithm.kl=0"
            )
        self.policy = policy
        self.settings = settings
        self.critic = critic
        self.objective = Objective.from_settings(settings.algorithm, settings.rollout.max_tokens)
        if self.objective.algorithm.needs_critic and critic is None:
            raise UserError(
                f"algorithm.name = {settings.algorithm.name} needs a critic: set critic.path"
            )
        self.optimizer = Optimizer(
            policy.named_masters(),
            settings.train,
            total_updates=settings.loop.steps * settings.train.updates_per_step,
        )
        self.micro_batch_size = micro_batch_size or MicroBatchSize.of(settings.train)
        self.guard = guard or Guard(settings.train.on_nonfinite)
        self.timings = {"update": 0.0, "optimizer": 0.0, "requantize": 0.0}
        # Greedy sampling reports the log-probs of temperature 1 (types.SamplingParams).
        self._temperature = settings.rollout.temperature or 1.0
        self.calibration = self._calibration()
        self.preparation = Preparation(
            policy,
            self.objective,
            reference,
            critic,
            self.micro_batch_size,
            lambda samples: choose_minibatches(samples, settings, self.optimizer.num_updates),
            self._temperature,
        )

    def step(self, samples: Sequence[Sample], version: int = 0) -> dict[str, float]:
        """`train.updates_per_step` updates on the samples of one step. version: of the policy, for
        samples with tokens that earlier ones drew: these are exempt from the comparison.

        Returns:
            policy/loss, policy/entropy (nats), policy/clip_fraction, policy/kl_ref (with a
            reference): means over the step's trained tokens. policy/grad_norm: mean over updates,
            before the clip. policy/lr: of the last update. policy/active_fraction: trained tokens
            whose advantage is not 0 (0: every group had equal rewards, and the policy gradient is
            zero). correction/* with a correction. And the `mismatch/*` of all trained tokens.
            Where it happened, policy/skipped_updates and critic/skipped_updates (which are in none
            of the means) and memory/train_retries.

        Raises:
            StepMismatchError: sampler and trainer differ under an exact plan; no weight changed.
            RunStopped: no sample has a token.
            NonFiniteError: a loss or a gradient, of the policy or of the critic, is not finite, and
                train.on_nonfinite is "stop" or too many were in a row; that update was not applied.
            OutOfMemoryStop: memory ran out with one sequence in a micro-batch.
            UserError: fewer samples than updates, an empty prompt, a reward that is not finite.
        """
        start = time.perf_counter()
        minibatches, metrics = within_memory(
            lambda: self.preparation(samples), lambda problem: self._shrink(samples, problem)
        )
        if self.calibration is not None:
            self.calibration.begin(minibatches)
        optimizer_seconds = requantize_seconds = 0.0
        applied: list[_Numbers] = []
        for k in range(len(minibatches)):
            done = self._accumulate_within_memory(minibatches, k)
            total_norm = self.optimizer.gradient_norm()  # before the host waits for log-probs
            if k == 0:
                metrics |= self._measure_mismatch(samples, version, minibatches, done.logprobs)
            if k == len(minibatches) - 1:
                metrics |= self._calibrate(minibatches, done)
            numbers = self._read(minibatches[k], done, total_norm)
            if not self.guard.passes(numbers.watched):
                self._refuse(k, numbers, minibatches[k])
                continue
            metrics["policy/lr"] = self.optimizer.lr
            with explained("the optimizer", ADVICE):
                optimizer_seconds += self._seconds(partial(self.optimizer.apply, total_norm))
                requantize_seconds += self._seconds(self.policy.requantize)
            applied.append(replace(numbers, critic=self._teach_critic(minibatches, k)))
        self.timings = {
            "update": time.perf_counter() - start - requantize_seconds,
            "optimizer": optimizer_seconds,
            "requantize": requantize_seconds,
        }
        return metrics | _metrics(applied) | self._events(len(minibatches), applied)

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Forward and backward of one update, whose gradients stay: for the repetition of one.
        Returns the metrics of an update."""
        self.optimizer.zero_grad()
        done = self._accumulate(micro_batches)
        numbers = self._read(micro_batches, done, self.optimizer.gradient_norm())
        return _metrics([numbers])

    def _read(
        self, micro_batches: Sequence[MicroBatch], done: _Pass, total_norm: torch.Tensor
    ) -> _Numbers:
        """The numbers of an update: the one time that it waits for the device."""
        scales = torch.nn.utils.get_total_norm(list(self.policy.weight_scales().values()))
        values = [*done.sums.values(), *done.peaks.values(), total_norm, scales]
        read = torch.stack([v.detach().double().to(total_norm.device) for v in values]).tolist()
        peaks = read[len(done.sums) : -2]
        return _Numbers(
            _size_of(micro_batches, 1).tokens,
            means=dict(zip(done.sums, read, strict=False)),
            peaks=dict(zip(done.peaks, peaks, strict=True)),
            grad_norm=read[-2],
            weight_scales=read[-1],
        )

    def _refuse(self, k: int, numbers: _Numbers, micro_batches: list[MicroBatch]) -> None:
        again = partial(self.accumulate, micro_batches)
        values = numbers.watched
        self.guard.refuse(
            NonFiniteUpdate.of(k, self.policy, self.optimizer, values, again, micro_batches)
        )

    def _events(self, num_updates: int, applied: Sequence[_Numbers]) -> dict[str, float]:
        """What went on in the step that does not usually."""
        untaught = 0 if self.critic is None else sum(not update.critic for update in applied)
        events = {
            "policy/skipped_updates": num_updates - len(applied),
            "critic/skipped_updates": untaught,
            "memory/train_retries": self.micro_batch_size.take_retries(),
        }
        return {name: float(count) for name, count in events.items() if count}

    def _shrink(self, samples: Sequence[Sample], problem: str) -> None:
        batches = chain(*self.preparation.pack(samples))
        self.micro_batch_size.halve([sizes_of(batch) for batch in batches], problem)

    def _accumulate_within_memory(self, minibatches: list[list[MicroBatch]], k: int) -> _Pass:
        """Forward and backward of update k; where memory runs out its micro-batches are split and
        it is begun anew."""

        def attempt() -> _Pass:
            self.optimizer.zero_grad()
            return self._accumulate(minibatches[k])

        return within_memory(attempt, lambda problem: self._split(minibatches, k, problem))

    def _split(self, minibatches: list[list[MicroBatch]], k: int, problem: str) -> None:
        self.optimizer.zero_grad()
        self.micro_batch_size.shrink(minibatches, k, problem)

    def _calibration(self) -> ClipCalibration | None:
        every = self.settings.algorithm.calibrate_clip_every
        if not every:
            return None
        clip, clip_high = self.objective.clip_arguments
        reference = Bounds(1 - clip, 1 + clip_high)
        return ClipCalibration(
            self.policy, reference, every, self._temperature, self.micro_batch_size
        )

    def _calibrate(self, minibatches: list[list[MicroBatch]], done: _Pass) -> dict[str, float]:
        if self.calibration is None:
            return {}
        metrics = self.calibration.end(minibatches, done.logprobs)
        bounds = self.calibration.bounds
        return metrics | {"policy/clip_low": bounds.low, "policy/clip_high": bounds.high}

    def _teach_critic(self, minibatches: list[list[MicroBatch]], k: int) -> dict[str, float]:
        critic = self.critic
        if critic is None:
            return {}
        return within_memory(
            lambda: critic.update(k, minibatches[k]),
            lambda problem: self.micro_batch_size.shrink(minibatches, k, problem),
        )

    def _accumulate(self, batches: Sequence[MicroBatch]) -> _Pass:
        """Forward and backward of one update."""
        size = _size_of(batches, self.settings.rollout.max_tokens)
        done = _Pass([], {}, {})
        for batch in batches:
            self._backward(batch, size, done)
        return done

    def _backward(self, micro: MicroBatch, size: UpdateSize, done: _Pass) -> None:
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
        lengths = upload(torch.from_numpy(trained_lengths(batch)), device)
        tokens = Tokens(logprobs, behavior, advantages, lengths)
        objective = self.objective
        if self.calibration is not None:
            bounds = self.calibration.bounds
            objective = replace(objective, clips=(1 - bounds.low, bounds.high - 1))
        loss = objective(tokens, size, rollout_logprobs, micro.ref_logprobs)
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
        version: int,
        minibatches: Sequence[Sequence[MicroBatch]],
        first: Sequence[torch.Tensor],
    ) -> dict[str, float]:
        """Of all minibatches; first: the trainer's log-probs of the first one's batches. Nothing if
        the trainer's are not finite: that is the guard's to deal with."""
        later = [micro.before for micro in chain(*minibatches[1:]) if micro.before is not None]
        trainer_logprobs = [part.cpu().numpy() for part in (*first, *later)]
        if not all(np.isfinite(part).all() for part in trainer_logprobs):
            return {}
        batches = [micro.batch for micro in chain(*minibatches)]
        rollout_logprobs = [batch.rollout_logprobs[targets(batch)] for batch in batches]
        present = [present_tokens(batch, samples, version) for batch in batches]
        compared = np.concatenate(present)
        earlier = {} if compared.all() else {"partial_rollout/earlier_tokens": 1 - compared.mean()}
        if not compared.any():
            return earlier
        metrics = earlier | mismatch_metrics(
            np.concatenate(trainer_logprobs)[compared], np.concatenate(rollout_logprobs)[compared]
        )
        if self.policy.plan.exact and metrics["mismatch/num_different"]:
            self.optimizer.zero_grad()
            found = [
                difference
                for batch, part, kept in zip(batches, trainer_logprobs, present, strict=True)
                for difference in differences(batch, part, kept)
            ]
            raise StepMismatchError(
                self.policy.plan.name,
                samples,
                sorted({difference.sample for difference in found}),
                min(found, key=lambda difference: (difference.sample, difference.token)),
                metrics,
            )
        return metrics

    def _seconds(self, work: Callable[[], object]) -> float:
        """Seconds it took, on a device that had nothing left to do."""
        start = time.perf_counter()
        work()
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize(self.policy.device)
        return time.perf_counter() - start


def _metrics(updates: Sequence[_Numbers]) -> dict[str, float]:
    """Of a step's updates: the means over all their tokens, the largest of the peaks, and the mean
    over updates of the gradient norms and of what the critic says."""
    metrics: dict[str, float] = {}
    total = sum(update.tokens for update in updates)
    for update in updates:
        for name, value in update.means.items():
            metrics[name] = metrics.get(name, 0.0) + update.tokens / total * value
        for name, peak in update.peaks.items():
            metrics[name] = max(metrics.get(name, 0.0), peak)
    norms = [{"policy/grad_norm": update.grad_norm} for update in updates]
    taught = [update.critic for update in updates if update.critic]
    return metrics | _means(norms) | _means(taught)


def _means(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number over lines that all have it."""
    return (
        {name: sum(line[name] for line in lines) / len(lines) for name in lines[0]} if lines else {}
    )


def _size_of(batches: Sequence[MicroBatch], max_tokens: int) -> UpdateSize:
    return UpdateSize(
        tokens=sum(int(micro.batch.loss_mask.sum()) for micro in batches),
        sequences=sum(micro.batch.num_sequences for micro in batches),
        max_tokens=max_tokens,
    )
