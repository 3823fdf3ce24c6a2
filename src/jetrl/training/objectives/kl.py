"""Estimates of the KL to a reference, for tokens drawn from the policy.

Schulman 2020, "Approximating KL divergence". Each estimate takes and returns float32 [N].
"""

from __future__ import annotations

import torch

from jetrl.training.objectives.tokens import MAX_LOG_RATIO


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return log p - log ref, which is unbiased, of any sign.

    Its expected gradient is zero, so it belongs into the reward, not into the loss.
    """
    return logprobs - ref_logprobs


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return (log p - log ref)^2 / 2, which is biased; its expected gradient is that of the KL."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return exp(d) - d - 1 with d = log ref - log p, which is never negative, and unbiased."""
    difference = ref_logprobs - logprobs
    return torch.expm1(torch.clamp(difference, max=MAX_LOG_RATIO)) - difference


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
