"""Sequences packed end to end, on their way from the host to a forward."""

from __future__ import annotations

import torch
from torch import Tensor


def token_positions(cu_seqlens: Tensor) -> Tensor:
    """int64 [T]: each token's place in its own sequence, where cu_seqlens int64 [S+1] is."""
    lengths = cu_seqlens.diff()
    starts = cu_seqlens[:-1].repeat_interleave(lengths)
    return torch.arange(len(starts), device=cu_seqlens.device) - starts


def upload(host: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device; it may be there already. To a GPU it goes by way of pinned memory, so
    that the host does not wait for what the device still does."""
    if host.is_cuda or device.type == "cpu":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
