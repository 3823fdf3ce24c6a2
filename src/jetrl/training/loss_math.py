"""Functions and sums of the losses, differentiable, on float32 values per token.

On a CPU they are those of `precision.exact`: IEEE operations in a written order and exact sums, so
a loss and its gradient have the same bits on every machine. On a GPU they are torch's.

    exp(x)               gradient g * exp(x)
    expm1(x)             gradient g * (expm1(x) + 1)
    log_sigmoid(x)       gradient g * (1 - sigmoid(x)), as sigmoid(-x)
    total(x)             exact sum, float64; gradient g at each value
    loss_sum(x)          total(x), rounded once to float32
    sequence_sum(x)      float32(exact sum over the sequence), at each of its tokens
    sequence_mean(x)     float32(exact sum over the sequence) / length, at each of its tokens

A sum over a sequence is at each of its tokens, so the gradient of `sequence_sum` is
`sequence_sum` of the gradients, and that of `sequence_mean` is their `sequence_mean`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl.precision import exact
from jetrl.precision.backend import has_defined_bits


def exp(x: Tensor) -> Tensor:
    """Return exp(x), float32."""
    return _Exp.apply(x, False) if has_defined_bits(x) else torch.exp(x)


def expm1(x: Tensor) -> Tensor:
    """Return exp(x) - 1, float32."""
    return _Exp.apply(x, True) if has_defined_bits(x) else torch.expm1(x)


def log_sigmoid(x: Tensor) -> Tensor:
    """Return log(1 / (1 + exp(-x))), float32."""
    return _LogSigmoid.apply(x) if has_defined_bits(x) else torch.nn.functional.logsigmoid(x)


def total(x: Tensor) -> Tensor:
    """Return the sum of x [N] as a float64 scalar."""
    return exact.exact_sum(x) if has_defined_bits(x) else x.double().sum()


def divided(x: Tensor, count: int) -> Tensor:
    """Return x / count, rounded once."""
    # On a GPU torch multiplies by the rounded inverse of a Python number.
    return x / torch.full_like(x, count) if has_defined_bits(x) else x / count


def loss_sum(x: Tensor) -> Tensor:
    """Return the sum of float32 x [N] as a float32 scalar."""
    return total(x).float() if has_defined_bits(x) else x.sum()


def sequence_sum(x: Tensor, lengths: Tensor) -> Tensor:
    """Return, at each token, the sum of float32 x [N] over its sequence: [N].

    `lengths`, int64 [S], are the tokens of each sequence.
    """
    if has_defined_bits(x):
        return _OfSequences.apply(x, lengths, False)
    return _spread(torch.segment_reduce(x, "sum", lengths=lengths), lengths, len(x))


def sequence_mean(x: Tensor, lengths: Tensor) -> Tensor:
    """Return, at each token, the mean of float32 x [N] over its sequence: [N]."""
    if has_defined_bits(x):
        return _OfSequences.apply(x, lengths, True)
    sums = torch.segment_reduce(x, "sum", lengths=lengths)
    return _spread(sums / lengths, lengths, len(x))


def _spread(per_sequence: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    return per_sequence.repeat_interleave(lengths, output_size=num_tokens)


class _Exp(torch.autograd.Function):
    """exp(x), or expm1(x); the gradient's factor is exp(x), or expm1(x) + 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, minus_one: bool) -> Tensor:
        y = exact.expm1(x) if minus_one else exact.exp(x)
        ctx.save_for_backward(y + 1.0 if minus_one else y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return grads[0] * factor, None


class _LogSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return exact.log_sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * exact.sigmoid(-x)


class _OfSequences(torch.autograd.Function):
    """Sums or means over sequences, at each token: a symmetric matrix, its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Tensor, mean: bool) -> Tensor:
        ctx.save_for_backward(lengths)
        ctx.mean = mean
        return _of_sequences(x, lengths, mean)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (lengths,) = ctx.saved_tensors
        return _of_sequences(grads[0], lengths, ctx.mean), None, None


def _of_sequences(x: Tensor, lengths: Tensor, mean: bool) -> Tensor:
    # The lengths are on the CPU too, so the host does not wait.
    sums = [exact.exact_sum(part) for part in x.split(lengths.tolist())]
    # Rounded to float32 before the division.
    per_sequence = torch.stack(sums).float() if sums else x.new_zeros(0)
    if mean:
        per_sequence = per_sequence / lengths
    return _spread(per_sequence, lengths, len(x))
