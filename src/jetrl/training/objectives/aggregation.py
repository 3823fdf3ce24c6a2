"""Aggregation: how much each token of an update counts.

    token_mean     1 / tokens of the update                             DAPO eq. 8
    sequence_mean  1 / (sequences of the update x tokens of its own)    GRPO eq. 3
    sequence_sum   1 / sequences of the update                          a completion is one action
    constant       1 / (sequences of the update x rollout.max_tokens)   Dr. GRPO

The weights are of the whole update, not of a micro-batch: losses, gradients and metrics of its
micro-batches are added, and how the update was divided does not matter beyond the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jetrl.settings.algorithms import Aggregation


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
        aggregation: How the tokens are weighted.
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
