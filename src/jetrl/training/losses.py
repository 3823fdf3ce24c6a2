"""Losses of supervised training: pure functions of log-probs and scores. Those of reinforcement
learning are in objectives/."""

from __future__ import annotations

import torch


def cross_entropy(trainer_logprobs: torch.Tensor, num_update_tokens: int) -> torch.Tensor:
    """Share of the mean negative log-likelihood of an update's tokens: float32 scalar. The tokens
    are those of the whole update, so that the losses of its micro-batches add up."""
    return -trainer_logprobs.sum() / num_update_tokens
