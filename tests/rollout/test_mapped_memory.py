"""The calls to the driver come in order, and where one fails nothing is left behind.

The driver is a stand-in that keeps count; what the real one does is in
tests/gpu/test_given_back.py.
"""

# ruff: noqa: N802 (the driver's names)

from __future__ import annotations

import importlib
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
import torch

from jetrl.memory import device as device_memory

UNIT = 2**21
NAME = "jetrl.rollout.mapped_memory"


class Result(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_VALUE = 1


class Driver(SimpleNamespace):
    """A stand-in for the driver that counts what is reserved, mapped and made.

    Attributes:
        reserved: Address and size of each reserved range.
        mapped: Ranges of addresses that are mapped.
        handles: Handles that exist.
        fails: Results that the next calls have, by the call's name.
    """

    CUresult = Result
    CUmemAllocationProp = lambda self: SimpleNamespace(location=SimpleNamespace())  # noqa: E731
    CUmemAccessDesc = SimpleNamespace
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self):
        super().__init__(reserved=set(), mapped=set(), handles=set(), fails={}, made=0)

    def _answer(self, name, *values):
        left = self.fails.get(name, [])
        return (left.pop(0), *[None] * len(values)) if left else (Result.CUDA_SUCCESS, *values)

    def cuMemGetAllocationGranularity(self, *_):
        return self._answer("granularity", UNIT)

    def cuMemAddressReserve(self, size, *_):
        self.reserved.add((2**40, size))
        return self._answer("reserve", 2**40)

    def cuMemCreate(self, size, *_):
        answer = self._answer("create", self.made)
        if answer[0] is Result.CUDA_SUCCESS:
            self.handles.add(self.made)
            self.made += 1
        return answer

    def cuMemMap(self, address, size, offset, handle, flags):
        assert handle in self.handles
        answer = self._answer("map")
        if answer[0] is Result.CUDA_SUCCESS:
            self.mapped.add((address, size))
        return answer

    def cuMemRelease(self, handle):
        self.handles.remove(handle)
        return self._answer("release")

    def cuMemSetAccess(self, address, size, *_):
        assert (address, size) in self.mapped
        return self._answer("access")

    def cuMemUnmap(self, address, size):
        self.mapped.remove((address, size))
        return self._answer("unmap")

    def cuMemAddressFree(self, address, size):
        assert not self.mapped, "addresses with memory behind them"
        self.reserved.remove((address, size))
        return self._answer("free")

    def cuGetErrorString(self, _):
        return Result.CUDA_SUCCESS, b"in words"


@pytest.fixture
def driver(monkeypatch):
    fake, package = Driver(), ModuleType("cuda.bindings")
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


@pytest.fixture
def memory(driver):
    memory = importlib.import_module(NAME).MappedMemory(UNIT + 1, torch.device("cuda", 0))
    yield memory
    memory.unmap()


def test_memory_comes_and_goes_behind_its_addresses(driver, memory):
    address = memory.__cuda_array_interface__["data"][0]
    for _ in range(2):
        memory.map()
        assert driver.mapped == {(address, 2 * UNIT)}
        assert not driver.handles, "the mapping alone keeps the memory"
        assert device_memory.beside_tensors() == 2 * UNIT
        memory.unmap()
        assert not driver.mapped
        assert device_memory.beside_tensors() == 0


def test_an_owner_that_goes_gives_all_back(driver):
    memory = importlib.import_module(NAME).MappedMemory(UNIT, torch.device("cuda", 0))
    memory.map()
    del memory
    assert not driver.mapped
    assert not driver.reserved
    assert device_memory.beside_tensors() == 0


@pytest.mark.parametrize("name", ["create", "map", "access"])
@pytest.mark.parametrize(
    "result", [Result.CUDA_ERROR_OUT_OF_MEMORY, Result.CUDA_ERROR_INVALID_VALUE]
)
def test_a_call_that_fails_leaves_nothing_behind(driver, memory, name, result):
    driver.fails[name] = [result, result]
    short = result is Result.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(torch.OutOfMemoryError if short else RuntimeError, match=r"memory|refused"):
        memory.map()
    assert not memory.mapped
    assert not driver.mapped
    assert not driver.handles
    assert device_memory.beside_tensors() == 0
    driver.fails.clear()
    memory.map()
    assert memory.mapped


def test_memory_that_torch_keeps_for_later_is_asked_for_once_more(driver, memory):
    driver.fails["create"] = [Result.CUDA_ERROR_OUT_OF_MEMORY]
    memory.map()
    assert memory.mapped
