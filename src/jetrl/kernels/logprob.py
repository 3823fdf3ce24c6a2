"""Log-probs of chosen tokens, and moments of the distribution, from float32 logits.

    z = logits / temperature,  m = max z,  lse = log(sum exp(z - m)),  logp = (z[chosen] - m) - lse

The moments are the mean (the entropy) and the variance of -logp over the vocabulary. Sampler and
trainer both compute log-probs here. The sums are exact (`precision.exact`), so the bits of a row
depend only on that row, and are the same on every machine. Operation by operation, in float32
unless it says float64:

    d     = z - m                              exp and log are those of `precision.exact`
    mass  = exp(d)
    total = sum over V of grid(mass)           float64; grid(x) = rint(x * 2**30) / 2**30
    lse   = log(total)                         float64, rounded to float32 for logp

    f     = max(d, -1e30),  w = mass * f       so that a probability of 0 adds 0
    mean  = sum over V of grid(w) / total      float64
    square = sum over V of grid(w * f) / total float64
    entropy  = log(total) - mean               float64, rounded to float32
    variance = max(square - mean * mean, 0)    float64, rounded to float32

Backward, for the gradient g of a row's log-prob:

    p       = mass / float32(total)
    dlogits = (onehot(chosen) - p) * (g / temperature)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from jetrl.kernels.backend import kernels_of
from jetrl.precision.exact import exp_nonpositive, log_positive

_MASS_GRID = 2.0**30  # exp(z - m) <= 1, so float64 adds 2**23 terms on this grid exactly


class SoftmaxParts(NamedTuple):
    """Softmax of R rows: z - m and exp(z - m), float32 [R, V]; its sum, float64 [R, 1]."""

    shifted: Tensor
    mass: Tensor
    total: Tensor


def _softmax_parts(logits: Tensor, temperature: Tensor) -> SoftmaxParts:
    z = logits / temperature
    shifted = z - z.amax(-1, keepdim=True)
    mass = exp_nonpositive(shifted)
    return SoftmaxParts(shifted, mass, _grid_sum(mass))


def _grid_sum(x: Tensor) -> Tensor:
    """Return the exact sum of float32 x [R, V], |x| <= 1, on the grid: float64 [R, 1]."""
    # On the grid each term is an integer of at most 31 bits, so float64 adds them exactly.
    return (x.double() * _MASS_GRID).round_().sum(-1, keepdim=True) / _MASS_GRID


def log_softmax_parts(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return z - m [R, V], exp(z - m) [R, V] and lse [R, 1], float32, for logits [R, V].

    Args:
        temperature: float32 [R, 1]; a tensor, because torch may turn division by a scalar into
            multiplication by its inverse, which rounds differently.
    """
    shifted, mass, total = _softmax_parts(logits, temperature)
    return shifted, mass, log_positive(total).float()


def chosen_logprobs_ref(
    logits: Tensor, chosen: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log-probs float32 [R] and moments float32 [2, R]; the reference for all kernels."""
    shifted, mass, total = _softmax_parts(logits, temperature)
    lse = log_positive(total)
    logprobs = (shifted.gather(-1, chosen[:, None]) - lse.float()).squeeze(-1)
    # A token of probability 0 has z - m = -inf, and 0 * -inf would be NaN.
    finite = shifted.clamp(min=-1e30)
    weighted = mass * finite  # between -1/e and 0, and weighted * finite is below 0.55
    mean = _grid_sum(weighted) / total
    square = _grid_sum(weighted * finite) / total
    # The variance of z - m equals that of -logp, since lse is the same for all tokens.
    variance = (square - mean * mean).clamp(min=0.0)
    return logprobs, torch.stack(((lse - mean).squeeze(-1), variance.squeeze(-1))).float()


def logits_gradient_ref(
    logits: Tensor, chosen: Tensor, temperature: Tensor, grad: Tensor
) -> Tensor:
    """Return the gradient of logits, float32 [R, V], from that of log-probs, float32 [R]."""
    parts = _softmax_parts(logits, temperature)
    gradient = -(parts.mass / parts.total.float())
    gradient.scatter_add_(-1, chosen[:, None], torch.ones_like(gradient[:, :1]))
    return gradient * (grad[:, None] / temperature)


def exact_logprobs(
    logits: Tensor, chosen: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `chosen_logprobs_ref`, from kernels that have its bits if the device has some.

    The third tensor is what `exact_logits_gradient` reads: max z and total, float32 [2, R].
    """
    if (kernels := kernels_of(logits)) is not None:
        return kernels.exact_logprobs(logits, chosen, temperature)
    nothing = logits.new_empty(2, len(logits))  # the reference computes them again
    return *chosen_logprobs_ref(logits, chosen, temperature), nothing


def exact_logits_gradient(
    logits: Tensor, chosen: Tensor, temperature: Tensor, softmax: Tensor, grad: Tensor
) -> Tensor:
    """Return `logits_gradient_ref`, from kernels that have its bits if the device has some."""
    if (kernels := kernels_of(logits)) is not None:
        return kernels.exact_logits_gradient(logits, chosen, temperature, softmax, grad)
    return logits_gradient_ref(logits, chosen, temperature, grad)


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
        return logits_gradient_ref(logits, chosen, temperature, grads[0]), None, None
