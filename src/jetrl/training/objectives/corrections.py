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
from jetrl.training.objectives.tokens import Tokens


@dataclass(frozen=True)
class Weights:
    """weights: float32 [N]. touched: bool [N], those that the bounds changed. ratio: float32 [N],
    before the bounds."""

    weights: torch.Tensor
    touched: torch.Tensor
    ratio: torch.Tensor


@dataclass(frozen=True)
class Correction:
    """A correction with its level and bounds; low is 0 where it has none."""

    name: str
    level: Level
    low: float
    high: float

    @classmethod
    def from_settings(cls, settings: AlgorithmSettings) -> Correction | None:
        """The one that the settings ask for; None for none."""
        if settings.correction == "none":
            return None
        bounds = CORRECTIONS[settings.correction]
        return cls(
            settings.correction,
            settings.correction_level or bounds.levels[0],
            settings.correction_low or bounds.low or 0.0,
            settings.correction_high or bounds.high,
        )

    def __call__(self, tokens: Tokens, rollout_logprobs: torch.Tensor) -> Weights:
        """The weights of N tokens. rollout_logprobs: float32 [N], the sampler's;
        tokens.behavior_logprobs are the trainer's own before the step's first update."""
        log_ratio = tokens.behavior_logprobs.detach() - rollout_logprobs
        if self.level == "sequence":
            log_ratio = tokens.sequence_sum(log_ratio)
        elif self.level == "geometric":
            log_ratio = tokens.sequence_mean(log_ratio)
        ratio = torch.exp(log_ratio)
        if self.name == "tis":
            weights = torch.clamp(ratio, max=self.high)
            return Weights(weights, ratio > self.high, ratio)
        inside = (ratio >= self.low) & (ratio <= self.high)
        kept = torch.ones_like(ratio) if self.name == "sequence_mask" else ratio
        return Weights(torch.where(inside, kept, 0.0), ~inside, ratio)
