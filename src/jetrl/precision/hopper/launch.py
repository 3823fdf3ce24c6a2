"""Overlapped launches (programmatic dependent launch): a kernel starts while the one before ends.

Decode is a chain of kernels of a few microseconds, and a launch costs one of them. A kernel that is
launched with `OVERLAPPED` may start as soon as every program of the one before has called
`let_next_start`, or ended. Most call it at once, and the product of a linear layer when its X can
be read: so the kernels behind are there when it ends, and the next product has begun to copy its
weight. All a kernel may do before it calls `wait_for_previous` is set itself up and read what no
kernel of the forward writes that lets others start: weights, page tables, old pages. Since every
kernel waits before it ends, one that has waited sees what all before it wrote.

Without the launch attribute, or behind a kernel that never calls it, both are no-operations.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon

OVERLAPPED = {"launch_pdl": True}
MULTIPROCESSORS = 132  # of an H100 or H200 in an SXM socket, for which products are cut into tiles


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return a GPU's number of multiprocessors: so many programs run at once if each fills one."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def wait_for_previous():
    """Wait until the kernel before has ended and its writes are seen (see the module)."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def let_next_start():
    """Let the kernel behind start, once every program has called this (see the module)."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


# A Gluon kernel can call only functions of Gluon, since Triton compiles the two otherwise. Where a
# body means the same in both, the function is written for Triton, and a second `jit` makes Gluon's
# of it.
gluon_wait_for_previous = gluon.jit(wait_for_previous.fn)
gluon_let_next_start = gluon.jit(let_next_start.fn)
