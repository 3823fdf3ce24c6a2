"""The log-likelihood weighted by a capped, detached ratio: CISPO."""

from __future__ import annotations

import torch

from jetrl.training.objectives.tokens import TokenLoss, Tokens


def detached_ratio(tokens: Tokens, clip_high: float) -> TokenLoss:
    """-sg(min(ratio, 1 + clip_high)) A log p (MiniMax 2025, "MiniMax-M1", eq. 4 and 5): the ratio
    only weighs, so that no token loses its gradient. There is no lower bound, as in the paper's
    experiments. `clipped` are the tokens whose weight was cut."""
    ratio = torch.exp(tokens.log_ratio.detach())
    weight = torch.clamp(ratio, max=1.0 + clip_high)
    return TokenLoss(-weight * tokens.advantages * tokens.trainer_logprobs, ratio > weight)
