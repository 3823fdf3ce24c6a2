"""The pieces of an algorithm's loss, pure functions of log-probs.

Token losses, named by algorithm.loss:
    clipped_ratio    PPO's pessimistic clip of token ratios     PPO, GRPO, DAPO, REINFORCE++
    sequence_ratio   the same clip of a sequence's ratio        GSPO
    detached_ratio   log-likelihood, weighted by a capped ratio CISPO
    ratio            the plain ratio                            REINFORCE, RLOO

Aggregations, the weight of a token in the update's loss:
    token_mean     1 / tokens of the update                             DAPO eq. 8
    sequence_mean  1 / (sequences of the update x tokens of its own)    GRPO eq. 3
    sequence_sum   1 / sequences of the update                          a completion is one action
    constant       1 / (sequences of the update x rollout.max_tokens)   Dr. GRPO

Corrections of the mismatch between sampler and trainer, by w = trainer / sampler for the same token
and weights (1 in an exact flow), per token, or from a sequence's summed or mean log-ratio:
    tis            min(w, high)                        truncated: biased, of bounded variance
    mis            w if low <= w <= high, else 0       masked
    icepop         mis of tokens, with wide bounds
    sequence_mask  1 if low <= w <= high, else 0       drops sequences by their geometric mean

Weights are those of the whole update, so the losses of its micro-batches add up. Masked tokens stay
in the mean's denominator. Default bounds and sources are in `jetrl.settings.algorithms`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from jetrl.settings.algorithms import CORRECTIONS, Aggregation, AlgorithmSettings, Level

MAX_LOG_RATIO = 88.72283172607422
"""The largest float32 number whose exponential is finite in float32."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(log_ratio), float32, at most the largest finite number.

    An overflowing ratio would be infinite, and its gradient NaN even if the loss ignores it, as
    behind a clip. No finite result changes, and no gradient of one.
    """
    return torch.exp(torch.clamp(log_ratio, max=MAX_LOG_RATIO))


@dataclass(frozen=True)
class Tokens:
    """The N trained tokens of S sequences, in order.

        Tokens(trainer_logprobs=[-0.5, -1.0, -0.2], behavior_logprobs=[-0.5, -1.1, -0.2],
               advantages=[1, 1, -1], lengths=[2, 1])

    Attributes:
        trainer_logprobs: float32 [N], differentiable.
        behavior_logprobs: float32 [N], of the policy that the samples came from (the sampler's, or
            the trainer's own before the step's first update); no gradient goes through them.
        advantages: float32 [N].
        lengths: int64 [S], trained tokens of each sequence, all positive, summing to N.
    """

    trainer_logprobs: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    lengths: torch.Tensor

    @property
    def log_ratio(self) -> torch.Tensor:
        """Return log (trainer / behavior), float32 [N], differentiable."""
        return self.trainer_logprobs - self.behavior_logprobs.detach()

    def sequence_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return, at each token, the sum of float32 [N] values over its sequence: [N]."""
        return self._spread(torch.segment_reduce(values, "sum", lengths=self.lengths))

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return, at each token, the mean of float32 [N] values over its sequence: [N]."""
        sums = torch.segment_reduce(values, "sum", lengths=self.lengths)
        return self._spread(sums / self.lengths)

    def _spread(self, per_sequence: torch.Tensor) -> torch.Tensor:
        return per_sequence.repeat_interleave(self.lengths, output_size=len(self.trainer_logprobs))


@dataclass(frozen=True)
class TokenLoss:
    """The losses of the N tokens of a micro-batch.

    Attributes:
        loss: float32 [N], each token's contribution before it is weighted; differentiable.
        clipped: bool [N], tokens whose gradient the clip removed or whose weight it cut.
    """

    loss: torch.Tensor
    clipped: torch.Tensor


@dataclass(frozen=True)
class ClippedRatio:
    """Loss = -min(ratio A, clip(ratio, 1 - clip, 1 + clip_high) A) of each token.

    The ratio is exp(trainer_logprobs - behavior_logprobs). Schulman et al. 2017, "PPO", eq. 7; two
    clips: Yu et al. 2025, "DAPO", eq. 10.

    Attributes:
        dual_clip: With a value c, the loss of a token with a negative advantage is at most -c A,
            however large its ratio (Ye et al. 2020, arXiv 1912.09729, eq. 5).
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
    2025, "GSPO", eq. 5 to 7). Clips are much smaller than a token ratio's: 3e-4 and 4e-4 there.
    """

    clip: float
    clip_high: float

    def __call__(self, tokens: Tokens) -> TokenLoss:
        ratio = bounded_exp(tokens.sequence_mean(tokens.log_ratio))
        return _clipped(ratio, tokens.advantages, self.clip, self.clip_high)


@dataclass(frozen=True)
class DetachedRatio:
    """Loss = -sg(min(ratio, 1 + clip_high)) A log p of each token.

    MiniMax 2025, "MiniMax-M1", eq. 4 and 5. The ratio is only a weight, so every token keeps its
    gradient; there is no lower bound, as in the paper's experiments.
    """

    clip_high: float

    def __call__(self, tokens: Tokens) -> TokenLoss:
        ratio = bounded_exp(tokens.log_ratio.detach())
        weight = torch.clamp(ratio, max=1.0 + self.clip_high)
        return TokenLoss(-weight * tokens.advantages * tokens.trainer_logprobs, ratio > weight)


@dataclass(frozen=True)
class Ratio:
    """Loss = -ratio A of each token, with the plain probability ratio.

    At the first update of a step the gradient is REINFORCE's, -A grad log p (Williams 1992;
    Ahmadian et al. 2024, "RLOO"); at later ones the ratio corrects for the updates before.
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


@dataclass(frozen=True)
class UpdateSize:
    """The size of one update, which its token weights depend on."""

    tokens: int
    sequences: int
    max_tokens: int


def token_weights(
    lengths: torch.Tensor,
    size: UpdateSize,
    aggregation: Aggregation,
    num_tokens: int | None = None,
) -> torch.Tensor:
    """Return the weight of each token's loss, float32 [N].

    Args:
        lengths: int64 [S], trained tokens of each sequence of a micro-batch.
        num_tokens: N, the sum of the lengths; without it the host waits for a GPU to add them.
    """
    if aggregation == "sequence_mean":
        weights = (1.0 / (size.sequences * lengths.double())).float()
    else:
        divisor = {
            "token_mean": size.tokens,
            "sequence_sum": size.sequences,
            "constant": size.sequences * size.max_tokens,
        }[aggregation]
        weights = torch.full_like(lengths, 1.0 / divisor, dtype=torch.float32)
    return weights.repeat_interleave(lengths, output_size=num_tokens)


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
    """A correction of `jetrl.settings.algorithms.CORRECTIONS` with its level and bounds.

    Attributes:
        level: Whether a ratio is a token's, a sequence's, or a sequence's geometric mean.
        low: The lower bound; 0 for a correction that has none.
    """

    name: str
    level: Level
    low: float
    high: float

    @classmethod
    def from_settings(cls, settings: AlgorithmSettings) -> Correction | None:
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


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return log p - log ref, which is unbiased, of any sign.

    Its expected gradient is zero, so it belongs into the reward, not into the loss.
    """
    return logprobs - ref_logprobs


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return (log p - log ref)^2 / 2: biased, but its expected gradient is that of the KL."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return exp(d) - d - 1 with d = log ref - log p: unbiased and never negative."""
    difference = ref_logprobs - logprobs
    return torch.expm1(torch.clamp(difference, max=MAX_LOG_RATIO)) - difference


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
