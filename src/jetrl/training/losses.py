"""Losses: pure functions of log-probs. N is the number of trained tokens of a micro-batch.

Each divides by the number of trained tokens of the whole update, not of the micro-batch: the losses
(and gradients, and metrics) of the micro-batches of an update are added, and how the update was
split into micro-batches does not matter beyond the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Loss:
    """loss: float32 scalar, differentiable. metrics: float64 scalars without gradient, by their
    full names. Both are shares of the update's mean: add them over its micro-batches."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


def grpo_loss(
    trainer_logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    num_update_tokens: int,
    clip_low: float,
    clip_high: float,
    ref_logprobs: torch.Tensor | None = None,
    kl_weight: float = 0.0,
) -> Loss:
    """Clipped policy gradient, mean over the tokens of the update (Shao et al. 2024, equation 3;
    token-level mean and separate clips: Yu et al. 2025, "DAPO", equation 8).

    For each token, ratio = exp(trainer - behavior), and the loss is
    -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) + kl_weight * KL, with the
    estimate k3 = exp(ref - trainer) - (ref - trainer) - 1 of the KL to the reference.

    Args:
        trainer_logprobs: float32 [N], differentiable.
        behavior_logprobs: float32 [N], of the policy that the samples came from (the rollout's, or
            the trainer's own before the step's first update). No gradient goes through it.
        advantages: float32 [N].
        num_update_tokens: trained tokens of the whole update.
        clip_low, clip_high: 0.2 and 0.2 keep the ratio in [0.8, 1.2].
        ref_logprobs: float32 [N] of the frozen reference, or None.
        kl_weight: weight of the KL; 0 with a reference only measures it.

    Returns:
        Loss with metrics policy/clip_fraction (tokens whose gradient the clip removed) and, with a
        reference, policy/kl_ref (mean k3, nats a token).
    """
    ratio = torch.exp(trainer_logprobs - behavior_logprobs.detach())
    clipped = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    token_loss = -torch.minimum(ratio * advantages, clipped * advantages)
    too_high = (ratio > 1.0 + clip_high) & (advantages > 0)
    too_low = (ratio < 1.0 - clip_low) & (advantages < 0)
    metrics = {"policy/clip_fraction": (too_high | too_low).double().sum() / num_update_tokens}
    if ref_logprobs is not None:
        kl = k3(trainer_logprobs, ref_logprobs.detach())
        metrics["policy/kl_ref"] = kl.detach().double().sum() / num_update_tokens
        if kl_weight:
            token_loss = token_loss + kl_weight * kl
    return Loss(token_loss.sum() / num_update_tokens, metrics)


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Estimate of KL(policy || reference) for tokens drawn from the policy: exp(d) - d - 1 with
    d = reference - policy. Never negative, unbiased (Schulman 2020, "Approximating KL divergence").
    float32 [N] in and out."""
    difference = ref_logprobs - logprobs
    return torch.expm1(difference) - difference


def cross_entropy(trainer_logprobs: torch.Tensor, num_update_tokens: int) -> torch.Tensor:
    """Share of the mean negative log-likelihood of an update's tokens: float32 scalar."""
    return -trainer_logprobs.sum() / num_update_tokens
