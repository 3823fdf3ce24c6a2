"""Sharding of a matrix's rows across ranks, in whole blocks of 128 rows.

Quantization groups and partial sums of the gradient norm are such blocks, so a rank's results for
its rows equal those of a single process bit for bit.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

BLOCK_ROWS = 128


@dataclass(frozen=True)
class Shard:
    """Row ranges of a matrix on all ranks, seen from one; `bounds` has first rows and row count."""

    bounds: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_rows(self) -> int:
        return self.bounds[-1]

    @property
    def first_row(self) -> int:
        return self.bounds[self.rank]

    @property
    def own_rows(self) -> slice:
        """Rows owned by this rank; empty if there are fewer blocks than ranks."""
        return slice(self.bounds[self.rank], self.bounds[self.rank + 1])

    def slices(self, num_rows: int) -> list[list[slice]]:
        """Return the rows of every rank in slices, the k-th of every rank in the k-th list.

        A list has at most `num_rows` rows, but at least one per rank; later slices may be empty.
        """
        step = max(1, num_rows // self.size)
        return [
            [
                slice(min(first + start, end), min(first + start + step, end))
                for first, end in itertools.pairwise(self.bounds)
            ]
            for start in range(0, max(self.counts()), step)
        ]

    def counts(self, block: int = 1) -> list[int]:
        """Return how many blocks of so many rows each rank owns; the last may have fewer rows."""
        ends = [-(-bound // block) for bound in self.bounds]
        return [end - start for start, end in itertools.pairwise(ends)]


def shard_of(num_rows: int, rank: int, size: int) -> Shard | None:
    """Return a balanced sharding in blocks; None without a whole block, or with one rank."""
    if size == 1 or num_rows < BLOCK_ROWS:
        return None
    blocks = -(-num_rows // BLOCK_ROWS)
    bounds = [min(num_rows, BLOCK_ROWS * (blocks * r // size)) for r in range(size + 1)]
    return Shard(tuple(bounds), rank)
