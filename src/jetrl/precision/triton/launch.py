"""Shared-memory budgets, and overlap of launches.

Programmatic dependent launch (PDL) lets a kernel start while the previous one is ending. Decode is
a chain of kernels of a few microseconds each, and a launch costs about one microsecond. A kernel
launched with `overlapped()` can start once all programs of the previous kernel have called
`let_next_start` or ended. Most kernels call it at once; the GEMM of a linear layer calls it when
its X is ready, so that the next GEMM can prefetch its weight. Before `wait_for_previous`, a kernel
may only set up and read tensors that no kernel of the forward writes: weights, page tables, old
pages. Every kernel waits before it ends, so a kernel that has waited sees all earlier writes.
Without the launch attribute (below compute capability 9.0) both are no-ops.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton functions can annotate only constexpr arguments)

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon

TRITONS_OWN = 512  # upper bound on Triton's own use: warp-partition arguments, padding
BARRIER = 8  # bytes
_OF_SYSTEM = 1024  # bytes that the system reserves per program


def program_bytes(stages: int, stage: int, beside: int) -> int:
    """Return the maximum shared memory of a program, in bytes; Triton may add less than assumed.

    A `stage` includes all rings and its barriers; `beside` is the rest, such as adapter tiles.
    """
    return stages * stage + beside + TRITONS_OWN


def fitting_stages(fastest: int, stage: int, beside: int, room: int) -> int:
    """Return the number of pipeline stages: the fastest number or as many as fit, at least 2."""
    return min(fastest, max(2, (room - program_bytes(0, stage, beside)) // stage))


def remaining_bytes(shared_memory: int, other: int, programs: int = 1) -> int:
    """Return the bytes left per program if `programs` share an SM with one that uses `other`."""
    return (shared_memory - other) // programs - _OF_SYSTEM


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def overlapped() -> dict[str, bool]:
    """Return the launch attribute for PDL, or none below compute capability 9.0."""
    return {"launch_pdl": True} if torch.cuda.get_device_capability() >= (9, 0) else {}


@triton.jit
def wait_for_previous():
    """Wait until the previous kernel has ended and its writes are visible (see the module)."""
    if tl.target_info.cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], tl.int32, False, 1)


@triton.jit
def let_next_start():
    """Let the next kernel start once all programs have called this (see the module)."""
    if tl.target_info.cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], tl.int32, False, 1
        )


# A Gluon kernel can call only Gluon functions. A body that is valid in both languages is written
# for Triton and compiled a second time with `gluon.jit`.
gluon_wait_for_previous = gluon.jit(wait_for_previous.fn)
gluon_let_next_start = gluon.jit(let_next_start.fn)
