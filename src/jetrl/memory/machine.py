"""What memory there is."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_MACHINE = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """CPU memory that can be had without swapping, also within a container's limit; None where the
    system does not say."""
    rooms = [room for room in (_machine_room(), _group_room()) if room is not None]
    return min(rooms, default=None)


def _machine_room() -> int | None:
    try:
        text = _MACHINE.read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return None if found is None else 1024 * int(found[1])


def _group_room() -> int | None:
    """What a control group (version 2) leaves; pages of files that are on a disk too are given
    back when they are needed."""
    try:
        limit = (_GROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_GROUP / "memory.current").read_text(encoding="ascii"))
        stat = (_GROUP / "memory.stat").read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    counts = dict(line.split() for line in stat.splitlines())
    files = int(counts.get("file", 0)) - int(counts.get("shmem", 0))
    return int(limit) - used + max(0, files)


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
