"""Room in shared memory, and overlap of launches, for all Hopper kernels.

Overlap (programmatic dependent launch) lets a kernel start while the one before ends. Decode is a
chain of kernels of a few microseconds, and a launch costs one of them. A kernel launched with
`OVERLAPPED` may start once every program of the one before has called `let_next_start` or ended.
Most call it at once; the product of a linear layer calls it when its X can be read, so the next
product can begin to copy its weight. Before `wait_for_previous` a kernel may only set itself up and
read what no kernel of the forward writes: weights, page tables, old pages. Since every kernel waits
before it ends, one that has waited sees all earlier writes. Without the launch attribute, both are
no-operations.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon

SHARED_MEMORY = 227 * 1024  # bytes that a program may have
TRITONS_OWN = 512  # bytes, at most, of what Triton keeps there itself: arguments of warps, padding
BARRIER = 8  # bytes
_OF_SYSTEM = 1024  # bytes that the system has next to each program's


def program_bytes(stages: int, stage: int, beside: int) -> int:
    """Return the most bytes of shared memory that a program takes; what Triton adds may be less.

    Args:
        stage: Bytes of a stage of all rings, its barriers among them.
        beside: Bytes of all else, such as the tiles of an adapter.
    """
    return stages * stage + beside + TRITONS_OWN


def fitting_stages(fastest: int, stage: int, beside: int, room: int) -> int:
    """Return how many stages a program has: as many as were fastest, or as fit, but at least 2."""
    return min(fastest, max(2, (room - program_bytes(0, stage, beside)) // stage))


def room_beside(other: int, programs: int = 1) -> int:
    """Return the bytes of each of some programs on an SM next to one of `other` bytes."""
    return (SHARED_MEMORY - other) // programs - _OF_SYSTEM


OVERLAPPED = {"launch_pdl": True}
MULTIPROCESSORS = 132  # of an H100 or H200 in an SXM socket, for which products are cut into tiles


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return a GPU's number of SMs: so many programs run at once if each fills one."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def wait_for_previous():
    """Wait until the kernel before has ended and its writes are seen (see the module)."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def let_next_start():
    """Let the next kernel start, once every program has called this (see the module)."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


# A Gluon kernel can call only functions of Gluon, since Triton compiles the two otherwise. Where a
# body means the same in both, the function is written for Triton, and a second `jit` makes Gluon's
# of it.
gluon_wait_for_previous = gluon.jit(wait_for_previous.fn)
gluon_let_next_start = gluon.jit(let_next_start.fn)
