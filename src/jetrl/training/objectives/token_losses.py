"""The built-in losses: what each trained token contributes to the loss of the policy.

A loss is a frozen record whose fields are the settings that it reads; it is called with `Tokens`.

    clipped_ratio    the clipped probability ratio, token by token        PPO, GRPO, DAPO, ...
    sequence_ratio   the clipped ratio of whole sequences                 GSPO
    detached_ratio   the log-likelihood, weighted by a capped ratio       CISPO
    ratio            the plain ratio                                      REINFORCE, RLOO
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from jetrl.training.objectives.tokens import TokenLoss, Tokens, bounded_exp


@dataclass(frozen=True)
class ClippedRatio:
    """Loss = -min(ratio A, clip(ratio, 1 - clip, 1 + clip_high) A) of each token.

    The ratio is exp(trainer_logprobs - behavior_logprobs). Schulman et al. 2017, "PPO", eq. 7; two
    clips: Yu et al. 2025, "DAPO", eq. 10. Also GRPO, Dr. GRPO and REINFORCE++. With
    clip = clip_high = 0.2 the ratio is kept in [0.8, 1.2].

    With a dual clip c the loss of a token with a negative advantage is at most -c A, however large
    its ratio (Ye et al. 2020, arXiv 1912.09729, eq. 5).

    Attributes:
        clip: How far below 1 a ratio may be.
        clip_high: How far above 1 a ratio may be.
        dual_clip: The ratio c up to which a token with a negative advantage counts; None for none.
    """

    clip: float
    clip_high: float
    dual_clip: float | None = None

    def __call__(self, tokens: Tokens) -> TokenLoss:
        ratio, advantages = bounded_exp(tokens.log_ratio), tokens.advantages
        clipped = _clipped(ratio, advantages, self.clip, self.clip_high)
        if self.dual_clip is None:
            return clipped
        over = (advantages < 0) & (ratio > self.dual_clip)
        loss = torch.where(over, -self.dual_clip * advantages, clipped.loss)
        return TokenLoss(loss, clipped.clipped | over)


@dataclass(frozen=True)
class SequenceRatio:
    """Loss = -min(s A, clip(s, 1 - clip, 1 + clip_high) A) of each token.

    s = exp(mean log-ratio of the sequence) is the same at all tokens of a sequence (Zheng et al.
    2025, "GSPO", eq. 5 to 7). Where the tokens of a sequence share one advantage, the mean over
    them is GSPO, value and gradient. The clips are of another order than a
    token ratio's: 3e-4 and 4e-4 in the paper.

    Attributes:
        clip: How far below 1 a ratio may be.
        clip_high: How far above 1 a ratio may be.
    """

    clip: float
    clip_high: float

    def __call__(self, tokens: Tokens) -> TokenLoss:
        ratio = bounded_exp(tokens.sequence_mean(tokens.log_ratio))
        return _clipped(ratio, tokens.advantages, self.clip, self.clip_high)


@dataclass(frozen=True)
class DetachedRatio:
    """Loss = -sg(min(ratio, 1 + clip_high)) A log p of each token.

    MiniMax 2025, "MiniMax-M1", eq. 4 and 5. The ratio only weighs, so that no token loses its
    gradient. There is no lower bound, as in the paper's experiments. `TokenLoss.clipped` are the
    tokens whose weight was cut.

    Attributes:
        clip_high: How far above 1 a ratio may be.
    """

    clip_high: float

    def __call__(self, tokens: Tokens) -> TokenLoss:
        ratio = bounded_exp(tokens.log_ratio.detach())
        weight = torch.clamp(ratio, max=1.0 + self.clip_high)
        return TokenLoss(-weight * tokens.advantages * tokens.trainer_logprobs, ratio > weight)


@dataclass(frozen=True)
class Ratio:
    """Loss = -ratio A of each token, with the plain probability ratio.

    At the first update of a step the ratio is 1 and the gradient is REINFORCE's, -A grad log p
    (Williams 1992; Ahmadian et al. 2024, "RLOO"); at later ones the ratio corrects for the updates
    before, token by token.
    """

    def __call__(self, tokens: Tokens) -> TokenLoss:
        loss = -bounded_exp(tokens.log_ratio) * tokens.advantages
        return TokenLoss(loss, torch.zeros_like(loss, dtype=torch.bool))


LOSSES: dict[str, Callable[..., Callable[[Tokens], TokenLoss]]] = {
    "clipped_ratio": ClippedRatio,
    "sequence_ratio": SequenceRatio,
    "detached_ratio": DetachedRatio,
    "ratio": Ratio,
}


def _clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, clip: float, clip_high: float
) -> TokenLoss:
    """Return the pessimistic one of the plain and the clipped surrogate, for ratios float32 [N]."""
    held = torch.clamp(ratio, 1.0 - clip, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, held * advantages)
    too_high = (ratio > 1.0 + clip_high) & (advantages > 0)
    too_low = (ratio < 1.0 - clip) & (advantages < 0)
    return TokenLoss(loss, too_high | too_low)
