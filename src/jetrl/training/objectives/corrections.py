"""Corrections of a flow whose sampler is not its trainer: importance weights, bounded.

w = trainer / sampler for the same token and the same weights of the model, before the step's first
update; 1 everywhere when the flow is exact. The token's loss is multiplied by the bounded weight.
At a level the log-ratios of a sequence's tokens are added (`sequence`), averaged (`geometric`), or
kept (`token`).

    tis            min(w, high)                        truncated: biased, of bounded variance
    mis            w where low <= w <= high, else 0     masked
    icepop         mis of tokens, with wide bounds
    sequence_mask  1 where low <= w <= high, else 0     drops sequences by their geometric mean

Masked tokens stay in the mean's denominator. Sources and default bounds are in
`jetrl.settings.algorithms`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jetrl.settings import AlgorithmSettings
from jetrl.settings.algorithms import CORRECTIONS, Level
from jetrl.training.objectives.tokens import Tokens, bounded_exp


@dataclass(frozen=True)
class CorrectionWeights:
    """The bounded importance weights of N tokens.

    Attributes:
        weights: float32 [N].
        touched: bool [N], the weights that the bounds changed.
        ratio: float32 [N], the weights before the bounds.
    """

    weights: torch.Tensor
    touched: torch.Tensor
    ratio: torch.Tensor


@dataclass(frozen=True)
class Correction:
    """A correction with its level and bounds.

    Attributes:
        name: One of `jetrl.settings.algorithms.CORRECTIONS`.
        level: Whether a ratio is that of a token, of a sequence or a sequence's geometric mean.
        low: The lower bound; 0 for a correction that has none.
    """

    name: str
    level: Level
    low: float
    high: float

    @classmethod
    def from_settings(cls, settings: AlgorithmSettings) -> Correction | None:
        """Return the correction that the settings ask for; None for none."""
        if settings.correction == "none":
            return None
        bounds = CORRECTIONS[settings.correction]
        return cls(
            settings.correction,
            settings.correction_level or bounds.levels[0],
            settings.correction_low or bounds.low or 0.0,
            settings.correction_high or bounds.high,
        )

    def __call__(self, tokens: Tokens, rollout_logprobs: torch.Tensor) -> CorrectionWeights:
        log_ratio = tokens.behavior_logprobs.detach() - rollout_logprobs
        if self.level == "sequence":
            log_ratio = tokens.sequence_sum(log_ratio)
        elif self.level == "geometric":
            log_ratio = tokens.sequence_mean(log_ratio)
        ratio = bounded_exp(log_ratio)
        if self.name == "tis":
            weights = torch.clamp(ratio, max=self.high)
            return CorrectionWeights(weights, ratio > self.high, ratio)
        inside = (ratio >= self.low) & (ratio <= self.high)
        kept = torch.ones_like(ratio) if self.name == "sequence_mask" else ratio
        return CorrectionWeights(torch.where(inside, kept, 0.0), ~inside, ratio)
