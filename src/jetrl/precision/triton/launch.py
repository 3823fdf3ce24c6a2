"""Room in shared memory, and overlap of launches.

Overlap (programmatic dependent launch) lets a kernel start while the one before ends. Decode is a
chain of kernels of a few microseconds, and a launch costs one of them. A kernel launched with
`overlapped()` may start once every program of the one before has called `let_next_start` or ended.
Most call it at once; the product of a linear layer calls it when its X can be read, so the next
product can begin to copy its weight. Before `wait_for_previous` a kernel may only set itself up and
read what no kernel of the forward writes: weights, page tables, old pages. Since every kernel waits
before it ends, one that has waited sees all earlier writes. Without the launch attribute, as below
compute capability 9.0, both are no-operations.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon

TRITONS_OWN = 512  # bytes, at most, of what Triton keeps there itself: arguments of warps, padding
BARRIER = 8  # bytes
_OF_SYSTEM = 1024  # bytes that the system has next to each program's


def program_bytes(stages: int, stage: int, beside: int) -> int:
    """Return the most bytes of shared memory that a program takes; what Triton adds may be less.

    A `stage` is of all rings, with its barriers; `beside` is all else, such as an adapter's tiles.
    """
    return stages * stage + beside + TRITONS_OWN


def fitting_stages(fastest: int, stage: int, beside: int, room: int) -> int:
    """Return how many stages a program has: as many as were fastest, or as fit, but at least 2."""
    return min(fastest, max(2, (room - program_bytes(0, stage, beside)) // stage))


def room_beside(shared_memory: int, other: int, programs: int = 1) -> int:
    """Return the bytes of each of some programs on an SM next to one of `other` bytes."""
    return (shared_memory - other) // programs - _OF_SYSTEM


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return a GPU's number of SMs: so many programs run at once if each fills one."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def overlapped() -> dict[str, bool]:
    """Return the launch attribute of kernels that overlap: none below compute capability 9.0."""
    return {"launch_pdl": True} if torch.cuda.get_device_capability() >= (9, 0) else {}


@triton.jit
def wait_for_previous():
    """Wait until the kernel before has ended and its writes are seen (see the module)."""
    if tl.target_info.cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], tl.int32, False, 1)


@triton.jit
def let_next_start():
    """Let the next kernel start, once every program has called this (see the module)."""
    if tl.target_info.cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], tl.int32, False, 1
        )


# A Gluon kernel calls only functions of Gluon. If a body means the same in both languages, it is
# written for Triton, and a second `jit` makes Gluon's function of it.
gluon_wait_for_previous = gluon.jit(wait_for_previous.fn)
gluon_let_next_start = gluon.jit(let_next_start.fn)
