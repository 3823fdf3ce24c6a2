"""The free and held memory of a device.

torch counts neither mapped pages (`rollout.mapped_memory`) nor the memory that a captured CUDA
graph works in. Their owners record it in a `DeviceBytes`. A process has one GPU.
"""

from __future__ import annotations

import itertools
import weakref

import torch

from jetrl.memory.cpu import available_bytes


def free_bytes(device: str | torch.device) -> int | None:
    """Return a device's free bytes, torch's cache included; None if unknown."""
    where = torch.device(device)
    if where.type == "cpu":
        return available_bytes()
    if not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info(where)
    return int(free) + torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)


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


def bytes_outside_torch() -> int:
    """Return the bytes now held outside torch's allocator."""
    return sum(_COUNTS.held.values())


def reset_peak(device: torch.device | None = None) -> None:
    torch.cuda.reset_peak_memory_stats(device)
    _COUNTS.peak = 0


def peak_bytes(device: torch.device | None = None) -> int:
    """Return the maximum bytes held since the last reset.

    The result is too high if bytes outside torch's allocator were added after its own peak.
    """
    now = int(torch.cuda.max_memory_allocated(device)) + bytes_outside_torch()
    return max(now, _COUNTS.peak)
