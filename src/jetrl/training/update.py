"""The optimizer update: the only place that runs backward, the guard, AdamW and requantization.

The policy under reinforcement learning, the policy in supervised training, the reward model and the
critic are all updated by an `Update`. What differs between them is the loss of a micro-batch, a
function that each trainer hands over. An update has two halves:

    accumulate   forward and backward of every micro-batch; begun again with smaller micro-batches
                 where memory runs out; then the gradient norm is launched
    finish       one read of all numbers from the device; the guard; AdamW; requantization

Between the two a trainer may look at what the forwards gave, before any weight has changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from jetrl.distributed.world import world
from jetrl.memory.out_of_memory import (
    explained,
    first_line,
    is_out_of_memory,
    raise_on_all_ranks,
    release,
    within_memory,
)
from jetrl.training.guard import Guard, NonFiniteUpdate
from jetrl.training.losses import MicroBatchLoss
from jetrl.training.optimizer import ADVICE, Optimizer

if TYPE_CHECKING:
    from jetrl.models.model import Model


class Divisible(Protocol):
    """The data of one update, in micro-batches that can be made smaller."""

    @property
    def micro_batches(self) -> Sequence[Any]:
        """Return the present micro-batches, in order."""

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the metrics of the update are means over."""

    @staticmethod
    def tokens_of(micro_batch: Any) -> int:
        """Return how many tokens the forward of a micro-batch reads."""

    def shrink(self, problem: str) -> None:
        """Divide the micro-batches further."""


AnyMinibatch = TypeVar("AnyMinibatch", bound=Divisible)


@dataclass
class Accumulated(Generic[AnyMinibatch]):
    """The forwards and backwards of one update; its numbers are still on the device.

    Of several processes each has forwarded its share of the micro-batches.

    Attributes:
        shares: For each micro-batch of this process float64 scalars by name, to be added over all.
        peaks: For each micro-batch of this process float64 scalars, of which the largest counts.
        metrics: float64 scalars by name that are measured over the whole update at once.
        outputs: What the model gave for each micro-batch of this process, without gradient: the
            log-probs of a policy, float32 [N]; the score differences of a reward model, [P].
        grad_norm: float32 scalar: the norm of all gradients together.
    """

    minibatch: AnyMinibatch
    shares: list[dict[str, Tensor]] = field(default_factory=list)
    peaks: list[dict[str, Tensor]] = field(default_factory=list)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    grad_norm: Tensor = field(init=False)

    def add(self, loss_name: str, loss: MicroBatchLoss) -> None:
        """Add the numbers of one micro-batch."""
        self.shares.append({loss_name: loss.loss.detach().double(), **loss.metrics})
        self.peaks.append(loss.peaks)
        if loss.outputs is not None:
            self.outputs.append(loss.outputs)

    def all_outputs(self) -> list[Tensor]:
        """Return the outputs of all micro-batches of the update, in order, on every process."""
        if world().size == 1:
            return self.outputs
        own = [output.cpu() for output in self.outputs]
        return world().gather_in_order("the outputs of the update's forwards", own)


