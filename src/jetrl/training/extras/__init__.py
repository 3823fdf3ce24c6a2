"""Extras: optional parts of training that hook into a trainer's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from jetrl.distributed.shards import Shard
from jetrl.errors import UserError
from jetrl.training.optimizer import Optimizer
from jetrl.types import Metrics

if TYPE_CHECKING:
    from jetrl.models.model import Model
    from jetrl.training.micro_batches import Minibatch
    from jetrl.training.objectives import Objective
    from jetrl.training.update import Accumulated
    from jetrl.types import Batch


class Extra:
    """Hooks that `Trainer.step` calls in this order; the defaults do nothing.

    Attributes:
        values: A critic's method that returns the expected return before each of a batch's N
            trained tokens, float32 [N], without gradient; None for every other extra.
        calibrates: True if the extra sets the clip range of the loss.
    """

    values: Callable[[Batch], Tensor] | None = None
    calibrates = False

    def begin(self, version: int, minibatches: Sequence[Minibatch]) -> None:
        """Run before the first forward of a step."""

    def observer(self, batch: Batch) -> Callable[[Tensor], None] | None:
        """Return a callback for the hidden states [N, D] of a batch's N trained tokens, or None.

        At most one extra per trainer may return one.
        """
        return None

    def objective(self, objective: Objective) -> Objective:
        """Return the objective of the next micro-batch, given the run's objective."""
        return objective

    def after_forward(self) -> Metrics:
        """Run after the first minibatch's forward and backward, before any weight changes."""
        return {}

    def before_last(self, accumulated: Accumulated) -> Metrics:
        """Run before the step's last update is applied, after its forward and backward passes."""
        return {}

    def after_update(self, index: int, minibatch: Minibatch) -> None:
        """Run after each applied update."""

    def after_updates(self) -> Metrics:
        """Run after the step's last update."""
        return {}

    def models(self) -> list[Model]:
        """Return the models trained by this extra."""
        return []

    def equal_tensors(self) -> dict[str, Tensor]:
        """Return further tensors, by name, that must be equal on every rank."""
        return {}


class Learner(Extra):
    """An extra with master weights and an optimizer, checkpointed under `name`."""

    name: str
    masters: Mapping[str, nn.Parameter]
    optimizer: Optimizer

    def state_tensors(self) -> dict[str, Tensor]:
        """Return master weights, moments and update count by name; references, not copies."""
        masters = {f"master.{n}": p.detach() for n, p in self.masters.items()}
        moments = {f"adamw.{n}": t for n, t in self.optimizer.state_tensors().items()}
        return masters | moments | {"updates": torch.tensor(self.optimizer.num_updates)}

    def shard_of(self, name: str) -> Shard | None:
        """Return the shard of a state tensor's rows, or None if it is replicated."""
        kind, _, own_name = name.partition(".")
        if kind == "master":
            return self.optimizer.shards.get(own_name)
        return self.optimizer.shard_of(own_name)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the output of `state_tensors` bit for bit; on UserError nothing has changed."""
        # Validate everything before changing anything.
        for name, master in self.masters.items():
            saved = tensors.get(f"master.{name}")
            if saved is None or saved.shape != master.shape:
                raise UserError(
                    f"the checkpoint's {self.name} is of another model, first in {name}: resume "
                    "with the settings it was made with"
                )
        updates = tensors.get("updates", torch.tensor(-1))
        if updates.numel() != 1 or updates.is_floating_point() or int(updates) < 0:
            raise UserError(
                f"{self.name}.safetensors of the checkpoint has no count of updates: it is damaged"
            )
        moments = {n.removeprefix("adamw."): tensors[n] for n in tensors if n.startswith("adamw")}
        self.optimizer.load_state(moments, int(updates))
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(tensors[f"master.{name}"])
