"""The critic of PPO: a scalar model that learns the return to be expected before each token.

It reads the policy's packed batches under the policy's precision plan, with masters, optimizer and
learning rate of its own. What it knows goes into checkpoints through `state_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from jetrl.errors import UserError
from jetrl.memory.out_of_memory import explained
from jetrl.models.scalar_model import ScalarModel
from jetrl.settings.loading import Settings
from jetrl.training.guard import Guard, NonFiniteUpdate
from jetrl.training.losses import value_loss
from jetrl.training.micro_batches import MicroBatch
from jetrl.training.optimizer import ADVICE, Optimizer
from jetrl.training.packing import targets
from jetrl.types import Batch

LR = "critic.lr"
_WATCHED = ("critic/loss", "critic/grad_norm")


class Critic:
    """A value model and its optimizer.

    Args:
        model: its masters are updated in place and requantized after every update.
        settings: `critic`, `train`, loop.steps.
        guard: refuses updates that are not finite; the run's, or by default its own.
    """

    def __init__(self, model: ScalarModel, settings: Settings, guard: Guard | None = None) -> None:
        self.model = model
        self.guard = guard or Guard(settings.train.on_nonfinite, LR)
        self._clip = settings.critic.clip
        self._checkpoint_layers = settings.train.activation_checkpointing
        self.optimizer = Optimizer(
            model.named_masters(),
            settings.train.model_copy(update={"lr": settings.critic.lr}),
            total_updates=settings.loop.steps * settings.train.updates_per_step,
        )

    @torch.no_grad()
    def values(self, batch: Batch) -> torch.Tensor:
        """The return expected before each of the N trained tokens: float32 [N]."""
        return self._forward(batch)

    def update(self, index: int, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """One optimizer update on the micro-batches of one update of the policy, by their values
        and returns. index: its number in the step, from 0.

        The policy's update is made by then, and stays: it depends on the values of before the step
        alone, and was finite itself.

        Returns:
            critic/loss (before the update), critic/clip_fraction: means over tokens;
            critic/grad_norm, critic/lr. Nothing of an update that was skipped.

        Raises:
            NonFiniteError: the loss or gradient is not finite, and train.on_nonfinite is "stop" or
                too many were in a row; the critic was not changed.
            OutOfMemoryStop: the optimizer has no room. A plain error of memory comes from forward
                and backward alone, before anything changed: the update can be begun anew then.
        """
        total_norm, metrics = self._accumulate(micro_batches)
        watched = {name: metrics[name] for name in _WATCHED}
        if not self.guard.passes(watched):
            again = partial(self._accumulate, micro_batches)
            refused = NonFiniteUpdate.of(
                index, self.model, self.optimizer, watched, again, micro_batches
            )
            self.guard.refuse(refused)
            return {}
        with explained("the critic's optimizer", ADVICE):
            self.optimizer.apply(total_norm)
            self.model.requantize()
        return metrics

    def _accumulate(
        self, micro_batches: Sequence[MicroBatch]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Forward and backward of an update: the gradient norm, and the metrics."""
        num_tokens = sum(int(micro.batch.loss_mask.sum()) for micro in micro_batches)
        self.optimizer.zero_grad()
        # Read once, when all micro-batches are done: the host does not wait for each.
        sums = torch.zeros(2, dtype=torch.float64, device=self.model.device)
        for micro in micro_batches:
            assert micro.values is not None
            assert micro.returns is not None, "the algorithm gives a critic no returns"
            device = self.model.device
            found = value_loss(
                self._forward(micro.batch),
                micro.values.to(device),
                micro.returns.to(device),
                num_tokens,
                self._clip,
            )
            found.loss.backward()
            sums += torch.stack([found.loss.detach().double(), found.clip_fraction.double()])
        total_norm = self.optimizer.gradient_norm()
        loss, clipped, norm = torch.cat([sums, total_norm.double()[None]]).tolist()
        return total_norm, {
            "critic/loss": loss,
            "critic/clip_fraction": clipped,
            "critic/lr": self.optimizer.lr,
            "critic/grad_norm": norm,
        }

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Masters, moments and the number of updates: the live tensors, not copies."""
        masters = {f"master.{n}": p.detach() for n, p in self.model.named_masters().items()}
        moments = {f"adamw.{n}": t for n, t in self.optimizer.state_tensors().items()}
        return masters | moments | {"updates": torch.tensor(self.optimizer.num_updates)}

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes over what `state_tensors` gave, bit for bit.

        Raises:
            UserError: tensors of another model; nothing was changed then.
        """
        masters = self.model.named_masters()
        saved = {n.removeprefix("master."): t for n, t in tensors.items() if n.startswith("master")}
        if {n: t.shape for n, t in saved.items()} != {n: p.shape for n, p in masters.items()}:
            raise UserError(
                "the checkpoint's critic is of another model: resume with the settings "
                "it was made with"
            )
        moments = {n.removeprefix("adamw."): t for n, t in tensors.items() if n.startswith("adamw")}
        self.optimizer.load_state(moments, int(tensors["updates"]))
        with torch.no_grad():
            for name, master in masters.items():
                master.copy_(saved[name])
        self.model.requantize()

    def _forward(self, batch: Batch) -> torch.Tensor:
        return self.model.values(
            torch.from_numpy(batch.token_ids),
            torch.from_numpy(batch.cu_seqlens),
            torch.from_numpy(targets(batch) - 1),
            self._checkpoint_layers,
        )


def value_metrics(values: Sequence[np.ndarray], returns: Sequence[np.ndarray]) -> dict[str, float]:
    """critic/{value_mean, return_mean, explained_variance} of a step's tokens, [n] a sample."""
    said, true = np.concatenate(values), np.concatenate(returns)
    return {
        "critic/value_mean": float(said.mean(dtype=np.float64)),
        "critic/return_mean": float(true.mean(dtype=np.float64)),
        "critic/explained_variance": explained_variance(said, true),
    }


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - var(returns - values) / var(returns): 1 for a perfect critic, 0 for one that says the
    same of everything; 0 where all returns are equal."""
    variance = float(np.var(returns, dtype=np.float64))
    if variance == 0:
        return 0.0
    return 1.0 - float(np.var(returns - values, dtype=np.float64)) / variance
