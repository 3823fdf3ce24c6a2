"""Losses of supervised training, the critic and reward models, as pure functions.

Every loss is a share of its update's, so losses and gradients of its micro-batches add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class MicroBatchLoss:
    """The loss of one micro-batch and its measurements.

    Attributes:
        loss: float32 scalar, differentiable.
        metrics: float64 scalars by metric name: shares of the update's means, to be added.
        peaks: float64 scalars by metric name, of which the update's largest counts.
        outputs: The model's outputs, without gradient, if the trainer looks at them later.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    peaks: dict[str, Tensor] = field(default_factory=dict)
    outputs: Tensor | None = None


def cross_entropy(trainer_logprobs: Tensor, num_update_tokens: int) -> Tensor:
    """Return the share of an update's mean negative log-likelihood of log-probs [N]."""
    return -trainer_logprobs.sum() / num_update_tokens


class ValueLoss(NamedTuple):
    """A critic's loss, and the share of tokens whose clipped term was the larger one (float64)."""

    loss: Tensor
    clip_fraction: Tensor


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    num_update_tokens: int,
    clip: float,
) -> ValueLoss:
    """Return 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), mean over tokens.

    As in OpenAI's PPO and TRL.

    Args:
        values: float32 [N], V, differentiable.
        old_values: float32 [N], V_old, the values before the training step.
        returns: float32 [N], R.
        clip: The limit of a value's move before the clipped term counts; 0 drops that term.
    """
    squares = (values - returns).square()
    clipped = torch.zeros_like(values, dtype=torch.bool)
    if clip:
        clipped_values = torch.clamp(values, old_values - clip, old_values + clip)
        clipped_squares = (clipped_values - returns).square()
        clipped = clipped_squares > squares
        squares = torch.maximum(squares, clipped_squares)
    return ValueLoss(
        0.5 * squares.sum() / num_update_tokens, clipped.double().sum() / num_update_tokens
    )


def preference_loss(better: Tensor, worse: Tensor, num_pairs: int) -> Tensor:
    """Return -log sigmoid(better - worse) of scores float32 [P]: a share of the update's mean.

    The Bradley-Terry model (Bradley and Terry 1952; Ouyang et al. 2022, "InstructGPT", eq. 1).
    """
    return -torch.nn.functional.logsigmoid(better - worse).sum() / num_pairs
