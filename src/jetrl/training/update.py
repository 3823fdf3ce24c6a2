"""An optimizer update: forward and backward, guard, AdamW, requantization.

`Update` runs these for the policy, the reward model and the critic; each trainer passes the loss of
a micro-batch:

    accumulate   forward and backward of every micro-batch, retried with smaller ones on OOM; then
                 launch the gradient norm
    finish       read all values from the device once; guard; AdamW; requantization

In between, a trainer may read the forward outputs, before any weight has changed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jetrl.distributed.agreement import OUT_OF_MEMORY, agree
from jetrl.distributed.world import world
from jetrl.memory.out_of_memory import Attempt, explained, raise_on_all_ranks, release
from jetrl.models.model import Model
from jetrl.training.graphs import UpdateGraphs
from jetrl.training.guard import Guard, NonFiniteUpdate
from jetrl.training.host_math import mean
from jetrl.training.micro_batches import MicroBatchLoss, Minibatch
from jetrl.training.optimizer import ADVICE, Optimizer
from jetrl.types import Metrics


@dataclass
class Accumulated:
    """Results of this rank's forward and backward passes in one update.

    Per micro-batch, `shares` are to be summed and `peaks` are maxima (float64 device scalars);
    `metrics` cover the whole update. `outputs` are a policy's log-probs [N] or pairs' score
    differences [P].
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
    """Values of one update on the host; `applied` is False if it was skipped."""

    num_tokens: int
    metrics: Metrics
    peaks: Metrics
    grad_norm: float
    weight_scales_norm: float
    lr: float
    applied: bool = False
    optimizer_s: float = 0.0
    requantize_s: float = 0.0


