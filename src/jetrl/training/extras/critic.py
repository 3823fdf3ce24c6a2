"""Critic of PPO: a scalar model that predicts the expected return before each token.

It reads the policy's packed batches at the policy's precision, with its own master weights,
optimizer and learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from jetrl.models.model import Model
from jetrl.models.packed import ForwardInputs, Stems
from jetrl.models.scalar_model import ScalarModel
from jetrl.settings.loading import Settings
from jetrl.training.extras import Learner
from jetrl.training.guard import Guard
from jetrl.training.loss_math import loss_sum, total
from jetrl.training.micro_batches import MicroBatch, MicroBatchLoss, Minibatch
from jetrl.training.optimizer import Optimizer
from jetrl.training.packing import targets
from jetrl.training.update import Update, mean_of_each
from jetrl.types import Batch, Metrics

LR = "critic.lr"


class Critic(Learner):
    """A value model and its optimizer, configured by `critic`, `train` and loop.steps."""

    name = "critic"

    def __init__(self, model: ScalarModel, settings: Settings, guard: Guard | None = None) -> None:
        self.model, self.masters = model, model.master_weights()
        self.guard = guard or Guard(settings.train.on_nonfinite, LR)
        self._clip = settings.critic.clip
        self._activation_checkpointing = settings.train.activation_checkpointing
        train = settings.train.model_copy(update={"lr": settings.critic.lr})
        total = settings.loop.steps * settings.train.updates_per_step
        self.optimizer = Optimizer(self.masters, train, total, model.weights.shards)
        self._update = Update(
            model,
            self.optimizer,
            self.guard,
            loss=self._loss,
            prefix="critic",
            optimizer_name="the critic's optimizer",
            seed=settings.run.seed,
        )
        self._of_step: list[Metrics] = []

    def begin(self, version: int, minibatches: Sequence[Minibatch]) -> None:
        self._of_step.clear()

    def after_update(self, index: int, minibatch: Minibatch) -> None:
        # A skipped critic update does not affect the policy, which uses the values from before the
        # step.
        self._of_step.append(self.update(index, minibatch))

    def after_updates(self) -> Metrics:
        applied = [metrics for metrics in self._of_step if metrics]
        skipped = len(self._of_step) - len(applied)
        metrics = mean_of_each(applied)
        return metrics | ({"critic/skipped_updates": float(skipped)} if skipped else {})

    def models(self) -> list[Model]:
        return [self.model]

    @torch.no_grad()
    def values(self, batch: Batch) -> Tensor:
        """Return the expected return before each of N trained tokens: float32 [N]."""
        return self._forward(batch)

    def update(self, index: int, minibatch: Minibatch) -> Metrics:
        """Run update `index` of a step on a policy minibatch, from its values and returns.

        Returns critic/loss (before the update) and critic/clip_fraction, means over tokens,
        critic/grad_norm and critic/lr; {} for a skipped update.
        """
        stats = self._update.run(minibatch, index)
        if not stats.applied:
            return {}
        return {**stats.metrics, "critic/lr": stats.lr, "critic/grad_norm": stats.grad_norm}

    def _loss(self, micro: MicroBatch, minibatch: Minibatch) -> MicroBatchLoss:
        assert micro.values is not None
        assert micro.returns is not None, "the algorithm gives a critic no returns"
        device = self.model.device
        # Values from before the step, so that all updates clip against the same ones.
        loss, clip_fraction = value_loss(
            self._forward(micro.batch),
            old_values=micro.values.to(device),
            returns=micro.returns.to(device),
            num_update_tokens=minibatch.num_tokens,
            clip=self._clip,
        )
        return MicroBatchLoss(loss, {"critic/clip_fraction": clip_fraction})

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_tensors(tensors)
        self.model.requantize()

    def _forward(self, batch: Batch) -> Tensor:
        """Return the value before each trained token, float32 [N], differentiable."""
        return self.model.values(
            ForwardInputs.of(batch),
            torch.from_numpy(batch.cu_seqlens),
            torch.from_numpy(targets(batch) - 1),
            activation_checkpointing=self._activation_checkpointing,
            stems=Stems.of(batch),
        )


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, num_update_tokens: int, clip: float
) -> tuple[Tensor, Tensor]:
    """Return 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), mean over tokens.

    As in OpenAI's PPO and TRL. V, V_old (before the step) and R are float32 [N]; a `clip` of 0
    drops the second term. Also returns the fraction of tokens whose second term is larger, float64.
    """
    # Take the larger of the plain and the clipped error.
    squares = (values - returns).square()
    clipped = torch.zeros_like(values, dtype=torch.bool)
    if clip:
        clipped_values = torch.clamp(values, old_values - clip, old_values + clip)
        clipped_squares = (clipped_values - returns).square()
        clipped = clipped_squares > squares
        squares = torch.maximum(squares, clipped_squares)
    return 0.5 * loss_sum(squares) / num_update_tokens, total(clipped) / num_update_tokens
