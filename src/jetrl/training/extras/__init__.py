"""Extras: parts of training that join a trainer's steps without being named in its main line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from jetrl.distributed.shards import Shard
from jetrl.errors import UserError
from jetrl.training.optimizer import Optimizer

if TYPE_CHECKING:
    from jetrl.models.model import Model
    from jetrl.training.micro_batches import Minibatch
    from jetrl.training.objectives import Objective
    from jetrl.training.update import Accumulated
    from jetrl.types import Batch


class Extra:
    """A part of training: `Trainer.step` calls these methods, in order; the defaults do nothing.

    Attributes:
        values: A critic's method that returns the expected return before each of a batch's N
            trained tokens, float32 [N], without gradient; None for every other extra.
        calibrates: Whether it sets the clips of the loss.
    """

    values: Callable[[Batch], Tensor] | None = None
    calibrates = False

    def begin(self, version: int, minibatches: Sequence[Minibatch]) -> None:
        """Begin the step of a policy's version, before its first forward."""

    def observer(self, batch: Batch) -> Callable[[Tensor], None] | None:
        """Return a function that gets the hidden states [N, D] of a batch's N trained tokens.

        Only one extra of a trainer may return one.
        """
        return None

    def objective(self, objective: Objective) -> Objective:
        """Return the objective of the next micro-batch, given the run's."""
        return objective

    def after_forward(self) -> Mapping[str, float]:
        """Work after the first minibatch's forwards and backwards, before any weight changes."""
        return {}

    def before_last(self, accumulated: Accumulated) -> Mapping[str, float]:
        """Work before the step's last update is applied, with its forwards and backwards."""
        return {}

    def after_update(self, index: int, minibatch: Minibatch) -> None:
        """Work after an update that was applied."""

    def after_updates(self) -> Mapping[str, float]:
        """Work after the step's last update."""
        return {}

    def models(self) -> list[Model]:
        """Return the models that this extra trains."""
        return []

    def equal_tensors(self) -> dict[str, Tensor]:
        """Return other tensors, by name, that are equal on every rank."""
        return {}


class Learner(Extra):
    """An extra with master weights and an optimizer, which checkpoints keep under `name`."""

    name: str
    masters: Mapping[str, nn.Parameter]
    optimizer: Optimizer

    def state_tensors(self) -> dict[str, Tensor]:
        """Return master weights, moments and the number of updates: the tensors, not copies."""
        masters = {f"master.{n}": p.detach() for n, p in self.masters.items()}
        moments = {f"adamw.{n}": t for n, t in self.optimizer.state_tensors().items()}
        return masters | moments | {"updates": torch.tensor(self.optimizer.num_updates)}

    def shard_of(self, name: str) -> Shard | None:
        """Return how the rows of a state tensor are divided; None if every rank has it whole."""
        kind, _, own_name = name.partition(".")
        if kind == "master":
            return self.optimizer.shards.get(own_name)
        return self.optimizer.shard_of(own_name)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of `state_tensors`, bit for bit; a UserError has changed nothing."""
        # Check everything before anything is changed.
        for name, master in self.masters.items():
            saved = tensors.get(f"master.{name}")
            if saved is None or saved.shape != master.shape:
                raise UserError(
                    f"the checkpoint's {self.name} is of another model, first in {name}: resume "
                    "with the settings it was made with"
                )
        updates = tensors.get("updates", torch.tensor(-1))
        if updates.numel() != 1 or updates.is_floating_point() or int(updates) < 0:
            what = f"{self.name}.safetensors of the checkpoint has no count of updates"
            raise UserError(f"{what}: it is damaged")
        moments = {n.removeprefix("adamw."): tensors[n] for n in tensors if n.startswith("adamw")}
        self.optimizer.load_state(moments, int(updates))
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(tensors[f"master.{name}"])
