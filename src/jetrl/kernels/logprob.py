"""Log-probs of chosen tokens, and moments of the distribution, from float32 logits.

    z = logits / temperature,  m = max z,  lse = log(sum exp(z - m)),  logp = (z[chosen] - m) - lse

The moments are the mean (the entropy) and the variance of -logp over the vocabulary. Sampler and
trainer both compute log-probs here. The sum is exact (`precision.exact`), so the bits of a row
depend only on that row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.backend import kernels_of
from jetrl.precision.exact import exp_nonpositive, log_positive

_MASS_GRID = 2.0**30  # exp(z - m) <= 1, so float64 adds 2**23 terms on this grid exactly


def log_softmax_parts(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return z - m [R, V], exp(z - m) [R, V] and lse [R, 1], float32, for logits [R, V].

    Args:
        temperature: float32 [R, 1]; a tensor, because torch may turn division by a scalar into
            multiplication by its inverse, which rounds differently.
    """
    z = logits / temperature
    shifted = z - z.amax(-1, keepdim=True)
    mass = exp_nonpositive(shifted)
    # On the grid each term is an integer of at most 31 bits, so float64 adds them exactly.
    total = (mass.double() * _MASS_GRID).round_().sum(-1, keepdim=True) / _MASS_GRID
    return shifted, mass, log_positive(total).float()


def chosen_logprobs_ref(
    logits: Tensor, chosen: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log-probs and moments; the reference for all kernels."""
    shifted, mass, lse = log_softmax_parts(logits, temperature)
    logprobs = (shifted.gather(-1, chosen[:, None]) - lse).squeeze(-1)
    # A token of probability 0 has z - m = -inf, and 0 * -inf would be NaN.
    finite = shifted.clamp(min=-1e30)
    weighted, total = mass * finite, lse.exp()
    mean = weighted.sum(-1, keepdim=True) / total
    square = (weighted * finite).sum(-1, keepdim=True) / total
    # The variance of z - m equals that of -logp, since lse is the same for all tokens.
    variance = (square - mean.square()).clamp(min=0.0)
    return logprobs, torch.stack(((lse - mean).squeeze(-1), variance.squeeze(-1)))


def chosen_logprobs(logits: Tensor, chosen: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs of chosen tokens [R] under softmax(logits / temperature), and moments.

    Returns:
        Log-probs float32 [R], differentiable in the logits; moments float32 [2, R], not
        differentiable: entropy in nats, and variance of -logp in nats^2.
    """
    if (kernels := kernels_of(logits)) is not None:
        return kernels.chosen_logprobs(logits, chosen, temperature)
    per_row = logits.new_full((len(chosen), 1), temperature)
    return _ChosenLogprobs.apply(logits, chosen, per_row)


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, chosen: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprobs, moments = chosen_logprobs_ref(logits, chosen, temperature)
        ctx.save_for_backward(logits, chosen, temperature)
        ctx.mark_non_differentiable(moments)
        return logprobs, moments

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, chosen, temperature = ctx.saved_tensors
        gradient = -torch.softmax(logits / temperature, dim=-1)
        gradient.scatter_add_(-1, chosen[:, None], torch.ones_like(gradient[:, :1]))
        return gradient * (grads[0][:, None] / temperature), None, None
