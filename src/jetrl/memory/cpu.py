"""What CPU memory there is, also in a container, and what malloc keeps of it."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path

_MACHINE = Path("/proc/meminfo")
_GROUPS = Path("/proc/self/cgroup")
_HIERARCHIES = Path("/sys/fs/cgroup")

# glibc's mallopt. Blocks of up to 32 MiB, the most that it takes, come from its heap.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT, _FROM_HEAP = 2**30, 2**25
_CHOICES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def available_bytes() -> int | None:
    """CPU memory that can be had without swapping, also within a container's limit; None where the
    system does not say."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(_MACHINE), re.MULTILINE)
    machine = () if found is None else (1024 * int(found[1]),)
    return min((*machine, *_group_rooms()), default=None)


def keep_freed() -> None:
    """From here on glibc's malloc keeps up to 1 GiB that is freed, for the next tensors: giving it
    back and asking for it again is a page fault for each 4 KiB. Nothing happens with another malloc
    or where its variables are set."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _CHOICES):
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
        mallopt(_M_MMAP_THRESHOLD, _FROM_HEAP)


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
