"""The memory that is held of a GPU beside torch's tensors, counted without a GPU."""

from __future__ import annotations

import pytest
import torch

from jetrl.memory import device as device_memory
from jetrl.memory.device import DeviceBytes, bytes_outside_torch, peak_bytes, reset_peak

GPU = torch.device("cuda", 0)


def test_the_peak_is_of_tensors_and_what_is_held_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = 100
    monkeypatch.setattr(device_memory, "_COUNTS", device_memory._Counts())
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: tensors)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
    pages, graphs = DeviceBytes(GPU), DeviceBytes(GPU)
    pages.bytes = 50
    graphs.bytes += 5
    graphs.bytes += 2
    assert (pages.bytes, graphs.bytes) == (50, 7)
    assert (bytes_outside_torch(), peak_bytes()) == (57, 157)
    pages.bytes, tensors = 0, 120
    assert (bytes_outside_torch(), peak_bytes()) == (7, 157), "before the pages were given back"
    tensors = 200
    assert peak_bytes() == 207
    reset_peak()
    tensors = 10
    assert peak_bytes() == 17
    graphs.bytes = 30
    del graphs
    assert (bytes_outside_torch(), peak_bytes()) == (0, 40), (
        "what goes with its owner was held before"
    )
