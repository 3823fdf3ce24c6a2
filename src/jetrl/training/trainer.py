"""The trainer: scored samples in, updated weights and metrics out.

A training step is one or more optimizer updates, on disjoint minibatches of its samples. Read
`Trainer.step` first: a batch goes through it from top to bottom.

The ratio needs the policy that drew the samples. Under an exact plan the sampler's log-probs are
the trainer's, bit for bit, and nothing is recomputed. Under any other plan it is the trainer's
policy before the step's first update: that update's forward, detached; for later updates a forward
without gradient, made beforehand.

Every step compares sampler and trainer on all trained tokens before any weight changes. Under an
exact plan, therefore, later minibatches get such a forward too, and one different bit ends the step
with `StepMismatchError`.

`Update` is the only place that runs backward, the guard, AdamW and requantization, for the policy,
the reward model and the critic; each trainer hands over the loss of a micro-batch:

    accumulate   forward and backward of every micro-batch, again with smaller ones if memory runs
                 out; then the gradient norm is launched
    finish       one read of all numbers from the device; the guard; AdamW; requantization

Between the two a trainer may read the forwards' outputs, before any weight has changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jetrl.distributed.agreement import OUT_OF_MEMORY, agree
from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.memory.out_of_memory import Attempt, explained, raise_on_all_ranks, release
from jetrl.models.model import Model
from jetrl.models.packed import upload
from jetrl.models.policy import Policy
from jetrl.settings.loading import Settings
from jetrl.training import mismatch
from jetrl.training.extras import Extra
from jetrl.training.extras.calibration import ClipBounds, ClipCalibration
from jetrl.training.guard import Guard, NonFiniteUpdate
from jetrl.training.micro_batches import (
    MicroBatch,
    MicroBatchLoss,
    MicroBatchSize,
    Minibatch,
    at_targets,
    batch_logprobs,
)
from jetrl.training.objectives import Objective, Tokens, UpdateSize
from jetrl.training.optimizer import ADVICE, Optimizer
from jetrl.training.packing import trained_lengths
from jetrl.training.preparation import Preparation
from jetrl.types import Sample

if TYPE_CHECKING:
    from jetrl.training.extras.critic import Critic
    from jetrl.training.extras.draft_head import DraftHeadTraining


class TrainedStep(NamedTuple):
    """The metrics of `Trainer.step`, and seconds: `update` (includes `optimizer`), `requantize`."""

    metrics: dict[str, float]
    timings: dict[str, float]


class Trainer:
    """An algorithm that trains a policy.

    It reads `algorithm`, `train`, rollout.{temperature, max_tokens} and loop.steps of the settings.
    `extras` are other parts of training, in the order in which a step calls them; `calibration`
    moves the clips of the ratio, if the settings ask for that.
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
        self.policy, self.settings = policy, settings
        self.objective = Objective.from_settings(settings.algorithm, settings.rollout.max_tokens)
        if settings.algorithm.kl > 0 and reference is None:
            raise UserError(f"algorithm.kl = {settings.algorithm.kl} needs a reference policy")
        if self.objective.algorithm.needs_critic and critic is None:
            raise UserError(f"algorithm.name = {settings.algorithm.name} needs a critic")
        # The schedule counts updates, of which a step makes several.
        total = settings.loop.steps * settings.train.updates_per_step
        masters, shards = policy.master_weights(), policy.weights.shards
        self.optimizer = Optimizer(masters, settings.train, total, shards)
        self.micro_batch_size = micro_batch_size or MicroBatchSize.of(settings.train)
        self.guard = guard or Guard(settings.train.on_nonfinite)
        # Greedy sampling reports the log-probs of temperature 1 (types.SamplingParams).
        self._temperature = settings.rollout.temperature or 1.0
        self._all_draws = _trains_on_all_draws(settings, self.objective)
        self.calibration = None
        if every := settings.algorithm.calibrate_clip_every:
            bounds = ClipBounds(1 - self.objective.clips[0], 1 + self.objective.clips[1])
            self.calibration = ClipCalibration(policy, bounds, every, self._temperature)
        parts: tuple[Extra | None, ...] = (self.calibration, draft_head, critic)
        self.extras = [extra for extra in parts if extra is not None]
        given = (policy, settings, self.objective, reference, critic)
        self.preparation = Preparation(*given, self.micro_batch_size, self._temperature)
        own = (policy, self.optimizer, self.guard, self._loss, "policy")
        self._update = Update(*own, watched=("loss", "entropy"), synchronize=True)

    @property
    def models(self) -> list[Model]:
        """The models that are trained, the policy first."""
        return [self.policy, *chain(*(extra.models() for extra in self.extras))]

    @property
    def tensors_beside(self) -> dict[str, Tensor]:
        """Other tensors, by name, that are equal on every rank."""
        return {n: t for extra in self.extras for n, t in extra.equal_tensors().items()}

    def step(self, samples: Sequence[Sample], version: int = 0) -> TrainedStep:
        """Make `train.updates_per_step` updates on the samples of one training step.

        Args:
            version: The policy's version; tokens that an earlier version drew are not compared.

        Returns:
            policy/{loss, entropy (nats), clip_fraction, kl_ref (with a reference)}: means over the
            step's trained tokens. policy/grad_norm: mean over updates, before the clip. policy/lr:
            of the last update. policy/active_fraction: trained tokens whose advantage is not 0.
            correction/* with a correction, `mismatch/*`, sampling/surprise_z of the first update,
            and the extras' metrics. If any, policy/skipped_updates (in none of the means) and
            memory/train_retries.

        Raises:
            StepMismatchError: Sampler and trainer differ under an exact plan; no weight changed.
            RunStopped: No sample has a token.
            NonFiniteError: A loss or gradient is not finite, and train.on_nonfinite is "stop" or
                too many were in a row; that update was not applied.
            OutOfMemoryStop: Memory ran out with one sequence in a micro-batch.
            UserError: Too few samples, an empty prompt, an unknown token, a bad reward or log-prob.
        """
        start = time.perf_counter()
        # Before the first update: packed samples, advantages, log-probs of other models.
        minibatches, metrics = self.preparation(samples, self.optimizer.num_updates)
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
            metrics |= mismatch.surprise_z(stats.metrics, self.policy.config.vocab_size)
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
        timings = {
            "update": time.perf_counter() - start - requantize_s,
            "optimizer": sum(update.optimizer_s for update in updates),
            "requantize": requantize_s,
        }
        return TrainedStep(metrics, timings)

    def _loss(self, micro: MicroBatch, minibatch: Minibatch) -> MicroBatchLoss:
        """Run the forward of a micro-batch, and return its share of the minibatch's loss."""
        batch, device = micro.batch, self.policy.device
        recompute = self.settings.train.activation_checkpointing
        seen = next(filter(None, (extra.observer(batch) for extra in self.extras)), None)
        logprobs, moments = batch_logprobs(self.policy, batch, self._temperature, recompute, seen)
        # The policy that drew the tokens: the sampler's, or this one before the first update.
        # The sampler has reported its log-probs of the trained tokens.
        rollout_logprobs = at_targets(batch.rollout_logprobs, batch, device)
        if self.policy.plan.exact:
            behavior = rollout_logprobs
        else:
            behavior = logprobs.detach() if micro.before is None else micro.before
        advantages = at_targets(batch.advantages, batch, device)
        # Sequence lengths and update sizes weigh the tokens; they are those of the whole update.
        lengths = upload(torch.from_numpy(trained_lengths(batch)), device)
        tokens = Tokens(logprobs, behavior, advantages, lengths)
        longest, objective = self.settings.rollout.max_tokens, self.objective
        size = UpdateSize(minibatch.num_tokens, minibatch.num_sequences, longest)
        for extra in self.extras:
            objective = extra.objective(objective)
        loss = objective(tokens, size, rollout_logprobs, micro.ref_logprobs)
        metrics = {
            "policy/entropy": moments[0].double().sum() / size.tokens,
            "policy/active_fraction": (advantages != 0).double().sum() / size.tokens,
            **loss.metrics,
        }
        if self._all_draws and micro.before is None:  # of the first update, by the sampler's policy
            metrics |= mismatch.surprise_sums(logprobs, moments)
        return replace(loss, metrics=metrics, outputs=logprobs.detach())

    def _compare(
        self, samples: Sequence[Sample], version: int, data: list[Minibatch], first: list[Tensor]
    ) -> dict[str, float]:
        """Compare sampler and trainer on all trained tokens of the step; see `compare_step`."""
        # The first minibatch's training forward and the others' earlier one cover all tokens.
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
    """Return whether tokens come from the policy's whole distribution, and all are trained on."""
    rollout = settings.rollout
    whole = rollout.temperature > 0 and rollout.top_p == 1 and rollout.top_k == 0
    chosen = objective.dynamic_sampling or settings.data.batch != "all" or rollout.oversample > 0
    return whole and not chosen


