"""The sums of dK and dV whose queries are divided into parts: added in the order of the parts.

The keys of a stem are seen by the queries of all its branches. Where these are many, several
programs of the kernel of dK and dV share them (`attention.backward_lists`), and each leaves its
sums in float32. Here they are added, the first part's first, so that the gradients have one order
of sums, which follows from the lengths in the batch alone:

    dK = bfloat16(scale * (sum_0 + sum_1 + ...))        dV = bfloat16(sum_0 + sum_1 + ...)
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.attention.backward_lists import BACKWARD_KEYS
from jetrl.kernels.attention.layout import QueryTiles

_ROWS = 16  # keys of a program: 16 KB of each part with 128 channels


def part_bytes(head_dim: int) -> int:
    """Return the bytes of the sums of dK and dV of one part of a key-value head."""
    return 2 * BACKWARD_KEYS * head_dim * 4


@triton.jit(do_not_specialize=["first_group", "num_groups"])
def add_parts_kernel(
    sums_ptr,
    dk_ptr,
    dv_ptr,
    divided_ptr,
    scale,
    first_group,
    num_groups,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write dK and dV of ROWS keys of a block of keys whose queries are divided into parts.

    Args:
        sums_ptr: float32 [num_parts, num_groups, 2, BLOCK_N, D], dK before dV.
        dk_ptr: bfloat16 [T, G, D], written.
        divided_ptr: int32 [., 3], `QueryTiles.divided_key_tiles`.
        scale: 1 / sqrt(D).
    """
    group_here = tl.program_id(0) % num_groups
    record = divided_ptr + tl.program_id(0) // num_groups * 3
    row0, place, parts = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    within = row[:, None] * D + tl.arange(0, D)[None, :]
    dk = tl.zeros([ROWS, D], tl.float32)
    dv = tl.zeros([ROWS, D], tl.float32)
    for part in range(0, parts):
        first = ((place + part).to(tl.int64) * num_groups + group_here) * (2 * BLOCK_N * D)
        dk += tl.load(sums_ptr + first + within)
        dv += tl.load(sums_ptr + first + BLOCK_N * D + within)
    # All keys of a stem's blocks are valid.
    key = (row0 + row).to(tl.int64)
    at = key[:, None] * (G * D) + (first_group + group_here) * D + tl.arange(0, D)[None, :]
    tl.store(dk_ptr + at, (dk * scale).to(tl.bfloat16))
    tl.store(dv_ptr + at, dv.to(tl.bfloat16))


def add_parts(
    sums: Tensor,
    dk: Tensor,
    dv: Tensor,
    tiles: QueryTiles,
    scale: float,
    first_group: int,
    num_groups: int,
) -> None:
    """Write dK and dV of the divided blocks of keys of some neighbouring key-value heads.

    Args:
        sums: float32 [num_parts * num_groups * 2 * 128 * D], of the kernel of dK and dV.
        dk: bfloat16 [T, G, D], written.
        scale: 1 / sqrt(D).
    """
    groups, head_dim = dk.shape[1:]
    grid = (num_groups * len(tiles.divided_key_tiles), BACKWARD_KEYS // _ROWS)
    add_parts_kernel[grid](
        sums, dk, dv, tiles.divided_key_tiles, scale, first_group, num_groups, groups, head_dim,
        BACKWARD_KEYS, _ROWS,
        num_warps=4,
    )  # fmt: skip