@dataclass(frozen=True)
class Update:
    """The optimizer updates of one model.

    `loss` runs a micro-batch's forward and returns its share of the minibatch's loss. The guard
    watches the `watched` metrics and the norms. With `synchronize`, the times of AdamW and
    requantization are device times. `graphs` replace launches by captured graphs, bit for bit.
    Stochastic rounding of gradients is by draws of `seed`, update and micro-batch.
    """

    model: Model
    optimizer: Optimizer
    guard: Guard
    loss: Callable[[Any, Any], MicroBatchLoss]
    prefix: str
    watched: Sequence[str] = ("loss",)
    optimizer_name: str = "the optimizer"
    synchronize: bool = False
    graphs: UpdateGraphs | None = None
    seed: int = 0

    def run(self, minibatch: Minibatch, index: int = 0) -> UpdateStats:
        """Run update `index` of a step: `accumulate`, then `finish`."""
        return self.finish(self.accumulate(minibatch), index)

    def accumulate(self, minibatch: Minibatch, retries: bool = True) -> Accumulated:
        """Run forward and backward of all micro-batches, starting from zero gradients.

        On OOM, retry with smaller micro-batches; raises OutOfMemoryStop if none can be split.
        """
        gradients, rank, size = self.model.weights.gradients, world().rank, world().size
        while True:
            loss: MicroBatchLoss | None = None
            accumulated, micro_batches = Accumulated(minibatch), minibatch.micro_batches
            with Attempt(catches=retries) as attempt:
                self.optimizer.zero_grad()
                # Gradients are summed in micro-batch order, regardless of which rank computes them.
                gradients.begin_update()
                if self.graphs is not None:
                    self.graphs.begin_update()
                # Each round processes one micro-batch per rank; in the last round some ranks may
                # have none.
                for first in range(0, len(micro_batches), size):
                    in_round = micro_batches[first : first + size]
                    own = in_round[rank : rank + 1]
                    tokens = [minibatch.tokens_of(micro_batch) for micro_batch in in_round]
                    number = self.optimizer.num_updates, first + rank
                    gradients.draws = (self.seed, self.prefix, *number)
                    gradients.begin_micro_batch(tokens, bool(own))
                    # A rank that runs out of memory still joins the collective at the end of the
                    # round.
                    with Attempt(catches=size > 1) as forward:
                        for micro_batch in own:
                            loss = self._passes(micro_batch, minibatch)
                            accumulated.add(self._name("loss"), loss)
                    loss = None  # frees the graph
                    if forward.problem:
                        release()
                    gradients.end_micro_batch(failed=bool(forward.problem))
                    raise_on_all_ranks(forward.problem)
                gradients.end_update()
            loss = None
            # If one rank runs out of memory, all retry: they need the same micro-batches.
            problem = agree(OUT_OF_MEMORY, attempt.problem) if retries else ""
            if not problem:
                break
            given_up = self.graphs is not None and self.graphs.give_up(problem)
            release()
            self.optimizer.zero_grad()
            if given_up:
                continue
            # Halves the limit for the rest of the run; raises if nothing can be split.
            minibatch.shrink(problem)
        # Launch the norm before the host waits for any value of the update.
        norm = self.optimizer.gradient_norm
        accumulated.grad_norm = norm() if self.graphs is None else self.graphs.gradient_norm(norm)
        return accumulated

    def _passes(self, micro_batch: Any, minibatch: Minibatch) -> MicroBatchLoss:
        """Run forward and backward of a micro-batch."""
        graphs = contextlib.nullcontext() if self.graphs is None else self.graphs.running()
        with graphs:
            loss = self.loss(micro_batch, minibatch)
            loss.loss.backward()
        return loss

    def finish(self, accumulated: Accumulated, index: int = 0) -> UpdateStats:
        """Apply the accumulated gradients, unless a value of the update is not finite.

        Raises NonFiniteError if `train.on_nonfinite` is "stop" or too many consecutive updates were
        skipped.
        """
        # The only host-device synchronization of an update; every fault shows in these values.
        stats = self._read(accumulated)
        watched = {name: stats.metrics[name] for name in map(self._name, self.watched)}
        watched[self._name("grad_norm")] = stats.grad_norm
        watched["norm of the FP8 scales"] = stats.weight_scales_norm
        if not self.guard.passes(watched):
            # Name the parameters, then free the gradients: the guard may repeat the update.
            nonfinite = self.optimizer.nonfinite_gradients()
            self.optimizer.zero_grad()
            repeat = partial(self._repeat, accumulated.minibatch)
            self.guard.refuse(NonFiniteUpdate(index, self.model, watched, nonfinite, repeat))
            return stats
        with explained(self.optimizer_name, ADVICE):
            # Master weights change here; forwards see it after requantization.
            optimizer_s = self._seconds(partial(self.optimizer.apply, accumulated.grad_norm))
            requantize_s = self._seconds((self.graphs or self.model).requantize)
        return replace(stats, applied=True, optimizer_s=optimizer_s, requantize_s=requantize_s)

    def _repeat(self, minibatch: Minibatch) -> None:
        try:
            self.accumulate(minibatch, retries=False)
        finally:
            self.optimizer.zero_grad()

    def _read(self, accumulated: Accumulated) -> UpdateStats:
        """Return the values of an update in one read from the device."""
        norm = accumulated.grad_norm
        scales = torch.nn.utils.get_total_norm(list(self.model.weight_scales().values()))
        # Stack all values on the device, so that the host waits once, then unpack.
        records = [*accumulated.shares, *accumulated.peaks, accumulated.metrics]
        on_device = [*chain(*(record.values() for record in records)), norm, scales]
        numbers = torch.stack([n.detach().double().to(norm.device) for n in on_device]).tolist()
        *numbers, grad_norm, scales_norm = numbers
        values = iter(numbers)
        read = [{name: next(values) for name in record} for record in records]
        # Gather shares and peaks of all ranks in micro-batch order, so that the sums have the same
        # bits.
        count = len(accumulated.shares)
        of_micro_batches = list(zip(read[:count], read[count : 2 * count], strict=True))
        metrics, peaks = _added(world().gather_in_order("metrics of the update", of_micro_batches))
        return UpdateStats(
            num_tokens=accumulated.minibatch.num_tokens,
            metrics=metrics | read[-1],
            peaks=peaks,
            grad_norm=grad_norm,
            weight_scales_norm=scales_norm,
            lr=self.optimizer.lr,
        )

    def _name(self, metric: str) -> str:
        return f"{self.prefix}/{metric}"

    def _seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds of work on a device that was idle before."""
        start = time.perf_counter()
        work()
        if self.synchronize and self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter() - start


def _added(of_micro_batches: Sequence[tuple[Metrics, Metrics]]) -> tuple[Metrics, Metrics]:
    """Return the sums of shares, in micro-batch order, and the maxima of peaks."""
    metrics: Metrics = {}
    peaks: Metrics = {}
    for shares, highest in of_micro_batches:
        for name, share in shares.items():
            metrics[name] = metrics[name] + share if name in metrics else share
        for name, peak in highest.items():
            peaks[name] = float(np.maximum(peaks.get(name, peak), peak))  # propagates NaN
    return metrics, peaks


def mean_of_each(records: Sequence[Metrics]) -> Metrics:
    """Return the mean of each value over the records, which share their keys; {} if empty."""
    names = records[0] if records else {}
    return {name: mean(record[name] for record in records) for name in names}
