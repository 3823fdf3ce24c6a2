"""The norm of all gradients of a model together, with the same bits at any number of ranks.

It is the root of the sum of all squares. Every block of 128 rows has a sum of its own, which its
owner finds; these are gathered and added in float64, in the order of names and blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from jetrl.distributed.collectives import gather_equal
from jetrl.distributed.shards import BLOCK_ROWS, Shard
from jetrl.kernels.norm import block_squares


def gradient_norm(gradients: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> Tensor:
    """Return the norm of all gradients together, a float32 scalar on their device.

    Args:
        gradients: The gradients by name, of own rows where a master weight is divided; the same
            names on every rank.
        shards: The division of the rows of those that are divided, by name.
    """
    squares = {name: block_squares(gradient) for name, gradient in gradients.items()}
    if not squares:
        return torch.zeros(())
    divided = [name for name in squares if name in shards]
    if divided:
        squares |= _gathered({name: squares[name] for name in divided}, shards)
    return torch.cat([squares[name] for name in gradients]).double().sum().sqrt().float()


def _gathered(own: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> dict[str, Tensor]:
    """Return the sums of all blocks of matrices, of which each rank has its own."""
    counts = {name: shards[name].counts(BLOCK_ROWS) for name in own}
    of_rank = [sum(count) for count in zip(*counts.values(), strict=True)]
    mine = torch.cat(list(own.values()))
    padded = mine.new_zeros((max(of_rank), mine.shape[1]))
    padded[: len(mine)] = mine
    pieces = [
        everything[:total].split([count[rank] for count in counts.values()])
        for rank, (everything, total) in enumerate(zip(gather_equal(padded), of_rank, strict=True))
    ]
    return {
        name: torch.cat(list(p)) for name, p in zip(own, zip(*pieces, strict=True), strict=True)
    }
