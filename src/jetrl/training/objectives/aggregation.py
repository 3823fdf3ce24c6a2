"""Aggregation: how much each token of an update counts.

    token_mean     1 / tokens of the update                             DAPO eq. 8
    sequence_mean  1 / (sequences of the update x tokens of its own)    GRPO eq. 3
    sequence_sum   1 / sequences of the update                          a completion is one action
    constant       1 / (sequences of the update x rollout.max_tokens)   Dr. GRPO

The weights are of the whole update, not of a micro-batch: losses, gradients and metrics of its
micro-batches are added, and how the update was cut does not matter beyond the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jetrl.settings.algorithms import Aggregation


@dataclass(frozen=True)
class UpdateSize:
    """tokens: trained tokens of the update. sequences: those with a trained token. max_tokens: the
    longest completion there can be."""

    tokens: int
    sequences: int
    max_tokens: int


def token_weights(
    lengths: torch.Tensor,
    size: UpdateSize,
    aggregation: Aggregation,
    num_tokens: int | None = None,
) -> torch.Tensor:
    """float32 [N] for sequences of int64 [S] trained tokens: the weight of each token's loss.
    num_tokens: N; without it the host waits for a GPU to say."""
    if aggregation == "token_mean":
        weights = torch.full_like(lengths, 1.0 / size.tokens, dtype=torch.float32)
    elif aggregation == "sequence_mean":
        weights = (1.0 / (size.sequences * lengths.double())).float()
    elif aggregation == "sequence_sum":
        weights = torch.full_like(lengths, 1.0 / size.sequences, dtype=torch.float32)
    else:
        each = 1.0 / (size.sequences * size.max_tokens)
        weights = torch.full_like(lengths, each, dtype=torch.float32)
    return weights.repeat_interleave(lengths, output_size=num_tokens)