def _update_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Return means over all tokens of the applied updates, the largest peaks, the mean norm."""
    applied = [update for update in updates if update.applied]
    metrics = {"policy/lr": applied[-1].lr} if applied else {}
    total = sum(update.num_tokens for update in applied)
    for update in applied:
        # Updates differ in size: a mean over all tokens weighs each by its own.
        for name, mean in update.metrics.items():
            if name in (mismatch.EXCESS, mismatch.VARIANCE):
                continue
            metrics[name] = metrics.get(name, 0.0) + update.num_tokens / total * mean
        for name, peak in update.peaks.items():
            metrics[name] = max(metrics.get(name, 0.0), peak)
    metrics |= mean_of_each([{"policy/grad_norm": update.grad_norm} for update in applied])
    skipped = len(updates) - len(applied)
    return metrics | ({"policy/skipped_updates": float(skipped)} if skipped else {})


@dataclass
class Accumulated:
    """The forwards and backwards of this rank in one update; numbers are float64 device scalars.

    Per micro-batch, `shares` are to be added, and of `peaks` the largest counts; `metrics` are of
    the whole update. `outputs` are a policy's log-probs [N] or pairs' score differences [P].
    """

    minibatch: Minibatch
    shares: list[dict[str, Tensor]] = field(default_factory=list)
    peaks: list[dict[str, Tensor]] = field(default_factory=list)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    grad_norm: Tensor = field(init=False)

    def add(self, loss_name: str, loss: MicroBatchLoss) -> None:
        self.shares.append({loss_name: loss.loss.detach().double(), **loss.metrics})
        self.peaks.append(loss.peaks)
        if loss.outputs is not None:
            self.outputs.append(loss.outputs)

    def all_outputs(self) -> list[Tensor]:
        """Return the outputs of all micro-batches, in order, on every rank."""
        if world().size == 1:
            return self.outputs
        own = [output.cpu() for output in self.outputs]
        return world().gather_in_order("the outputs of the update's forwards", own)


@dataclass(frozen=True)
class UpdateStats:
    """The numbers of one update on the host; `applied` is False if it was refused."""

    num_tokens: int
    metrics: dict[str, float]
    peaks: dict[str, float]
    grad_norm: float
    weight_scales_norm: float
    lr: float
    applied: bool = False
    optimizer_s: float = 0.0
    requantize_s: float = 0.0


@dataclass(frozen=True)
class Update:
    """The optimizer updates of one model.

    `loss` runs a micro-batch's forward, and returns its share of the minibatch's loss. The guard
    watches the metrics `watched` and the norms. With `synchronize` the seconds of AdamW and
    requantization are the device's.
    """

    model: Model
    optimizer: Optimizer
    guard: Guard
    loss: Callable[[Any, Any], MicroBatchLoss]
    prefix: str
    watched: Sequence[str] = ("loss",)
    optimizer_name: str = "the optimizer"
    synchronize: bool = False

    def run(self, minibatch: Minibatch, index: int = 0) -> UpdateStats:
        """Make update `index` of a step: `accumulate`, then `finish`."""
        return self.finish(self.accumulate(minibatch), index)

    def accumulate(self, minibatch: Minibatch, retries: bool = True) -> Accumulated:
        """Run forward and backward of all micro-batches, from gradients of zero.

        If memory runs out, retry with smaller micro-batches; OutOfMemoryStop if none can be split.
        """
        gradients, rank, size = self.model.weights.gradients, world().rank, world().size
        while True:
            loss: MicroBatchLoss | None = None
            accumulated, micro_batches = Accumulated(minibatch), minibatch.micro_batches
            with Attempt(catches=retries) as attempt:
                self.optimizer.zero_grad()
                # Gradients are summed in the order of micro-batches, whichever rank makes them.
                gradients.begin_update()
                # Ranks work in rounds of one micro-batch each; in the last one some may have none.
                for first in range(0, len(micro_batches), size):
                    in_round = micro_batches[first : first + size]
                    own = in_round[rank : rank + 1]
                    tokens = [minibatch.tokens_of(micro_batch) for micro_batch in in_round]
                    gradients.begin_micro_batch(tokens, bool(own))
                    # A rank that runs out of memory still meets the others at the round's end.
                    with Attempt(catches=size > 1) as forward:
                        for micro_batch in own:
                            loss = self.loss(micro_batch, minibatch)
                            loss.loss.backward()
                            accumulated.add(self._name("loss"), loss)
                    loss = None  # it holds the graph
                    if forward.problem:
                        release()
                    gradients.end_micro_batch(failed=bool(forward.problem))
                    raise_on_all_ranks(forward.problem)
                gradients.end_update()
            loss = None
            # Every rank retries if one ran out of memory: all need the same micro-batches.
            problem = agree(OUT_OF_MEMORY, attempt.problem) if retries else ""
            if not problem:
                break
            release()
            self.optimizer.zero_grad()
            # Halves the limit for the rest of the run; raises if nothing can be divided.
            minibatch.shrink(problem)
        # Launched before the host waits for anything of the update.
        accumulated.grad_norm = self.optimizer.gradient_norm()
        return accumulated

    def finish(self, accumulated: Accumulated, index: int = 0) -> UpdateStats:
        """Apply the accumulated gradients, unless a number of the update is not finite.

        NonFiniteError if `train.on_nonfinite` is "stop" or too many updates in a row were refused.
        """
        # The only wait for the device in an update. All that can be wrong shows in these numbers.
        stats = self._read(accumulated)
        watched = {name: stats.metrics[name] for name in map(self._name, self.watched)}
        watched[self._name("grad_norm")] = stats.grad_norm
        watched["norm of the FP8 scales"] = stats.weight_scales_norm
        if not self.guard.passes(watched):
            # Name the parameters, then drop the gradients: the guard may repeat the update.
            nonfinite = self.optimizer.nonfinite_gradients()
            self.optimizer.zero_grad()
            repeat = partial(self._repeat, accumulated.minibatch)
            self.guard.refuse(NonFiniteUpdate(index, self.model, watched, nonfinite, repeat))
            return stats
        with explained(self.optimizer_name, ADVICE):
            # The master weights change here; forwards see that after requantization.
            optimizer_s = self._seconds(partial(self.optimizer.apply, accumulated.grad_norm))
            requantize_s = self._seconds(self.model.requantize)
        return replace(stats, applied=True, optimizer_s=optimizer_s, requantize_s=requantize_s)

    def _repeat(self, minibatch: Minibatch) -> None:
        try:
            self.accumulate(minibatch, retries=False)
        finally:
            self.optimizer.zero_grad()

    def _read(self, accumulated: Accumulated) -> UpdateStats:
        """Return the numbers of an update, in one read from the device."""
        norm = accumulated.grad_norm
        scales = torch.nn.utils.get_total_norm(list(self.model.weight_scales().values()))
        # Stack every number on the device, so that the host waits once, then take them apart.
        records = [*accumulated.shares, *accumulated.peaks, accumulated.metrics]
        on_device = [*chain(*(record.values() for record in records)), norm, scales]
        numbers = torch.stack([n.detach().double().to(norm.device) for n in on_device]).tolist()
        *numbers, grad_norm, scales_norm = numbers
        values = iter(numbers)
        read = [{name: next(values) for name in record} for record in records]
        # Shares and peaks of all ranks, in the order of micro-batches: the sums have the same bits.
        count = len(accumulated.shares)
        of_micro_batches = list(zip(read[:count], read[count : 2 * count], strict=True))
        metrics, peaks = _added(world().gather_in_order("metrics of the update", of_micro_batches))
        num_tokens, lr = accumulated.minibatch.num_tokens, self.optimizer.lr
        return UpdateStats(num_tokens, metrics | read[-1], peaks, grad_norm, scales_norm, lr)

    def _name(self, metric: str) -> str:
        return f"{self.prefix}/{metric}"

    def _seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that work took on a device that was idle before."""
        start = time.perf_counter()
        work()
        if self.synchronize and self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter() - start


def _added(
    of_micro_batches: Sequence[tuple[dict[str, float], dict[str, float]]],
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the sums of shares, in the order of micro-batches, and the largest of peaks."""
    metrics: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for shares, highest in of_micro_batches:
        for name, share in shares.items():
            metrics[name] = metrics[name] + share if name in metrics else share
        for name, peak in highest.items():
            peaks[name] = float(np.maximum(peaks.get(name, peak), peak))  # a NaN stays
    return metrics, peaks


def mean_of_each(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number over records that all have it; {} without a record."""
    names = records[0] if records else {}
    return {name: sum(record[name] for record in records) / len(records) for name in names}
