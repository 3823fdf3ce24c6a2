"""Sequences packed end to end, on their way from the host to a forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pack(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens of sequences end to end, int64 [T], and where each starts, int64 [S + 1].

    The last element of the second tensor, `cu_seqlens`, is T.
    """
    lengths = torch.tensor([0, *map(len, sequences)], device=device)
    token_ids = torch.tensor([token for sequence in sequences for token in sequence], device=device)
    return token_ids, lengths.cumsum(0)


def token_positions(cu_seqlens: Tensor) -> Tensor:
    """Return each token's position in its sequence, int64 [T], on the device of cu_seqlens."""
    lengths = cu_seqlens.diff()
    starts = cu_seqlens[:-1].repeat_interleave(lengths)
    return torch.arange(len(starts), device=cu_seqlens.device) - starts


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device, where it may be already.

    A tensor goes to a GPU by way of pinned memory, so that the host does not wait for what the
    device still does.
    """
    if host.is_cuda or device.type == "cpu":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
