"""The memory of a device: how much is free, and what a GPU holds in and next to torch's tensors.

torch counts the tensors of its own allocator. It does not count mapped pages
(`rollout.mapped_memory`), nor the memory that a CUDA graph's forward works in: those tensors count
as freed once the graph is captured, though their memory serves nothing else. The owner of such
memory records its size in a `DeviceBytes`. A process has one GPU.
"""

from __future__ import annotations

import itertools
import weakref

import torch

from jetrl.memory.cpu import available_bytes


def free_bytes(device: str | torch.device) -> int | None:
    """Return the bytes that a run could take on a device, cached ones included; None if unknown."""
    where = torch.device(device)
    if where.type == "cpu":
        return available_bytes()
    if not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info(where)
    kept = torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
    return int(free) + kept


class DeviceBytes:
    """The bytes that one owner holds outside torch's allocator, counted until the owner is gone."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._key = device, next(_KEYS)
        weakref.finalize(self, _hold, self._key, 0, device).atexit = False

    @property
    def bytes(self) -> int:
        """The bytes held now; assign to change them."""
        return _COUNTS.held.get(self._key, 0)

    @bytes.setter
    def bytes(self, count: int) -> None:
        _hold(self._key, count, self._device)


class _Counts:
    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.peak = 0


_COUNTS = _Counts()
_KEYS = itertools.count()


def _hold(key: int, count: int, device: torch.device) -> None:
    """Record an owner's bytes from now on, and the peak before a decrease."""
    if count < _COUNTS.held.get(key, 0):
        _COUNTS.peak = peak_bytes(device)
    if count:
        _COUNTS.held[key] = count
    else:
        _COUNTS.held.pop(key, None)


def beside_tensors() -> int:
    """Return the bytes that are held now outside torch's allocator."""
    return sum(_COUNTS.held.values())


def reset_peak(device: torch.device | None = None) -> None:
    torch.cuda.reset_peak_memory_stats(device)
    _COUNTS.peak = 0


def peak_bytes(device: torch.device | None = None) -> int:
    """Return the largest number of bytes held at once since the last reset.

    Bytes outside torch's allocator that were added after its own peak make the result too high.
    """
    now = int(torch.cuda.max_memory_allocated(device)) + beside_tensors()
    return max(now, _COUNTS.peak)
