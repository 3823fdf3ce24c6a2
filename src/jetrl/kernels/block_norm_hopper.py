"""The sums of squares of blocks of 128 rows on Hopper, in one pass of memory."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (a Triton function may annotate nothing but its compile-time constants)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.precision.hopper.checks import check_tensor
from jetrl.precision.layout import cdiv

_BLOCK_ROWS = 128
_PIECES = 32  # programs a block of rows: four blocks of rows alone would leave most of a GPU idle
_BLOCK = 2048  # elements of a program at one time


@triton.jit
def _squares_kernel(x_ptr, sums_ptr, num_elements, block_elements, PIECES: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """Write the sum of squares of every PIECES-th part of one block of rows.

    Args:
        x_ptr: float32 [num_elements], read.
        sums_ptr: float32 [blocks, PIECES], written.
        block_elements: of a block of rows; the last block may be smaller.
        PIECES, BLOCK: programs a block of rows, and elements of a program at one time.
    """
    block, piece = tl.program_id(0), tl.program_id(1)
    first = block.to(tl.int64) * block_elements
    end = tl.minimum(first + block_elements, num_elements)
    # Which elements a program adds, and in which order, depends on the shape of a block alone.
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(piece * BLOCK, block_elements, PIECES * BLOCK):
        places = first + start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + places, mask=places < end, other=0.0)
        squares += x * x
    tl.store(sums_ptr + block * PIECES + piece, tl.sum(squares, axis=0))


def block_squares(x: Tensor) -> Tensor:
    """Return sums of squares of each block of 128 rows, float32 [ceil(N / 128), 32].

    Args:
        x: float32 [N, K] contiguous.

    Raises:
        ValueError: another dtype or layout.
    """
    check_tensor("block_squares", "x", x, torch.float32, x.shape)
    blocks = cdiv(len(x), _BLOCK_ROWS)
    sums = torch.empty(blocks, _PIECES, dtype=torch.float32, device=x.device)
    if x.numel():
        block_elements = min(len(x), _BLOCK_ROWS) * x.shape[1]
        _squares_kernel[(blocks, _PIECES)](
            x, sums, x.numel(), block_elements, _PIECES, _BLOCK, num_warps=8
        )
    return sums