@dataclass(frozen=True)
class UpdateStats:
    """The numbers of one update, as the host has read them.

    Attributes:
        weight_scales_norm: Norm of the scales of all FP8 weights together.
        applied: Whether the update was applied; False where the guard refused it.
        requantize_s: Seconds that rounding the master weights took.
    """

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
class Update(Generic[AnyMinibatch]):
    """The optimizer updates of one model, made one after the other.

    Attributes:
        loss: Runs the forward of a micro-batch of a minibatch, and returns its share of the loss.
        prefix: The first part of the metric names: "policy", "sft" or "critic".
        watched: Names, without prefix, of the metrics that the guard watches beside the norms.
        synchronize: Whether to wait for the device after AdamW and after requantization, so that
            their seconds are those of the device.
    """

    model: Model
    optimizer: Optimizer
    guard: Guard
    loss: Callable[[Any, AnyMinibatch], MicroBatchLoss]
    prefix: str
    watched: Sequence[str] = ("loss",)
    optimizer_name: str = "the optimizer"
    synchronize: bool = False

    def run(self, minibatch: AnyMinibatch, index: int = 0) -> UpdateStats:
        """Make one update, both halves; `accumulate` and `finish` list the errors.

        Args:
            index: The number of the update in its training step, from 0.
        """
        return self.finish(self.accumulate(minibatch), index)

    def accumulate(self, minibatch: AnyMinibatch) -> Accumulated[AnyMinibatch]:
        """Run forward and backward of all micro-batches, with smaller ones where memory runs out.

        Raises:
            OutOfMemoryStop: Memory ran out and no micro-batch can be divided.
        """

        def shrink(problem: str) -> None:
            self.optimizer.zero_grad()
            minibatch.shrink(problem)

        accumulated = within_memory(lambda: self._forward_backward(minibatch), shrink)
        # Launched before the host waits for anything of the update.
        accumulated.grad_norm = self.optimizer.gradient_norm()
        return accumulated

    def finish(self, accumulated: Accumulated[AnyMinibatch], index: int = 0) -> UpdateStats:
        """Apply the accumulated gradients, unless a number of the update is not finite.

        Args:
            accumulated: What `accumulate` returned.
            index: The number of the update in its training step, from 0.

        Raises:
            NonFiniteError: The update is not finite, and `train.on_nonfinite` is "stop" or too many
                were refused in a row. No weight was changed.
            OutOfMemoryStop: The optimizer has no room for its states.
        """
        stats = self._read(accumulated)
        watched = {name: stats.metrics[name] for name in map(self._name, self.watched)}
        watched[self._name("grad_norm")] = stats.grad_norm
        watched["norm of the FP8 scales"] = stats.weight_scales_norm
        if not self.guard.passes(watched):
            nonfinite = self.optimizer.nonfinite_gradients()
            self.optimizer.zero_grad()
            repeat = partial(self._repeat, accumulated.minibatch)
            self.guard.refuse(NonFiniteUpdate(index, self.model, watched, nonfinite, repeat))
            return stats
        with explained(self.optimizer_name, ADVICE):
            optimizer_s = self._seconds(partial(self.optimizer.apply, accumulated.grad_norm))
            requantize_s = self._seconds(self.model.requantize)
        return replace(stats, applied=True, optimizer_s=optimizer_s, requantize_s=requantize_s)

    def _forward_backward(self, minibatch: AnyMinibatch) -> Accumulated[AnyMinibatch]:
        """Run forward and backward of all micro-batches, from gradients of zero."""
        self.optimizer.zero_grad()
        gradients = self.model.weights.gradients
        gradients.begin_update()
        accumulated = Accumulated(minibatch)
        micro_batches, size = minibatch.micro_batches, world().size
        for first in range(0, len(micro_batches), size):
            self._round(micro_batches[first : first + size], accumulated)
        gradients.end_update()
        return accumulated

    def _round(self, micro_batches: Sequence[Any], accumulated: Accumulated[AnyMinibatch]) -> None:
        """Run forward and backward of this process's micro-batch of a round, if it has one."""
        gradients, minibatch = self.model.weights.gradients, accumulated.minibatch
        own = list(micro_batches[world().rank : world().rank + 1])
        gradients.begin_micro_batch([minibatch.tokens_of(m) for m in micro_batches], bool(own))

        def forward_backward() -> None:
            for micro_batch in own:
                loss = self.loss(micro_batch, minibatch)
                loss.loss.backward()
                accumulated.add(self._name("loss"), loss)

        problem = ""
        try:
            forward_backward()
        except Exception as error:
            if world().size == 1 or not is_out_of_memory(error):
                raise
            problem = first_line(error)
        if problem:
            release()
        gradients.end_micro_batch(failed=bool(problem))
        raise_on_all_ranks(problem)

    def _repeat(self, minibatch: AnyMinibatch) -> None:
        """Run forward and backward of all micro-batches again, and forget the gradients."""
        try:
            self._forward_backward(minibatch)
        finally:
            self.optimizer.zero_grad()

    def _read(self, accumulated: Accumulated[AnyMinibatch]) -> UpdateStats:
        """Return the numbers of an update, in one read from the device."""
        norm = accumulated.grad_norm
        scales = torch.nn.utils.get_total_norm(list(self.model.weight_scales().values()))
        records = [*accumulated.shares, *accumulated.peaks, accumulated.metrics]
        on_device = [*chain(*(record.values() for record in records)), norm, scales]
        numbers = torch.stack([n.detach().double().to(norm.device) for n in on_device]).tolist()
        *numbers, grad_norm, weight_scales_norm = numbers
        values = iter(numbers)
        read = [{name: next(values) for name in record} for record in records]
        count = len(accumulated.shares)
        of_micro_batches = list(zip(read[:count], read[count : 2 * count], strict=True))
        metrics, peaks = _added(world().gather_in_order("metrics of the update", of_micro_batches))
        return UpdateStats(
            accumulated.minibatch.num_tokens,
            metrics | read[-1],
            peaks,
            grad_norm,
            weight_scales_norm,
            self.optimizer.lr,
        )

    def _name(self, metric: str) -> str:
        return f"{self.prefix}/{metric}"

    def _seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that some work took, on a device that had nothing else to do."""
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
