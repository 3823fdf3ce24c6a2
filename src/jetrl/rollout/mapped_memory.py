"""GPU memory that can be freed while its addresses stay.

A CUDA graph uses the addresses of its capture. This module reserves addresses once, and maps and
unmaps memory by CUDA's virtual memory management: graphs stay valid, and must not run in between.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.memory.device import DeviceBytes
from jetrl.memory.out_of_memory import release

try:
    from cuda.bindings import driver
except ModuleNotFoundError as error:
    what = f"sampling on a GPU needs the package cuda-bindings ({error})"
    raise UserError(f"{what}: pip install cuda-bindings") from error


@dataclass
class _Range:
    address: int
    size: int
    device: torch.device
    mapped: bool = False

    def unmap(self) -> None:
        torch.cuda.synchronize(self.device)
        _checked(driver.cuMemUnmap(self.address, self.size))
        self.mapped = False

    def give_up(self) -> None:
        if self.mapped:
            self.unmap()
        _checked(driver.cuMemAddressFree(self.address, self.size))


class MappedMemory:
    """Reserved addresses of a GPU, without memory until `map`."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
        torch.cuda.synchronize(device)  # Creates the context.
        self.num_bytes = num_bytes
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._kind.location.id = index
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        unit = _checked(driver.cuMemGetAllocationGranularity(self._kind, recommended))
        # Only addresses here; the driver maps memory to them in whole units.
        size = -(-num_bytes // unit) * unit
        address = int(_checked(driver.cuMemAddressReserve(size, 0, 0, 0)))
        self._range = _Range(address, size, device)
        self._held = DeviceBytes(device)
        # Not at exit: the process gives everything back then, and the driver may be gone before.
        weakref.finalize(self, self._range.give_up).atexit = False

    @property
    def mapped(self) -> bool:
        """True while memory is mapped; otherwise nothing may touch the addresses."""
        return self._range.mapped

    def map(self) -> None:
        """Map memory with undefined contents, or raise a torch.OutOfMemoryError."""
        where = self._range
        handle = self._memory()
        try:
            _checked(driver.cuMemMap(where.address, where.size, 0, handle, 0))
        finally:
            # The mapping keeps the memory from here on; without a mapping the memory is free.
            _checked(driver.cuMemRelease(handle))
        where.mapped = True
        access = driver.CUmemAccessDesc()
        access.location = self._kind.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            _checked(driver.cuMemSetAccess(where.address, where.size, [access], 1))
        except BaseException:
            where.unmap()
            raise
        self._held.bytes = where.size

    def unmap(self) -> None:
        """Free the memory once the device has finished its work."""
        if self._range.mapped:
            self._range.unmap()
            self._held.bytes = 0

    def tensor(self) -> Tensor:
        """Return uint8 [num_bytes] over the addresses, which it keeps reserved."""
        return torch.as_tensor(self, device=self._range.device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = self._range.address, False
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": data, "version": 3}

    def _memory(self) -> Any:
        """Return a handle of new memory, after a second try without what torch keeps for later."""
        size = self._range.size
        for _ in range(2):
            status, *handle = driver.cuMemCreate(size, self._kind, 0)
            if status != driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                return _checked((status, *handle))
            release()
        free, _ = torch.cuda.mem_get_info(self._range.device)
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to map {size / 2**30:.2f} GiB; {free / 2**30:.2f} GiB free"
        )


def _checked(result: tuple[Any, ...]) -> Any:
    """Return the value of a driver's call, None if it has none, or raise its error."""
    status, *values = result
    if status == driver.CUresult.CUDA_SUCCESS:
        return values[0] if values else None
    _, words = driver.cuGetErrorString(status)
    message = words.decode() if words else "unknown"
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"CUDA out of memory. The driver's {status.name}: {message}")
    raise RuntimeError(f"the CUDA driver refused: {status.name}, {message}")
