"""Extras: parts of training that join a trainer's steps without being named in its main line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl.models.model import Model
    from jetrl.training.micro_batches import Minibatch
    from jetrl.training.objectives import Objective
    from jetrl.training.update import Accumulated
    from jetrl.types import Batch

Metrics = Mapping[str, float]


class Extra:
    """A part of training with the points at which `Trainer.step` calls it, in their order.

    Each point does nothing unless an extra defines it.
    """

    def begin(self, version: int, minibatches: Sequence[Minibatch]) -> None:
        """Begin the step of a policy's version, before its first forward."""

    def observer(self, batch: Batch) -> Callable[[Tensor], None] | None:
        """Return what is to see the hidden states [N, D] of a batch's N trained tokens, if any."""
        return None

    def objective(self, objective: Objective) -> Objective:
        """Return the objective of the next micro-batch, given the run's."""
        return objective

    def after_forward(self) -> Metrics:
        """Work after the first minibatch's forwards and backwards, before any weight changes."""
        return {}

    def before_last(self, accumulated: Accumulated[Minibatch]) -> Metrics:
        """Work before the step's last update is applied, with its forwards and backwards."""
        return {}

    def after_update(self, index: int, minibatch: Minibatch) -> None:
        """Work after an update that was applied."""

    def after_updates(self) -> Metrics:
        """Work after the step's last update."""
        return {}

    def models(self) -> list[Model]:
        """Return the models that this extra trains."""
        return []

    def equal_tensors(self) -> dict[str, Tensor]:
        """Return other tensors, by name, that are equal on every rank."""
        return {}
