"""Supervised training: a policy on worked answers, and a reward model on pairs of completions.

Both use the same forward (and the same FP8) as reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from jetrl.errors import UserError
from jetrl.models.scalar_model import ScalarModel
from jetrl.settings.loading import Settings
from jetrl.training.guard import Guard
from jetrl.training.losses import MicroBatchLoss, cross_entropy, preference_loss
from jetrl.training.micro_batches import MicroBatch, MicroBatchSize, Minibatch, batch_logprobs
from jetrl.training.optimizer import supervised_optimizer
from jetrl.training.packing import pack_examples
from jetrl.training.update import Update, UpdateStats
from jetrl.types import Example

if TYPE_CHECKING:
    from jetrl.models.policy import Policy


class SftTrainer:
    """Updates a policy on worked answers, with its own optimizer.

    Args:
        settings: Learning rate, warm-up and schedule are those of `sft`, the rest those of `train`.
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
            sft/loss (nats per completion token, before the update), sft/grad_norm, sft/lr,
            sft/tokens (completion tokens). A skipped update has policy/skipped_updates instead of
            loss and norm. If memory ran out, memory/train_retries.

        Raises:
            UserError: No examples, or one with an empty prompt or completion.
            NonFiniteError, OutOfMemoryStop: As `Update`.
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


def _loss(
    policy: Policy, checkpoint_layers: bool, micro: MicroBatch, minibatch: Minibatch
) -> MicroBatchLoss:
    logprobs, _ = batch_logprobs(policy, micro.batch, checkpoint_layers=checkpoint_layers)
    return MicroBatchLoss(cross_entropy(logprobs, minibatch.num_tokens))


def _metrics(stats: UpdateStats) -> dict[str, float]:
    return {
        **stats.metrics,
        "sft/grad_norm": stats.grad_norm,
        "sft/lr": stats.lr,
        "sft/tokens": float(stats.num_tokens),
    }


Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of the better and of the worse sequence, prompts included."""


class PairMinibatch:
    """The pairs of one update, in micro-batches that get smaller when memory runs out."""

    def __init__(self, pairs: Sequence[Pair], size: MicroBatchSize) -> None:
        self.pairs, self._size = pairs, size
        self.num_tokens = sum(map(_num_tokens, pairs))
        self.micro_batches = self._packed()

    @staticmethod
    def tokens_of(micro_batch: Sequence[Pair]) -> int:
        return sum(map(_num_tokens, micro_batch))

    def shrink(self, problem: str) -> None:
        """Halve the size of micro-batches, and divide the pairs again.

        Raises:
            OutOfMemoryStop: Each micro-batch is one pair.
        """
        sizes = [(sum(map(_num_tokens, pairs)), len(pairs)) for pairs in self.micro_batches]
        self._size.halve(sizes, problem, "pair")
        self.micro_batches = self._packed()

    def _packed(self) -> list[Sequence[Pair]]:
        ranges = self._size.ranges([_num_tokens(pair) for pair in self.pairs])
        return [self.pairs[part.start : part.stop] for part in ranges]


class RewardTrainer:
    """Updates a scalar model on pairs of sequences, with its own optimizer.

    Args:
        settings: Learning rate, warm-up and schedule are those of `sft`, the rest those of `train`.
    """

    def __init__(
        self, model: ScalarModel, settings: Settings, size: MicroBatchSize | None = None
    ) -> None:
        self.model = model
        self.micro_batch_size = size or MicroBatchSize.of(settings.train)
        self.guard = Guard(settings.train.on_nonfinite, "sft.lr")
        self.optimizer = supervised_optimizer(model, settings)
        self._checkpoint_layers = settings.train.activation_checkpointing
        self._update = Update(model, self.optimizer, self.guard, self._loss, "sft")

    def step(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """Make one optimizer update on pairs of sequences.

        Returns:
            sft/loss (Bradley-Terry, nats per pair), sft/grad_norm, sft/lr, sft/tokens;
            reward_model/accuracy (pairs whose better one scores higher) and reward_model/margin
            (mean difference), before the update. A skipped update has sft/lr, sft/tokens and
            reward_model/skipped_updates only. If it happened, memory/train_retries.

        Raises:
            UserError: No pairs, or a sequence that the model cannot take.
            NonFiniteError, OutOfMemoryStop: As `Update`.
        """
        if not pairs:
            raise UserError("reward model training got no pairs")
        self.model.check_sequences([sequence for pair in pairs for sequence in pair])
        # Accuracy and margin are of all pairs, as scored before the weights change.
        accumulated = self._update.accumulate(PairMinibatch(pairs, self.micro_batch_size))
        margin = torch.cat(accumulated.all_outputs()).double()
        accumulated.metrics["reward_model/accuracy"] = (margin > 0).double().mean()
        accumulated.metrics["reward_model/margin"] = margin.mean()
        stats = self._update.finish(accumulated)
        metrics = {"sft/lr": stats.lr, "sft/tokens": float(stats.num_tokens)}
        metrics |= self.micro_batch_size.take_metrics()
        if not stats.applied:
            return metrics | {"reward_model/skipped_updates": 1.0}
        return metrics | stats.metrics | {"sft/grad_norm": stats.grad_norm}

    def _loss(self, pairs: Sequence[Pair], minibatch: PairMinibatch) -> MicroBatchLoss:
        better, worse = self._scores(pairs)
        loss = preference_loss(better, worse, len(minibatch.pairs))
        return MicroBatchLoss(loss, outputs=(better - worse).detach())

    def _scores(self, pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of the better and of the worse sequences, float32 [P] each."""
        device = self.model.device
        # Better and worse sequences alternate in one packed batch.
        sequences = [sequence for pair in pairs for sequence in pair]
        lengths = torch.tensor([len(s) for s in sequences], device=device)
        token_ids = torch.tensor([t for s in sequences for t in s], device=device)
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        scores = self.model.values(
            token_ids, cu_seqlens, cu_seqlens[1:] - 1, self._checkpoint_layers
        )
        return scores[0::2], scores[1::2]


def _num_tokens(pair: Pair) -> int:
    return len(pair[0]) + len(pair[1])
