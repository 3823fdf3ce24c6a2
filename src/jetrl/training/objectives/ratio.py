"""The probability ratio as it is: REINFORCE, and RLOO."""

from __future__ import annotations

import torch

from jetrl.training.objectives.tokens import TokenLoss, Tokens


def ratio(tokens: Tokens) -> TokenLoss:
    """-ratio A. At the first update of a step the ratio is 1 and the gradient is REINFORCE's,
    -A grad log p (Williams 1992; Ahmadian et al. 2024, "RLOO"); at later ones it corrects
    for the updates before, token by token."""
    loss = -torch.exp(tokens.log_ratio) * tokens.advantages
    return TokenLoss(loss, torch.zeros_like(loss, dtype=torch.bool))
