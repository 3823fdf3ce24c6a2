"""Gluon kernels, and products of BF16, in Triton's interpreter: import this before the kernels.

Layouts are ignored, except that sums of 2, 4 and 16 values have the order of an accumulator's
threads (`attention.core`). Products are exact sums, rounded once. A copy to shared memory fills its
target with NaN when it starts, and with its values when it has been waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import exact_interpreter  # noqa: F401  (an exact fma, and casts of bfloat16)
import numpy as np
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia import ampere
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_KINDS = {tl.float32: np.float32, tl.float16: np.float16, tl.bfloat16: np.uint16, tl.int8: np.int8}
_KINDS[tl.float8e4nv] = np.uint8
_POISON = {np.float32: np.nan, np.float16: np.nan, np.uint16: 0x7FC1, np.int8: 99, np.uint8: 0x7F}


class Shared:
    """A view of shared memory, as Gluon's shared_memory_descriptor."""

    layout = None

    def __init__(self, dtype: Any, data: np.ndarray) -> None:
        self.dtype, self.data = dtype, data

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def index(self, place: Any) -> Shared:
        return Shared(self.dtype, self.data[int(place)])

    def slice(self, start: int, length: int, dim: int) -> Shared:
        part = [slice(None)] * self.data.ndim
        part[dim] = slice(start, start + length)
        return Shared(self.dtype, self.data[tuple(part)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.dtype, self.data.transpose(order))

    def store(self, value: Any) -> None:
        self.data[...] = value.handle.data

    def load(self, layout: Any = None) -> Any:
        return tensor(self.data.copy(), self.dtype)


def tensor(data: np.ndarray, dtype: Any) -> Any:
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


class Copies:
    """Asynchronous copies of a program, by groups."""

    def __init__(self) -> None:
        self.groups: list[list[Callable[[], None]]] = []
        self.group: list[Callable[[], None]] = []

    def load(self, target: Shared, pointer: Any, mask: Any = None) -> None:
        target.data[...] = _POISON[target.data.dtype.type]
        other = None if mask is None else 0.0
        self.group.append(lambda: target.store(tl.load(pointer, mask=mask, other=other)))

    def commit(self) -> None:
        self.groups.append(self.group)
        self.group = []

    def wait(self, under_way: int = 0) -> None:
        while len(self.groups) > under_way:
            for copy in self.groups.pop(0):
                copy()


COPIES = Copies()


def values_of(handle: Any) -> np.ndarray:
    """Return values of 8, 16 or 32 bits in float64."""
    data = handle.data
    if handle.dtype == tl.float8e4nv:
        return torch.from_numpy(data.copy()).view(torch.float8_e4m3fn).double().numpy()
    if handle.dtype == tl.bfloat16:
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float64)


def product(a: Any, b: Any, acc: Any) -> Any:
    """Return a @ b + acc, in float64, rounded to float32."""
    return tensor(dot(None, a.handle, b.handle, acc.handle).data, tl.float32)


def dot(_: Any, a: Any, b: Any, acc: Any, *options: Any) -> Any:
    """`InterpreterBuilder.create_dot`, which takes BF16 for integers."""
    return TensorHandle((values_of(a) @ values_of(b) + acc.data).astype(np.float32), tl.float32)


def ordered_sum(x: Any, axis: int) -> Any:
    """Return the float32 sum over 2, 4 or 16 values, in the order of threads."""
    parts = list(np.moveaxis(x.handle.data, axis, 0))
    if len(parts) == 16:  # thread i has columns 2i, 2i + 1, 2i + 8 and 2i + 9
        two = [parts[2 * i] + parts[2 * i + 1] for i in range(4)]
        parts = [two[i] + parts[2 * i + 8] + parts[2 * i + 9] for i in range(4)]
    if len(parts) == 4:
        parts = [parts[0] + parts[2], parts[1] + parts[3]]
    assert len(parts) == 2, f"a sum of {x.shape}"
    return tensor(parts[0] + parts[1], x.dtype)


def jit(function: Any = None, **options: Any) -> Any:
    if function is None:
        return lambda function: jit(function, **options)
    function.__globals__.setdefault("tl", tl)
    return triton.jit(function, **options)


def without_gluon(annotation: Any) -> str:
    """Return the name of a type, with Gluon's constexpr as Triton's."""
    return _name("constexpr" if annotation == "gl.constexpr" else annotation)


def set_rows_per_warp(rows: int) -> None:
    """Set the rows that a warp copies at once, which kernels read from a layout."""
    tl.block_type.layout.threads_per_warp[0] = rows


def nothing(*_: Any, **__: Any) -> None:
    return None


class Language:
    """Triton's functions under Gluon's names, without layouts."""

    shared_memory_descriptor = Shared
    barrier = staticmethod(nothing)
    sum = staticmethod(ordered_sum)

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *_, **__: None
        return getattr(tl, name)

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value

    @staticmethod
    def arange(start: int, end: int, layout: Any = None) -> Any:
        return tl.arange(start, end)

    @staticmethod
    def zeros(shape: list[int], dtype: Any, layout: Any = None) -> Any:
        return tl.zeros(shape, dtype)

    @staticmethod
    def full(shape: list[int], value: Any, dtype: Any, layout: Any = None) -> Any:
        return tl.full(shape, value, dtype)

    @staticmethod
    def reduce(x: Any, axis: int, combine: Any) -> Any:
        """The maximum, with NaN: Triton's interpreter would call `combine` for each element."""
        assert combine.__name__ == "larger", combine.__name__
        found = np.asarray(np.max(x.handle.data, axis=axis))
        if not found.ndim:
            return tl.tensor(TensorHandle(found.reshape(1), x.dtype), x.dtype)
        return tensor(found, x.dtype)

    @staticmethod
    def convert_layout(x: Any, layout: Any, assert_trivial: bool = False) -> Any:
        return x

    @staticmethod
    def allocate_shared_memory(dtype: Any, shape: list[int], layout: Any) -> Shared:
        kind = _KINDS[dtype]
        return Shared(dtype, np.full(shape, _POISON[kind], dtype=kind))


_name = triton.runtime.jit._normalize_ty
triton.runtime.jit._normalize_ty = without_gluon
InterpreterBuilder.create_dot = dot
gluon.jit = jit
gluon.constexpr_function = lambda function: function
gluon.language = Language()
tl.block_type.layout = SimpleNamespace(threads_per_warp=[1])
ampere.mma_v2 = product
for name, made in (
    ("async_load", COPIES.load),
    ("async_copy_global_to_shared", COPIES.load),
    ("commit_group", COPIES.commit),
    ("wait_group", COPIES.wait),
):
    setattr(ampere.async_copy, name, made)
torch.cuda.is_current_stream_capturing = lambda: False
