"""Supervised training on worked answers.

The loss is the mean cross entropy over the tokens of the completions, through the same forward (and
the same FP8) as reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from jetrl.errors import UserError
from jetrl.settings.loading import Settings
from jetrl.training.forward import batch_logprobs
from jetrl.training.guard import Guard
from jetrl.training.losses import MicroBatchLoss, cross_entropy
from jetrl.training.micro_batches import MicroBatch, MicroBatchSize, Minibatch
from jetrl.training.optimizer import supervised_optimizer
from jetrl.training.packing import pack_examples
from jetrl.training.update import Update, UpdateStats
from jetrl.types import Example

if TYPE_CHECKING:
    from jetrl.models.policy import Policy


class SftTrainer:
    """Updates a policy on worked answers, with an optimizer of its own.

    Args:
        settings: Learning rate, warm-up and schedule are those of `sft`, the rest of the
            optimizer and the size of micro-batches those of `train`.
        guard: The run's guard for supervised updates; by default a new one.
    """

    def __init__(
        self,
        policy: Policy,
        settings: Settings,
        micro_batch_size: MicroBatchSize | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.policy = policy
        self.settings = settings
        self.micro_batch_size = micro_batch_size or MicroBatchSize.of(settings.train)
        self.guard = guard or Guard(settings.train.on_nonfinite, "sft.lr")
        self.optimizer = supervised_optimizer(policy, settings)
        # Not a method: without a reference back, the moments are gone as soon as the trainer is.
        loss = partial(_loss, policy, settings.train.activation_checkpointing)
        self._update = Update(policy, self.optimizer, self.guard, loss, "sft")

    def step(self, examples: Sequence[Example]) -> dict[str, float]:
        """Make one optimizer update on worked answers.

        Returns:
            sft/loss (nats a completion token, before the update), sft/grad_norm, sft/lr, sft/tokens
            (completion tokens). Of a skipped update sft/lr, sft/tokens and policy/skipped_updates.
            Where memory ran out, memory/train_retries.

        Raises:
            UserError: An example with an empty prompt or completion, or no examples.
            NonFiniteError: The loss or gradient is not finite, and train.on_nonfinite is "stop".
            OutOfMemoryStop: Memory ran out with one example in a micro-batch.
        """
        if not examples:
            raise UserError("supervised training got no examples")
        size = self.micro_batch_size
        batches = pack_examples(examples, size.tokens)
        minibatch = Minibatch([MicroBatch(batch) for batch in batches], size)
        stats = self._update.run(minibatch)
        metrics = _metrics(stats) | size.take_metrics()
        if stats.applied:
            return metrics
        del metrics["sft/loss"], metrics["sft/grad_norm"]
        return metrics | {"policy/skipped_updates": 1.0}

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Run forward and backward of one update again, keep the gradients, return its metrics."""
        minibatch = Minibatch(micro_batches, self.micro_batch_size)
        return _metrics(self._update.measure(minibatch))


def _loss(
    policy: Policy, checkpoint_layers: bool, micro: MicroBatch, minibatch: Minibatch
) -> MicroBatchLoss:
    """Return the cross entropy of a micro-batch, its share of the minibatch's."""
    logprobs, _ = batch_logprobs(policy, micro.batch, checkpoint_layers=checkpoint_layers)
    return MicroBatchLoss(cross_entropy(logprobs, minibatch.num_tokens))


def _metrics(stats: UpdateStats) -> dict[str, float]:
    """Return the metrics of a supervised update."""
    return {
        **stats.metrics,
        "sft/grad_norm": stats.grad_norm,
        "sft/lr": stats.lr,
        "sft/tokens": float(stats.num_tokens),
    }
