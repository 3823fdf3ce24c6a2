"""The memory that is held of a GPU beside torch's tensors, counted without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from jetrl.memory import device as device_memory
from jetrl.memory.device import DeviceBytes, beside_tensors, peak_bytes, reset_peak

GPU = torch.device("cuda", 0)


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets what torch counts, from here on its peak too."""
    count = [0]
    monkeypatch.setattr(device_memory, "_COUNTS", device_memory._Counts())
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: count[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
    return lambda size: count.__setitem__(0, size)


def test_the_peak_is_of_tensors_and_what_is_held_with_them(tensors: Callable[[int], None]) -> None:
    tensors(100)
    pages, graphs = DeviceBytes(GPU), DeviceBytes(GPU)
    pages.bytes = 50
    graphs.bytes += 5
    graphs.bytes += 2
    assert (pages.bytes, graphs.bytes) == (50, 7)
    assert beside_tensors() == 57
    assert peak_bytes() == 157
    pages.bytes = 0
    tensors(120)
    assert beside_tensors() == 7
    assert peak_bytes() == 157, "before the pages were given back"
    tensors(200)
    assert peak_bytes() == 207
    reset_peak()
    tensors(10)
    assert peak_bytes() == 17


def test_what_goes_with_its_owner_was_held_before(tensors: Callable[[int], None]) -> None:
    tensors(100)
    graphs = DeviceBytes(GPU)
    graphs.bytes = 30
    del graphs
    assert beside_tensors() == 0
    assert peak_bytes() == 130
    reset_peak()
    assert peak_bytes() == 100
