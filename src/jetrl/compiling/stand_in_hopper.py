"""A stand-in for a Hopper GPU: the code of a run goes through its launches, and computes nothing.

What a run compiles is a function of the arguments that its code launches kernels with: their types
and constants, and which are 1 or divisible by 16. Within `stand_in` that code runs as it is, on
tensors of torch's `meta` device, which have shapes, strides and dtypes and no memory. To jetrl's
own code they say that they are on `cuda`, and what it makes on `cuda` is such a tensor. Triton is
given a driver that answers what it asks before a launch; each kernel that it would compile is
handed over instead, and nothing is launched.

This changes torch and Triton for the whole process, which is to have no other work.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton.runtime.driver
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import jit

import jetrl.models.model
from jetrl.precision.hopper import gemm

_CUDA, _META = torch.device("cuda"), torch.device("meta")
_CAPABILITY = (9, 0)
_DEVICE = -1  # No GPU's number: what the process has compiled for a GPU is not to be launched.
_true_device: Any = torch.Tensor.device
# What a tensor without numbers gives as a number, by the function that asks.
_NUMBERS: dict[Any, float] = {torch.Tensor.item: 1.0, torch.Tensor.__float__: 1.0}


@dataclass(frozen=True)
class Kernel:
    """A kernel with the arguments that decide how it is compiled."""

    name: str
    key: str
    compile: Callable[[], object]


class StandIn(TorchFunctionMode):
    """Makes what code asks for on `cuda` on the `meta` device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with `meta` in place of `cuda`."""
        named = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **named)
        if func is torch.Tensor.backward:
            # A mode is off while it answers, and what backward calls is to be answered as well.
            with self:
                edge = torch.autograd.graph.get_gradient_edge(args[0])
                return torch.autograd.backward([edge], [named["gradient"]])
        out = named.get("out")
        if isinstance(out, torch.Tensor) and out.is_meta:
            return out  # Its shape is known, and torch 2.11 does not compute all of them on `meta`.
        if func in _NUMBERS and args[0].is_meta:
            return _NUMBERS[func]
        named = {key: _on_meta(value) for key, value in named.items()}
        return func(*map(_on_meta, args), **named)


def stand_in(
    multiprocessors: int,
    hand_over: Callable[[Kernel], None],
    multiplied: Callable[[int, int, int], object] = lambda *_: None,
) -> StandIn:
    """Change torch and Triton, and return the context in which code for a GPU runs.

    Args:
        multiplied: Called with the size of each product that DeepGEMM would compute: the rows of
            the left operand, the rows of the weight, and the columns of both.
    """
    _take_torch(multiprocessors)
    _take_triton(hand_over)
    _take_libraries(multiplied)
    return StandIn()


def _take_torch(multiprocessors: int) -> None:
    """Let torch answer as on a GPU."""
    tensor: Any = torch.Tensor
    tensor.device = property(_seeming_device)
    tensor.is_cuda = property(lambda x: x.is_meta)
    tensor.pin_memory = lambda x, *_: x
    properties = SimpleNamespace(multi_processor_count=multiprocessors)
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_properties = lambda _=None: properties
    cuda.get_device_capability = lambda _=None: _CAPABILITY
    blas: Any = torch.backends.cuda
    blas.preferred_blas_library = lambda *_: None


def _take_triton(hand_over: Callable[[Kernel], None]) -> None:
    """Hand over what Triton would compile, and launch nothing."""
    nothing = SimpleNamespace(
        utils=SimpleNamespace(fill_tma_descriptor=lambda *_: 0),
        is_active=lambda: True,
        get_current_device=lambda: _DEVICE,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", 10 * _CAPABILITY[0] + _CAPABILITY[1], 32),
        get_device_interface=lambda: torch.cpu,
    )
    triton.runtime.driver.set_active(nothing)
    function: Any = jit.JITFunction
    do_compile, seen = function._do_compile, set[str]()

    def instead(kernel: Any, key: str, *rest: Any) -> None:
        name = f"{kernel.module.rpartition('.')[2]}.{kernel.__name__}"
        whole = f"{name} {kernel.cache_key} {key}"
        if whole not in seen:
            seen.add(whole)
            hand_over(Kernel(name, whole, lambda: do_compile(kernel, key, *rest)))
        # Triton does not launch where no kernel is returned.

    function._do_compile = instead


def _take_libraries(multiplied: Callable[[int, int, int], object]) -> None:
    """Replace DeepGEMM, the mapped memory of KV pages and the digest of a base: they need a GPU."""

    def product(left: Any, weight: Any, *_: Any, **__: Any) -> None:
        (rows, inputs), outputs = left[0].shape, weight[0].shape[0]
        multiplied(rows, outputs, inputs)

    products: Any = gemm
    products._load_deep_gemm = lambda: SimpleNamespace(fp8_gemm_nt=product)
    model: Any = jetrl.models.model
    model.base_digest = lambda *_: ""  # It reads the bytes of weights.
    memory: Any = ModuleType("jetrl.rollout.mapped_memory")
    memory.MappedMemory = _Memory
    sys.modules[memory.__name__] = memory


class _Memory:
    """A stand-in for the KV pages' memory."""

    mapped = True

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device

    def map(self) -> None:
        """Do nothing."""

    def tensor(self) -> torch.Tensor:
        return torch.empty(self._size, dtype=torch.uint8, device=self._device)


def _seeming_device(x: torch.Tensor) -> torch.device:
    """Return the device that a tensor is on; to jetrl's own code `cuda` in place of `meta`."""
    with torch._C.DisableTorchFunction():
        device: torch.device = _true_device.__get__(x)
    asking = sys._getframe(1).f_globals.get("__name__", "")
    return _CUDA if device.type == "meta" and asking.startswith("jetrl.") else device


def _on_meta(value: Any) -> Any:
    """Return an argument of a function, `meta` in place of `cuda`."""
    if isinstance(value, torch.device):
        return _META if value.type == "cuda" else value
    return _META if isinstance(value, str) and value.partition(":")[0] == "cuda" else value
