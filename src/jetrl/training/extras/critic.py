"""The critic of PPO: a scalar model that learns the return to be expected before each token.

It reads the policy's packed batches under the policy's precision plan, with master weights,
optimizer and learning rate of its own. What it has learnt goes into checkpoints through
`state_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from jetrl.distributed.shards import Shard
from jetrl.errors import UserError
from jetrl.models.model import Model
from jetrl.models.packed import Stems
from jetrl.models.scalar_model import ScalarModel
from jetrl.settings.loading import Settings
from jetrl.training.extras import Extra
from jetrl.training.guard import Guard
from jetrl.training.losses import MicroBatchLoss, value_loss
from jetrl.training.micro_batches import MicroBatch, Minibatch
from jetrl.training.optimizer import Optimizer
from jetrl.training.packing import targets
from jetrl.training.update import Update, mean_of_each
from jetrl.types import Batch

LR = "critic.lr"


class Critic(Extra):
    """A value model with its optimizer.

    Args:
        settings: `critic`, `train` and loop.steps.
    """

    def __init__(self, model: ScalarModel, settings: Settings, guard: Guard | None = None) -> None:
        self.model = model
        self.guard = guard or Guard(settings.train.on_nonfinite, LR)
        self._clip = settings.critic.clip
        self._checkpoint_layers = settings.train.activation_checkpointing
        self.optimizer = Optimizer(
            model.master_weights(),
            settings.train.model_copy(update={"lr": settings.critic.lr}),
            total_updates=settings.loop.steps * settings.train.updates_per_step,
            shards=model.weights.shards,
        )
        self._update = Update(
            model,
            self.optimizer,
            self.guard,
            self._loss,
            "critic",
            optimizer_name="the critic's optimizer",
        )
        self._of_step: list[dict[str, float]] = []

    def begin(self, version: int, minibatches: Sequence[Minibatch]) -> None:
        self._of_step.clear()

    def after_update(self, index: int, minibatch: Minibatch) -> None:
        # The policy's update stays: it depends only on the values of before the step.
        self._of_step.append(self.update(index, minibatch))

    def after_updates(self) -> dict[str, float]:
        applied = [metrics for metrics in self._of_step if metrics]
        skipped = len(self._of_step) - len(applied)
        metrics = mean_of_each(applied)
        return metrics | ({"critic/skipped_updates": float(skipped)} if skipped else {})

    def models(self) -> list[Model]:
        return [self.model]

    @torch.no_grad()
    def values(self, batch: Batch) -> torch.Tensor:
        """Return the expected return before each of the N trained tokens: float32 [N]."""
        return self._forward(batch)

    def update(self, index: int, minibatch: Minibatch) -> dict[str, float]:
        """Make update `index` of a step on a minibatch of the policy, by its values and returns.

        Returns critic/loss (before the update) and critic/clip_fraction, means over tokens, and
        critic/grad_norm, critic/lr; {} for a skipped update. Raises as `Update`.
        """
        stats = self._update.run(minibatch, index)
        if not stats.applied:
            return {}
        return {**stats.metrics, "critic/lr": stats.lr, "critic/grad_norm": stats.grad_norm}

    def _loss(self, micro: MicroBatch, minibatch: Minibatch) -> MicroBatchLoss:
        assert micro.values is not None
        assert micro.returns is not None, "the algorithm gives a critic no returns"
        device = self.model.device
        # Values of before the step, so that several updates clip against the same ones.
        loss, clip_fraction = value_loss(
            self._forward(micro.batch),
            micro.values.to(device),
            micro.returns.to(device),
            minibatch.num_tokens,
            self._clip,
        )
        return MicroBatchLoss(loss, {"critic/clip_fraction": clip_fraction})

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return master weights, moments and the number of updates: the tensors, not copies."""
        masters = {f"master.{n}": p.detach() for n, p in self.model.master_weights().items()}
        moments = {f"adamw.{n}": t for n, t in self.optimizer.state_tensors().items()}
        return masters | moments | {"updates": torch.tensor(self.optimizer.num_updates)}

    def shard_of(self, name: str) -> Shard | None:
        """Return how the rows of a state tensor are divided; None if every rank has it whole."""
        kind, _, own_name = name.partition(".")
        if kind == "master":
            return self.optimizer.shards.get(own_name)
        return self.optimizer.shard_of(own_name)

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the result of `state_tensors`, bit for bit.

        Raises:
            UserError: The tensors are those of another model; nothing was changed then.
        """
        masters = self.model.master_weights()
        saved = {n.removeprefix("master."): tensors[n] for n in tensors if n.startswith("master")}
        if {n: t.shape for n, t in saved.items()} != {n: p.shape for n, p in masters.items()}:
            raise UserError(
                "the checkpoint's critic is of another model: resume with the settings "
                "it was made with"
            )
        moments = {n.removeprefix("adamw."): tensors[n] for n in tensors if n.startswith("adamw")}
        updates = tensors.get("updates", torch.tensor(-1))
        if updates.numel() != 1 or updates.is_floating_point() or int(updates) < 0:
            raise UserError(
                "critic.safetensors of the checkpoint has no count of updates: it is damaged"
            )
        self.optimizer.load_state(moments, int(updates))
        with torch.no_grad():
            for name, master in masters.items():
                master.copy_(saved[name])
        self.model.requantize()

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Return the value before each trained token, float32 [N], differentiable."""
        return self.model.values(
            torch.from_numpy(batch.token_ids),
            torch.from_numpy(batch.cu_seqlens),
            torch.from_numpy(targets(batch) - 1),
            self._checkpoint_layers,
            Stems.of(batch),
        )


def value_metrics(values: Sequence[np.ndarray], returns: Sequence[np.ndarray]) -> dict[str, float]:
    """Return critic/{value_mean, return_mean, explained_variance} of float32 [n] per sample."""
    value_N, return_N = np.concatenate(values), np.concatenate(returns)
    return {
        "critic/value_mean": float(value_N.mean(dtype=np.float64)),
        "critic/return_mean": float(return_N.mean(dtype=np.float64)),
        "critic/explained_variance": explained_variance(value_N, return_N),
    }


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """Return 1 - var(returns - values) / var(returns), or 0 if all returns are equal.

    A perfect critic has 1; one that gives every token the same value has 0.
    """
    variance = float(np.var(returns, dtype=np.float64))
    if variance == 0:
        return 0.0
    return 1.0 - float(np.var(returns - values, dtype=np.float64)) / variance
