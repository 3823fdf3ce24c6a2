"""Supervised training: a policy on demonstrations or preference pairs, a reward model on pairs.

All use the same forward and precision as reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jetrl.distributed.world import world
from jetrl.models.experts import observed_routes
from jetrl.models.model import Model
from jetrl.models.packed import pack, upload
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import ScalarModel
from jetrl.settings.loading import Settings
from jetrl.settings.sections import TrainSettings
from jetrl.training.graphs import training_graphs
from jetrl.training.guard import Guard
from jetrl.training.loss_math import divided, log_sigmoid, loss_sum, sequence_sum, total
from jetrl.training.micro_batches import (
    MicroBatch,
    MicroBatchLoss,
    MicroBatchSize,
    Minibatch,
    batch_logprobs,
)
from jetrl.training.optimizer import Optimizer
from jetrl.training.packing import pack_examples, trained_lengths
from jetrl.training.routes import check_balance, with_routes
from jetrl.training.update import Update, UpdateStats
from jetrl.types import Example, Metrics


class _Supervised:
    """Base trainer with learning rate, warm-up and schedule of [sft], and the rest of [train]."""

    def __init__(
        self, model: Model, settings: Settings, size: MicroBatchSize | None, guard: Guard | None
    ) -> None:
        self.micro_batch_size = size or MicroBatchSize.of(settings.train)
        self.guard = guard or Guard(settings.train.on_nonfinite, "sft.lr")
        sft = settings.sft
        own = {"lr": sft.lr, "warmup_steps": sft.warmup_steps, "schedule": sft.schedule}
        train = settings.train.model_copy(update=own)
        self.optimizer = Optimizer(model.master_weights(), train, sft.steps, model.weights.shards)

    def _common(self, stats: UpdateStats) -> Metrics:
        """Return the metrics that skipped updates report too."""
        common = {"sft/lr": stats.lr, "sft/tokens": float(stats.num_tokens)}
        return common | self.micro_batch_size.take_metrics()


class SftTrainer(_Supervised):
    """Trains a policy on demonstrations, with its own optimizer."""

    def __init__(
        self,
        policy: Policy,
        settings: Settings,
        micro_batch_size: MicroBatchSize | None = None,
        guard: Guard | None = None,
    ) -> None:
        super().__init__(policy, settings, micro_batch_size, guard)
        # Not a bound method: without a reference cycle, moments are freed together with the
        # trainer.
        check_balance(policy.config, settings.train.router_aux_loss)
        loss = partial(_loss, policy, settings.train)
        graphs = training_graphs(policy, settings.train)
        self._update = Update(
            policy,
            self.optimizer,
            self.guard,
            loss=loss,
            prefix="sft",
            graphs=graphs,
            seed=settings.run.seed,
        )

    def step(self, examples: Sequence[Example]) -> Metrics:
        """Run one optimizer update on demonstrations; empty prompts or completions are rejected.

        Returns sft/loss (nats per completion token, before the update), sft/grad_norm, sft/lr and
        sft/tokens (completion tokens). A skipped update reports policy/skipped_updates in place of
        loss and norm. A mixture of experts adds experts/*.
        """
        assert examples
        size = self.micro_batch_size
        # Same packing and forward as in reinforcement learning.
        batches = pack_examples(examples, size.tokens)
        stats = self._update.run(Minibatch([MicroBatch(batch) for batch in batches], size))
        if not stats.applied:
            return self._common(stats) | {"policy/skipped_updates": 1.0}
        metrics = stats.metrics | stats.peaks
        return {**metrics, "sft/grad_norm": stats.grad_norm, **self._common(stats)}


def _loss(
    policy: Policy, train: TrainSettings, micro: MicroBatch, minibatch: Minibatch
) -> MicroBatchLoss:
    with observed_routes(policy.decoder) as routes:
        logprobs, _ = batch_logprobs(
            policy, micro.batch, activation_checkpointing=train.activation_checkpointing
        )
    loss = MicroBatchLoss(-divided(loss_sum(logprobs), minibatch.num_tokens))
    share = len(logprobs) / minibatch.num_tokens
    return with_routes(loss, routes, [], share=share, train=train) if routes else loss


@torch.no_grad()
def mean_loss(policy: Policy, examples: Sequence[Example], tokens_at_once: int) -> float | None:
    """Return the mean loss of examples, in nats per token of their completions; None if empty."""
    batches = pack_examples(examples, tokens_at_once)
    losses = [total(-batch_logprobs(policy, batch)[0].double()) for batch in batches]
    count = sum(len(example.completion) for example in examples)
    return sum(map(float, losses)) / count if examples else None


Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of the better and the worse sequence, including the prompt."""
ExamplePair = tuple[Example, Example]
"""The better and the worse completion of a prompt."""


def num_tokens_of(example: Example | Pair | ExamplePair) -> int:
    """Return the tokens of an example or a pair, including prompts."""
    return len(example) if isinstance(example, Example) else len(example[0]) + len(example[1])


class PairMinibatch(Minibatch):
    """The pairs of one update, split into micro-batches that shrink on OOM."""

    def __init__(self, pairs: Sequence[Pair | ExamplePair], size: MicroBatchSize) -> None:
        self.pairs, self._size = pairs, size
        self.num_tokens = self.tokens_of(pairs)
        self.micro_batches = self._packed()

    @staticmethod
    def tokens_of(micro_batch: Any) -> int:
        return sum(map(num_tokens_of, micro_batch))

    def shrink(self, problem: str) -> None:
        """Halve the run's token limit and split the pairs again."""
        sizes = [(self.tokens_of(pairs), len(pairs)) for pairs in self.micro_batches]
        self._size.halve(sizes, problem, "pair")
        self.micro_batches = self._packed()

    def _packed(self) -> list[Sequence[Pair | ExamplePair]]:
        ranges = self._size.ranges([num_tokens_of(pair) for pair in self.pairs])
        return [self.pairs[part.start : part.stop] for part in ranges]


class _PairTrainer(_Supervised):
    """A trainer on pairs, whose loss has the margin of each pair as its output."""

    _update: Update

    def _update_on(
        self, pairs: Sequence[Pair | ExamplePair], *, margins: str, skipped: str
    ) -> Metrics:
        """Run one update; return its metrics, those of margins and skips under these names."""
        # Accuracy and margin over all pairs, from before the weights change.
        accumulated = self._update.accumulate(PairMinibatch(pairs, self.micro_batch_size))
        margin = torch.cat(accumulated.all_outputs())
        accumulated.metrics[f"{margins}/accuracy"] = total(margin > 0) / len(margin)
        accumulated.metrics[f"{margins}/margin"] = total(margin) / len(margin)
        stats = self._update.finish(accumulated)
        metrics = self._common(stats)
        if not stats.applied:
            return metrics | {f"{skipped}/skipped_updates": 1.0}
        return metrics | stats.metrics | {"sft/grad_norm": stats.grad_norm}


class RewardTrainer(_PairTrainer):
    """Trains a scalar model on pairs of sequences, with its own optimizer."""

    def __init__(
        self, model: ScalarModel, settings: Settings, size: MicroBatchSize | None = None
    ) -> None:
        self.model = model
        self._activation_checkpointing = settings.train.activation_checkpointing
        super().__init__(model, settings, size, None)
        self._update = Update(
            model, self.optimizer, self.guard, loss=self._loss, prefix="sft", seed=settings.run.seed
        )

    def step(self, pairs: Sequence[Pair]) -> Metrics:
        """Run one optimizer update on pairs of sequences.

        Returns sft/loss (Bradley-Terry, nats per pair), sft/grad_norm, sft/lr, sft/tokens, and from
        before the update reward_model/accuracy and reward_model/margin (mean difference). A skipped
        update reports only sft/lr, sft/tokens and reward_model/skipped_updates.
        """
        self.model.check_sequences([sequence for pair in pairs for sequence in pair])
        return self._update_on(pairs, margins="reward_model", skipped="reward_model")

    def _loss(self, pairs: Sequence[Pair], minibatch: PairMinibatch) -> MicroBatchLoss:
        # Better and worse sequences alternate in one packed batch; scores are at the last tokens.
        sequences = [sequence for pair in pairs for sequence in pair]
        inputs, cu_seqlens = pack(sequences, self.model.device)
        last = cu_seqlens[1:] - 1
        scores = self.model.values(
            inputs, cu_seqlens, rows=last, activation_checkpointing=self._activation_checkpointing
        )
        better, worse = scores[0::2], scores[1::2]
        loss = preference_loss(better, worse, len(minibatch.pairs))
        return MicroBatchLoss(loss, outputs=(better - worse).detach())


class DpoTrainer(_PairTrainer):
    """Trains a policy on pairs of completions (Rafailov et al. 2023, "DPO", arXiv 2305.18290).

    With r the log-prob of a completion less that of the frozen `reference`, the margin of a pair is
    sft.dpo_beta * (r(better) - r(worse)), and its loss -log sigmoid(margin) (eq. 7).
    """

    def __init__(
        self,
        policy: Policy,
        reference: Policy,
        settings: Settings,
        size: MicroBatchSize | None = None,
    ) -> None:
        self.policy, self.reference, self._beta = policy, reference, settings.sft.dpo_beta
        self._activation_checkpointing = settings.train.activation_checkpointing
        super().__init__(policy, settings, size, None)
        self._update = Update(
            policy,
            self.optimizer,
            self.guard,
            loss=self._loss,
            prefix="sft",
            seed=settings.run.seed,
        )

    def step(self, pairs: Sequence[ExamplePair]) -> Metrics:
        """Run one optimizer update on pairs of completions.

        Returns sft/loss (nats per pair), sft/grad_norm, sft/lr, sft/tokens (of sequences, with
        prompts), and from before the update dpo/accuracy (of margins above 0) and dpo/margin
        (mean). A skipped update reports policy/skipped_updates in place of the rest.
        """
        return self._update_on(pairs, margins="dpo", skipped="policy")

    def accuracy(self, pairs: Sequence[ExamplePair]) -> float:
        """Return the fraction of pairs with a margin above 0; ranks share the forwards."""
        # The micro-batches of training, so that memory suffices.
        minibatch = PairMinibatch(pairs, self.micro_batch_size)
        with torch.no_grad():
            own = [self.margins(part).cpu() for part in world().share(minibatch.micro_batches)]
        margins = torch.cat(world().gather_in_order("margins of the eval pairs", own))
        return float((margins > 0).double().mean())

    def margins(self, pairs: Sequence[ExamplePair]) -> Tensor:
        """Return the margin of each pair, float32 [P], differentiable in the policy."""
        # Better and worse completions alternate in one packed batch, with the prompt before each.
        examples = [example for pair in pairs for example in pair]
        (batch,) = pack_examples(examples, sum(map(len, examples)))
        with torch.no_grad(), self.reference.used():
            reference, _ = batch_logprobs(self.reference, batch)
        logprobs, _ = batch_logprobs(
            self.policy, batch, activation_checkpointing=self._activation_checkpointing
        )
        lengths = upload(torch.from_numpy(trained_lengths(batch)), self.policy.device)
        # Each token has the sum of its sequence: take the first token's.
        sums = sequence_sum(logprobs - reference, lengths)[lengths.cumsum(0) - lengths]
        better, worse = sums.view(-1, 2).unbind(1)
        return self._beta * (better - worse)

    def _loss(self, pairs: Sequence[ExamplePair], minibatch: PairMinibatch) -> MicroBatchLoss:
        margins = self.margins(pairs)
        loss = preference_loss(margins, torch.zeros_like(margins), len(minibatch.pairs))
        return MicroBatchLoss(loss, outputs=margins.detach())


def preference_loss(better: Tensor, worse: Tensor, num_pairs: int) -> Tensor:
    """Return -log sigmoid(better - worse) for scores float32 [P], as a share of the mean.

    The Bradley-Terry model (Bradley and Terry 1952; Ouyang et al. 2022, "InstructGPT", eq. 1).
    """
    return -divided(loss_sum(log_sigmoid(better - worse)), num_pairs)
