"""The calls to the driver come in order, and where one fails nothing is left behind.

The driver is a stand-in that keeps count; tests/gpu/test_given_back.py has the real one.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from enum import Enum
from types import ModuleType
from unittest.mock import MagicMock

import pytest
import torch

from jetrl.memory import device as device_memory

UNIT = 2**21
NAME = "jetrl.rollout.mapped_memory"


class Result(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_VALUE = 1


def counting_driver():
    """Return a driver with `live`, counts of its resources, and `fails`, results by call."""
    fake = MagicMock()
    fake.CUresult, fake.fails, fake.live = Result, {}, Counter()

    def add(name, what, change, *values):
        def call(*_):
            left = fake.fails.get(name)
            if left:
                return (left.pop(0), *[None for _ in values])
            fake.live[what] += change
            return (Result.CUDA_SUCCESS, *values)

        setattr(fake, name, call)

    add("cuMemGetAllocationGranularity", "", 0, UNIT)
    add("cuMemAddressReserve", "reserved", 1, 2**40)
    add("cuMemCreate", "handles", 1, 7)
    add("cuMemMap", "mapped", 1)
    add("cuMemRelease", "handles", -1)
    add("cuMemSetAccess", "", 0)
    add("cuMemUnmap", "mapped", -1)
    add("cuMemAddressFree", "reserved", -1)
    fake.cuGetErrorString = lambda _: (Result.CUDA_SUCCESS, b"in words")
    return fake


@pytest.fixture
def driver(monkeypatch):
    fake, package = counting_driver(), ModuleType("cuda.bindings")
    package.driver = fake
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setattr(device_memory, "_COUNTS", device_memory._Counts())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2**30, 2**31))
    yield fake
    sys.modules.pop(NAME, None)


def new_memory():
    return importlib.import_module(NAME).MappedMemory(UNIT + 1, torch.device("cuda", 0))


def test_memory_comes_and_goes_behind_its_addresses(driver):
    memory = new_memory()
    for _ in range(2):
        driver.fails["cuMemCreate"] = [Result.CUDA_ERROR_OUT_OF_MEMORY]  # torch keeps some: again
        memory.map()
        assert (driver.live["mapped"], driver.live["handles"]) == (1, 0)
        assert device_memory.bytes_outside_torch() == 2 * UNIT
        memory.unmap()
        assert driver.live["mapped"] == device_memory.bytes_outside_torch() == 0
    memory.map()
    del memory
    assert not any(driver.live.values()), "an owner that goes gives all back"
    assert device_memory.bytes_outside_torch() == 0


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("short", [True, False])
def test_a_call_that_fails_leaves_nothing_behind(driver, name, short):
    result = Result.CUDA_ERROR_OUT_OF_MEMORY if short else Result.CUDA_ERROR_INVALID_VALUE
    memory = new_memory()
    driver.fails[name] = [result, result]
    with pytest.raises(torch.OutOfMemoryError if short else RuntimeError, match=r"memory|refused"):
        memory.map()
    assert not memory.mapped
    assert (driver.live["mapped"], driver.live["handles"]) == (0, 0)
    assert device_memory.bytes_outside_torch() == 0
    driver.fails.clear()
    memory.map()
    assert memory.mapped
