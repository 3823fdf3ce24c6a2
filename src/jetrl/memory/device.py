"""What is held of a GPU: torch's tensors, and what lies beside them.

torch counts the tensors of its own allocator. It does not count mapped pages
(`rollout.mapped_memory`), nor the memory that a CUDA graph's forward works in: those tensors count
as freed once the graph is captured, and their memory serves nothing else. Whoever holds such memory
says how much, in a `Held`. A process has one GPU.
"""

from __future__ import annotations

import itertools
import weakref

import torch


class DeviceBytes:
    """Bytes that one owner holds beside torch's tensors; none any more when it is gone."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._key = device, next(_KEYS)
        weakref.finalize(self, _hold, self._key, 0, device).atexit = False

    @property
    def bytes(self) -> int:
        return _COUNTS.held.get(self._key, 0)

    @bytes.setter
    def bytes(self, count: int) -> None:
        _hold(self._key, count, self._device)


class _Counts:
    """held: bytes of each `Held`. peak: before what is held became less, since it was reset."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.peak = 0


_COUNTS = _Counts()
_KEYS = itertools.count()


def _hold(key: int, count: int, device: torch.device) -> None:
    if count < _COUNTS.held.get(key, 0):
        _COUNTS.peak = peak_bytes(device)
    if count:
        _COUNTS.held[key] = count
    else:
        _COUNTS.held.pop(key, None)


def beside_tensors() -> int:
    """Bytes that are held now and that torch does not count."""
    return sum(_COUNTS.held.values())


def reset_peak(device: torch.device | None = None) -> None:
    """`peak_bytes` is of what comes from here on."""
    torch.cuda.reset_peak_memory_stats(device)
    _COUNTS.peak = 0


def peak_bytes(device: torch.device | None = None) -> int:
    """The most that was held at once. What was added beside the tensors after their own peak makes
    it too high by as much."""
    now = int(torch.cuda.max_memory_allocated(device)) + beside_tensors()
    return max(now, _COUNTS.peak)
