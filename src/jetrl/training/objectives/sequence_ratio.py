"""The clipped ratio of whole sequences: GSPO."""

from __future__ import annotations

import torch

from jetrl.training.objectives.clipped_ratio import clip_ratio
from jetrl.training.objectives.tokens import TokenLoss, Tokens


def sequence_ratio(tokens: Tokens, clip: float, clip_high: float) -> TokenLoss:
    """-min(s A, clip(s, 1 - clip, 1 + clip_high) A), s = exp(mean over the sequence of trainer -
    behavior): the same at every token of a sequence (Zheng et al. 2025, "GSPO", eq. 5 to 7).

    Where the tokens of a sequence share one advantage, the mean over them is GSPO, value and
    gradient. The clips are of another order than a token ratio's: 3e-4 and 4e-4 in the paper.
    """
    ratio = torch.exp(tokens.sequence_mean(tokens.log_ratio))
    return clip_ratio(ratio, tokens.advantages, clip, clip_high)
