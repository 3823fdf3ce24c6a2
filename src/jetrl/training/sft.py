"""Supervised training on worked answers: token-mean cross entropy of the completions, through the
same forward (and the same FP8) as reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from jetrl.errors import UserError
from jetrl.memory.out_of_memory import explained, within_memory
from jetrl.settings.loading import Settings
from jetrl.training.forward import batch_logprobs
from jetrl.training.guard import Guard, NonFiniteUpdate
from jetrl.training.losses import cross_entropy
from jetrl.training.micro_batches import MicroBatch, MicroBatchSize, sizes_of
from jetrl.training.optimizer import ADVICE, supervised_optimizer
from jetrl.training.packing import pack_examples
from jetrl.types import Example

if TYPE_CHECKING:
    from jetrl.models.policy import Policy


_WATCHED = ("sft/loss", "sft/grad_norm")


class SftTrainer:
    """Updates a policy on examples. It has an optimizer of its own: lr, warm-up and schedule from
    `settings.sft`, the rest (betas, clip, decay, micro-batch size) from `settings.train`.

    micro_batch_size, guard: those of the run; by default its own.
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
        self.optimizer = supervised_optimizer(policy.named_masters(), settings)

    def step(self, examples: Sequence[Example]) -> dict[str, float]:
        """One optimizer update on worked answers, all of them.

        Returns:
            sft/loss (nats a completion token, before the update), sft/grad_norm, sft/lr, sft/tokens
            (completion tokens).

        Raises:
            UserError: an example with an empty prompt or completion, or no examples.
            NonFiniteError: the loss or gradient is not finite, and train.on_nonfinite is "stop".
            OutOfMemoryStop: memory ran out with one example in a micro-batch.
        """
        if not examples:
            raise UserError("supervised training got no examples")
        size = self.micro_batch_size
        micro_batches = [MicroBatch(batch) for batch in pack_examples(examples, size.tokens)]

        def shrink(problem: str) -> None:
            nonlocal micro_batches
            self.optimizer.zero_grad()
            size.halve([sizes_of(micro.batch) for micro in micro_batches], problem)
            micro_batches = size.split(micro_batches)

        total_norm, metrics = within_memory(lambda: self._accumulate(micro_batches), shrink)
        retries = size.take_retries()
        if retries:
            metrics["memory/train_retries"] = float(retries)
        if not self.guard.passes({name: metrics[name] for name in _WATCHED}):
            return self._refused(metrics, micro_batches)
        with explained("the optimizer", ADVICE):
            self.optimizer.apply(total_norm)
            self.policy.requantize()
        return metrics

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Forward and backward of one update, whose gradients stay: for the repetition of one.
        Returns the metrics of `step`."""
        return self._accumulate(micro_batches)[1]

    def _accumulate(
        self, micro_batches: Sequence[MicroBatch]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The gradient norm, and the metrics of the update."""
        self.optimizer.zero_grad()
        num_tokens = sum(int(micro.batch.loss_mask.sum()) for micro in micro_batches)
        total = torch.zeros((), dtype=torch.float64, device=self.policy.device)
        for micro in micro_batches:
            logprobs, _ = batch_logprobs(
                self.policy,
                micro.batch,
                checkpoint_layers=self.settings.train.activation_checkpointing,
            )
            loss = cross_entropy(logprobs, num_tokens)
            loss.backward()
            total += loss.detach().double()
        total_norm = self.optimizer.gradient_norm()
        loss_sum, norm = torch.stack([total, total_norm.double()]).tolist()
        return total_norm, {
            "sft/loss": loss_sum,
            "sft/grad_norm": norm,
            "sft/lr": self.optimizer.lr,
            "sft/tokens": float(num_tokens),
        }

    def _refused(
        self, metrics: dict[str, float], micro_batches: Sequence[MicroBatch]
    ) -> dict[str, float]:
        """The metrics of an update that is skipped; raises if it is not to be."""
        values = {name: metrics.pop(name) for name in _WATCHED}
        again = partial(self.accumulate, micro_batches)
        self.guard.refuse(
            NonFiniteUpdate.of(0, self.policy, self.optimizer, values, again, micro_batches)
        )
        return metrics | {"policy/skipped_updates": 1.0}
