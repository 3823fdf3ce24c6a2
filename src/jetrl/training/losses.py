"""Losses of supervised training and of the critic: pure functions of log-probs, values and scores.
Those of the policy are in objectives/."""

from __future__ import annotations

from typing import NamedTuple

import torch


def cross_entropy(trainer_logprobs: torch.Tensor, num_update_tokens: int) -> torch.Tensor:
    """Share of the mean negative log-likelihood of an update's tokens: float32 scalar. The tokens
    are those of the whole update, so that the losses of its micro-batches add up."""
    return -trainer_logprobs.sum() / num_update_tokens


class ValueLoss(NamedTuple):
    """loss: float32 scalar, differentiable. clip_fraction: without gradient. Both are shares of the
    update's mean over tokens: add them over its micro-batches."""

    loss: torch.Tensor
    clip_fraction: torch.Tensor


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    num_update_tokens: int,
    clip: float,
) -> ValueLoss:
    """1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), mean over the update's
    tokens, as in OpenAI's PPO and TRL; without the second term for clip = 0. float32 [N]."""
    squares = (values - returns).square()
    clipped = torch.zeros_like(values, dtype=torch.bool)
    if clip:
        held = torch.clamp(values, old_values - clip, old_values + clip)
        held_squares = (held - returns).square()
        clipped = held_squares > squares
        squares = torch.maximum(squares, held_squares)
    return ValueLoss(
        0.5 * squares.sum() / num_update_tokens, clipped.double().sum() / num_update_tokens
    )


def preference_loss(better: torch.Tensor, worse: torch.Tensor, num_pairs: int) -> torch.Tensor:
    """-log sigmoid(score of the better - score of the worse), share of the mean over an update's
    pairs: the Bradley-Terry model (Bradley and Terry 1952; Ouyang et al. 2022, "InstructGPT",
    eq. 1). float32 [P] each."""
    return -torch.nn.functional.logsigmoid(better - worse).sum() / num_pairs
