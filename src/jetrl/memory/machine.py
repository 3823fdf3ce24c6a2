"""What memory there is."""

from __future__ import annotations

import re
from pathlib import Path

import torch


def available_bytes() -> int | None:
    """CPU memory that can be had without swapping; None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return None if found is None else 1024 * int(found[1])


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
