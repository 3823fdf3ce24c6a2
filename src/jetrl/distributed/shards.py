"""The division of a matrix's rows among ranks, in whole blocks of 128 rows.

The quantizer's groups and the partial sums of the gradient norm are blocks of 128 rows, so what a
rank makes of its own blocks has the bits of what one process makes of the whole matrix.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

BLOCK_ROWS = 128


@dataclass(frozen=True)
class Shard:
    """The rows of one matrix that each rank owns, seen from one rank.

    Attributes:
        bounds: The first row of each rank, and the number of all rows at the end; `size` + 1 rows.
    """

    bounds: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.bounds) - 1

    @property
    def num_rows(self) -> int:
        """The number of rows of the whole matrix."""
        return self.bounds[-1]

    @property
    def first_row(self) -> int:
        """The first row that this rank owns."""
        return self.bounds[self.rank]

    @property
    def own_rows(self) -> slice:
        """The rows that this rank owns; none where there are fewer blocks than ranks."""
        return slice(self.bounds[self.rank], self.bounds[self.rank + 1])

    def slices(self, num_rows: int) -> list[list[slice]]:
        """Return the rows of every rank in slices, the k-th of every rank in the k-th list.

        Args:
            num_rows: The most rows that the slices of one list have together, but at least one row
                a rank; a rank that has fewer rows than another has empty slices at the end.
        """
        step = max(1, num_rows // self.size)
        longest = max(self.counts())
        return [
            [
                slice(min(first + start, end), min(first + start + step, end))
                for first, end in itertools.pairwise(self.bounds)
            ]
            for start in range(0, longest, step)
        ]

    def counts(self, block: int = 1) -> list[int]:
        """Return how many rows, or blocks of rows, each rank owns.

        Args:
            block: The rows of a block; the last block of the matrix may have fewer.
        """
        ends = [-(-bound // block) for bound in self.bounds]
        return [end - start for start, end in itertools.pairwise(ends)]


def shard_of(num_rows: int, rank: int, size: int) -> Shard | None:
    """Return how a matrix is divided, or None where it is kept whole on every rank.

    A matrix is divided where there is more than one rank and it has at least one block of rows.
    Ranks own whole blocks, the numbers of which differ by at most one.
    """
    if size == 1 or num_rows < BLOCK_ROWS:
        return None
    blocks = -(-num_rows // BLOCK_ROWS)
    bounds = [min(num_rows, BLOCK_ROWS * (blocks * r // size)) for r in range(size + 1)]
    return Shard(tuple(bounds), rank)
