"""The clipped probability ratio of PPO, token by token."""

from __future__ import annotations

import torch

from jetrl.training.objectives.tokens import TokenLoss, Tokens


def clipped_ratio(tokens: Tokens, clip: float, clip_high: float) -> TokenLoss:
    """-min(ratio A, clip(ratio, 1 - clip, 1 + clip_high) A), ratio = exp(trainer - behavior).

    Schulman et al. 2017, "PPO", eq. 7; two clips: Yu et al. 2025, "DAPO", eq. 10. Also GRPO,
    Dr. GRPO and REINFORCE++. clip = clip_high = 0.2 keeps the ratio in [0.8, 1.2].
    """
    ratio = torch.exp(tokens.log_ratio)
    return clip_ratio(ratio, tokens.advantages, clip, clip_high)


def clip_ratio(
    ratio: torch.Tensor, advantages: torch.Tensor, clip: float, clip_high: float
) -> TokenLoss:
    """The pessimistic of the plain and the clipped surrogate, for any ratio float32 [N]."""
    held = torch.clamp(ratio, 1.0 - clip, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, held * advantages)
    too_high = (ratio > 1.0 + clip_high) & (advantages > 0)
    too_low = (ratio < 1.0 - clip) & (advantages < 0)
    return TokenLoss(loss, too_high | too_low)
