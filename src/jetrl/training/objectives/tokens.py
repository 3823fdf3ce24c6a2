"""The trained tokens of a micro-batch, as a loss sees them, and the losses that it returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_LOG_RATIO = 88.72283172607422
"""The largest float32 number whose exponential is finite in float32."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(log_ratio), float32, at most the largest finite number.

    A ratio that overflowed would be infinite, and its gradient NaN also where the loss ignores it,
    as behind a clip. No finite result changes, and no gradient of one.

    Args:
        log_ratio: float32, of any shape.
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
        """Return the number of each sequence [S] at all of its tokens [N]."""
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
