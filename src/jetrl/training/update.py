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
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from jetrl.memory.out_of_memory import explained, within_memory
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

    def shrink(self, problem: str) -> None:
        """Divide the micro-batches further, or raise `OutOfMemoryStop` where that cannot be done.

        Args:
            problem: One line of the allocator's message.
        """


AnyMinibatch = TypeVar("AnyMinibatch", bound=Divisible)


@dataclass
class Accumulated(Generic[AnyMinibatch]):
    """The forwards and backwards of one update; its numbers are still on the device.

    Attributes:
        minibatch: The data of the update.
        metrics: float64 scalars by name: the micro-batches' shares of the update's means, added.
        peaks: float64 scalars by name: the largest value of any micro-batch.
        outputs: What the model gave for each micro-batch, without gradient: the log-probs of a
            policy, float32 [N]; the score differences of a reward model, float32 [P].
        grad_norm: float32 scalar: the norm of all gradients together.
    """

    minibatch: AnyMinibatch
    metrics: dict[str, Tensor] = field(default_factory=dict)
    peaks: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    grad_norm: Tensor = field(init=False)

    def add(self, loss_name: str, loss: MicroBatchLoss) -> None:
        """Add the numbers of one micro-batch.

        Args:
            loss_name: The metric name of the loss itself.
            loss: The loss of the micro-batch, after its backward.
        """
        shares = {loss_name: loss.loss.detach().double(), **loss.metrics}
        for name, share in shares.items():
            self.metrics[name] = self.metrics[name] + share if name in self.metrics else share
        for name, peak in loss.peaks.items():
            self.peaks[name] = torch.maximum(self.peaks.get(name, peak), peak)
        if loss.outputs is not None:
            self.outputs.append(loss.outputs)


@dataclass(frozen=True)
class UpdateStats:
    """The numbers of one update, as the host has read them.

    Attributes:
        num_tokens: Tokens that the means are over.
        metrics: Means over the update, by metric name, the loss among them.
        peaks: Largest values of the update, by metric name.
        grad_norm: Norm of all gradients together, before the clip.
        weight_scales_norm: Norm of the scales of all FP8 weights together.
        lr: The learning rate of the update.
        applied: Whether the update was applied; False where the guard refused it.
        optimizer_s: Seconds that the optimizer took.
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
        model: The model whose master weights are updated and rounded.
        optimizer: The optimizer over these master weights.
        guard: Decides what becomes of an update that is not finite.
        loss: Runs the forward of a micro-batch of a minibatch, and returns its share of the loss.
        prefix: The first part of the metric names: "policy", "sft" or "critic".
        watched: Names, without prefix, of the metrics that the guard watches beside the norms.
        optimizer_name: What a message about missing memory calls the optimizer.
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
            minibatch: The data of the update.
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
            minibatch = accumulated.minibatch
            repeat, micro_batches = partial(self._repeat, minibatch), minibatch.micro_batches
            self.guard.refuse(
                NonFiniteUpdate(index, self.model, watched, nonfinite, micro_batches, repeat)
            )
            return stats
        with explained(self.optimizer_name, ADVICE):
            optimizer_s = self._seconds(partial(self.optimizer.apply, accumulated.grad_norm))
            requantize_s = self._seconds(self.model.requantize)
        return replace(stats, applied=True, optimizer_s=optimizer_s, requantize_s=requantize_s)

    def measure(self, minibatch: AnyMinibatch) -> UpdateStats:
        """Run forward and backward once, keep the gradients, and return the numbers."""
        accumulated = self._forward_backward(minibatch)
        accumulated.grad_norm = self.optimizer.gradient_norm()
        return self._read(accumulated)

    def _forward_backward(self, minibatch: AnyMinibatch) -> Accumulated[AnyMinibatch]:
        """Run forward and backward of all micro-batches, from gradients of zero."""
        self.optimizer.zero_grad()
        accumulated = Accumulated(minibatch)
        for micro_batch in minibatch.micro_batches:
            loss = self.loss(micro_batch, minibatch)
            loss.loss.backward()
            accumulated.add(self._name("loss"), loss)
            del loss  # and with it what is left of the graph, before the next forward
        return accumulated

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
        metrics, peaks = accumulated.metrics, accumulated.peaks
        on_device = [*metrics.values(), *peaks.values(), norm, scales]
        numbers = torch.stack([n.detach().double().to(norm.device) for n in on_device]).tolist()
        grad_norm, weight_scales_norm = numbers[-2:]
        return UpdateStats(
            accumulated.minibatch.num_tokens,
            dict(zip(metrics, numbers, strict=False)),
            dict(zip(peaks, numbers[len(metrics) : -2], strict=True)),
            grad_norm,
            weight_scales_norm,
            self.optimizer.lr,
        )

    def _name(self, metric: str) -> str:
        """Return the full name of a metric."""
        return f"{self.prefix}/{metric}"

    def _seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that some work took, on a device that had nothing else to do."""
        start = time.perf_counter()
        work()
        if self.synchronize and self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter() - start
