"""The sums of squares of a matrix's blocks of 128 rows, which a gradient norm is made of.

The sum of a block depends on that block alone. So the norm of gradients that are divided among
ranks, in whole blocks, has the bits of the norm that one process finds.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ROWS = 128


def block_squares(x: Tensor) -> Tensor:
    """Return sums of squares of each block of 128 rows, [ceil(N / 128), P] with P parts a block.

    The parts are float64 and one a block on a CPU, float32 and more on a GPU.

    Args:
        x: float32 [N, K], or any other shape, which is one block.
    """
    if x.dim() != 2:
        x = x.reshape(1, -1)
    if x.is_cuda:
        from jetrl.kernels.block_norm_hopper import block_squares as block_squares_hopper

        return block_squares_hopper(x)
    sums = [block.double().square().sum() for block in x.split(BLOCK_ROWS) if len(block)]
    return torch.stack(sums)[:, None] if sums else x.new_empty((0, 1), dtype=torch.float64)
