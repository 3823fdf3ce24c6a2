"""Routers in training: a load-balancing loss, loads of experts, and routes that differ.

Metrics of a micro-batch are weighted by its trained tokens and cover all tokens that its forward
computes. Under an exact plan sampler and trainer route alike, because their hidden states and
logits have the same bits, which are compared in every step. Under other plans, the sampler's routes
are computed again: its forward of the same tokens, without gradient, before any weight changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.kernels.routing import balance_loss, router_entropy, row_shares
from jetrl.models.experts import Routes
from jetrl.models.experts_shape import ExpertsShape
from jetrl.models.families import ModelConfig
from jetrl.settings.sections import TrainSettings
from jetrl.training.loss_math import divided, loss_sum, total
from jetrl.training.micro_batches import MicroBatchLoss


def check_balance(config: ModelConfig, weight: float) -> None:
    """Raise a UserError if train.router_aux_loss is set for a model without experts."""
    if weight and not any(isinstance(layer.block, ExpertsShape) for layer in config.layers):
        raise UserError(
            f"train.router_aux_loss = {weight}: {config.architecture} has no experts to balance; "
            "leave it out"
        )


def with_routes(
    loss: MicroBatchLoss,
    routes: Sequence[Routes],
    sampled: Sequence[Routes],
    *,
    share: float,
    train: TrainSettings,
) -> MicroBatchLoss:
    """Return a micro-batch's loss with the load-balancing loss and the metrics of its routes.

    Args:
        routes: Those of the forward with gradients, by layer.
        sampled: Those of the sampler's forward of the same tokens; empty: they are not compared.
        share: The micro-batch's trained tokens as a share of the update's.
    """
    metrics, highest = _measured(routes, share)
    total_loss = loss.loss
    if train.router_aux_loss:
        # The gradient reaches routers only through the scores of all experts, not through choices.
        losses = [balance_loss(layer.logits, layer.chosen, layer.rule) for layer in routes]
        balance = divided(loss_sum(torch.stack(losses)), len(losses))
        metrics["experts/balance_loss"] = balance.detach().double() * share
        total_loss = total_loss + balance * (train.router_aux_loss * share)
    if sampled:
        metrics["experts/routes_different"] = share_of_other_routes(routes, sampled) * share
    peaks = {**loss.peaks, "experts/load_max": highest}
    return replace(loss, loss=total_loss, metrics={**loss.metrics, **metrics}, peaks=peaks)


@torch.no_grad()
def _measured(routes: Sequence[Routes], share: float) -> tuple[dict[str, Tensor], Tensor]:
    """Return metrics to be summed, times `share`, and the highest load.

    A load is an expert's rows relative to the mean of its layer.
    """
    highest, entropies = [], []
    for layer in routes:
        num_experts = layer.logits.shape[1]
        # The busiest expert, relative to a balanced layer.
        highest.append(row_shares(layer.chosen, num_experts).amax() * num_experts)
        entropy = router_entropy(layer.logits, layer.rule)
        entropies.append(divided(total(entropy), len(entropy)).float())
    loads, count = torch.stack(highest), len(highest)
    # Layers count alike; micro-batches by their trained tokens.
    means = {
        "experts/load": divided(total(loads), count) * share,
        "experts/router_entropy": divided(total(torch.stack(entropies)), count) * share,
    }
    return means, loads.double().amax()


@torch.no_grad()
def share_of_other_routes(routes: Sequence[Routes], others: Sequence[Routes]) -> Tensor:
    """Return the share of slots whose expert the other side did not choose, a float64 scalar."""
    # As sets: the order of slots changes only the rounding of sums.
    differ = [
        (mine.chosen[:, :, None] != theirs.chosen[:, None, :]).all(-1).flatten()
        for mine, theirs in zip(routes, others, strict=True)
    ]
    slots = torch.cat(differ)
    return divided(slots.double().sum(), len(slots))
