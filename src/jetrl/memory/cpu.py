"""The CPU memory that is available, also in a container, and the memory that malloc keeps."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path

_MACHINE = Path("/proc/meminfo")
_GROUPS = Path("/proc/self/cgroup")
_HIERARCHIES = Path("/sys/fs/cgroup")

# Arguments of glibc's mallopt: blocks of up to 32 MiB, its maximum, come from its heap.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT, _FROM_HEAP = 2**30, 2**25
_CHOICES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def available_bytes() -> int | None:
    """Return the CPU memory available without swapping, in a container too; None if unknown."""
    line = re.search(r"^MemAvailable:\s+(\d+) kB", _text(_MACHINE), re.MULTILINE)
    machine = () if line is None else (1024 * int(line[1]),)
    return min((*machine, *_group_rooms()), default=None)


def keep_freed() -> None:
    """Let glibc's malloc keep up to 1 GiB of freed memory for the next tensors.

    Returned memory costs a page fault per 4 KiB when it is requested again. Does nothing with
    another malloc, or if malloc's environment variables are set.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _CHOICES):
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
        mallopt(_M_MMAP_THRESHOLD, _FROM_HEAP)


def _group_rooms() -> Iterator[int]:
    """Yield the unused bytes of each limited control group of this process, outer ones too."""
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
    """Yield the unused bytes of one group; cached pages of files on disk count as unused."""
    most, now = _text(group / limit).strip(), _text(group / used).strip()
    if most.isdigit() and now.isdigit():  # A group without a limit says "max" or nothing.
        counts = dict(line.split() for line in _text(group / "memory.stat").splitlines())
        cached = int(counts.get(files, 0)) - int(counts.get(shared, 0))
        yield int(most) - int(now) + max(0, cached)


def _text(file: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return os.fsdecode(file.read_bytes())
    except (FileNotFoundError, PermissionError):
        return ""
