"""The CPU memory that is available, also in a container, and the memory that malloc keeps."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path

_MACHINE = Path("/proc/meminfo")
_GROUPS = Path("/proc/self/cgroup")
_HIERARCHY = Path("/sys/fs/cgroup")  # of control groups, version 2

# Arguments of glibc's mallopt: blocks of up to 32 MiB, its maximum, come from its heap.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT, _FROM_HEAP = 2**30, 2**25
_CHOICES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def available_bytes() -> int | None:
    """Return the CPU memory available without swapping, also in a container; None if unknown."""
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
    own = re.search(r"^0::/(.*)$", _text(_GROUPS), re.MULTILINE)
    group = None if own is None else _HIERARCHY / own[1]
    for folder in () if group is None else (group, *group.parents):
        most, now = (_text(folder / f"memory.{name}").strip() for name in ("max", "current"))
        if most.isdigit() and now.isdigit():  # A group without a limit says "max" or nothing.
            counts = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
            # Cached pages of files on disk count as unused.
            cached = int(counts.get("file", 0)) - int(counts.get("shmem", 0))
            yield int(most) - int(now) + max(0, cached)


def _text(file: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return os.fsdecode(file.read_bytes())
    except (FileNotFoundError, PermissionError):
        return ""
