"""What CPU memory there is, also in a container."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_MACHINE = Path("/proc/meminfo")
_GROUPS = Path("/proc/self/cgroup")
_HIERARCHIES = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """CPU memory that can be had without swapping, also within a container's limit; None where the
    system does not say."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(_MACHINE), re.MULTILINE)
    machine = () if found is None else (1024 * int(found[1]),)
    return min((*machine, *_group_rooms()), default=None)


def _group_rooms() -> Iterator[int]:
    """What each limited control group that this process is in leaves, those around it included.
    Where a container sees its own groups only, the last one found is the container's."""
    for line in _text(_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            root, names = _HIERARCHIES, ("memory.max", "memory.current", "file", "shmem")
        elif "memory" in controllers.split(","):
            root = _HIERARCHIES / "memory"
            names = (
                *("memory.limit_in_bytes", "memory.usage_in_bytes"),
                *("total_cache", "total_shmem"),
            )
        else:
            continue
        own = root / path.lstrip("/")
        for group in (own, *own.parents):
            if group.is_relative_to(root):
                yield from _room(group, *names)


def _room(group: Path, limit: str, used: str, files: str, shared: str) -> Iterator[int]:
    """What is not used; pages of files that are on a disk too are given back when needed."""
    most, now = _text(group / limit).strip(), _text(group / used).strip()
    if most.isdigit() and now.isdigit():  # not "max", and not a group without limits
        counts = dict(line.split() for line in _text(group / "memory.stat").splitlines())
        cached = int(counts.get(files, 0)) - int(counts.get(shared, 0))
        yield int(most) - int(now) + max(0, cached)


def _text(file: Path) -> str:
    """Empty where there is no such file."""
    try:
        return os.fsdecode(file.read_bytes())
    except OSError:
        return ""
