"""Common names for Gluon functions whose names differ across Triton 3.6 to 3.9 (torch 2.11-2.15).

barrier       synchronizes the warps of a program
tma_load      starts a TMA copy of a tile to shared memory
tma_store     starts a TMA copy of a tile from shared memory
async_load    starts a copy of elements to shared memory by the threads (cp.async)
reinterpret   views shared memory as another type and layout
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

_NAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Return a view of shared memory with another type, shape and layout."""
    if _NAMED:
        seen = memory.reinterpret(dtype, shape, layout)
    else:
        seen = memory._reinterpret(dtype, shape, layout)
    return seen
