"""What a loss sees of a micro-batch, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tokens:
    """The N trained tokens of S sequences, in order, and what is known of each.

    trainer_logprobs: float32 [N], differentiable. behavior_logprobs: float32 [N], of the policy
    that the samples came from (the rollout's, or the trainer's own before the step's first update);
    no gradient goes through them. advantages: float32 [N]. lengths: int64 [S], trained tokens of
    each sequence, all positive, summing to N.

        Tokens(trainer_logprobs=[-0.5, -1.0, -0.2], behavior_logprobs=[-0.5, -1.1, -0.2],
               advantages=[1, 1, -1], lengths=[2, 1])
    """

    trainer_logprobs: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    lengths: torch.Tensor

    @property
    def log_ratio(self) -> torch.Tensor:
        """float32 [N]: log (trainer / behavior), differentiable."""
        return self.trainer_logprobs - self.behavior_logprobs.detach()

    def sequence_sum(self, values: torch.Tensor) -> torch.Tensor:
        """float32 [N] -> [N]: the sum over each token's own sequence."""
        return self._spread(torch.segment_reduce(values, "sum", lengths=self.lengths))

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """float32 [N] -> [N]: the mean over each token's own sequence."""
        sums = torch.segment_reduce(values, "sum", lengths=self.lengths)
        return self._spread(sums / self.lengths)

    def _spread(self, per_sequence: torch.Tensor) -> torch.Tensor:
        return per_sequence.repeat_interleave(self.lengths, output_size=len(self.trainer_logprobs))


@dataclass(frozen=True)
class TokenLoss:
    """loss: float32 [N], what each token contributes, before it is weighted; differentiable.
    clipped: bool [N], tokens whose gradient the clip removed or whose weight it cut."""

    loss: torch.Tensor
    clipped: torch.Tensor
