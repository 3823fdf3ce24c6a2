"""What memory a device has."""

from __future__ import annotations

import torch

from jetrl.memory.cpu import available_bytes


def free_bytes(device: str | torch.device) -> int | None:
    """Memory of a device that a run could have: of a GPU what is free, and what torch keeps. None
    where it cannot be asked."""
    where = torch.device(device)
    if where.type == "cpu":
        return available_bytes()
    if not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info(where)
    kept = torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
    return int(free) + kept
