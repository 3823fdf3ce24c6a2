"""Work lists of the attention backward: blocks of keys with their queries, and vice versa.

A dK, dV program has a block of 128 keys and loops over all blocks of 64 queries that attend to it.
All branches of a stem attend to its keys. If they have more blocks of queries than the longest
sequence, they are divided into parts, each with its own program and float32 sums: the first part
has the queries of the stem and the branches that fit, the others the remaining branches in order.
The division depends only on the lengths in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

BACKWARD_KEYS = 128  # keys per dK, dV tile
BACKWARD_QUERIES = 64  # queries per dQ tile
DS_TILE_BYTES = BACKWARD_KEYS * BACKWARD_QUERIES * 2  # bfloat16
STORED_DS_BYTES = 5 * 2**29  # maximum stored at once; 4 x 4096 tokens of 32 heads take 2.06 GiB
INTEGER_SUMS_BYTES = 2**30  # of float32 sums of dK and dV at once, in integer attention
# A part can always have this many blocks of queries: the sums of a part take 128 KB per head with
# head_dim 128, and many small parts would cost more traffic than better balance saves.
_FEWEST_OF_A_PART = 16


class Run(NamedTuple):
    """Consecutive rows of a packed batch; `stem` is the index of a branch's stem, else -1."""

    start: int
    length: int
    stem: int

    @property
    def query_blocks(self) -> int:
        return -(-self.length // BACKWARD_QUERIES)


@dataclass
class BackwardLists:
    """Backward work lists, with the columns that `QueryTiles` defines."""

    key_tiles: list[tuple[int, ...]] = field(default_factory=list)
    divided_key_tiles: list[tuple[int, ...]] = field(default_factory=list)
    query_tiles: list[tuple[int, ...]] = field(default_factory=list)
    stored_query_tiles: list[tuple[int, ...]] = field(default_factory=list)
    branches: list[tuple[int, ...]] = field(default_factory=list)
    stored_tiles: int = 0
    num_parts: int = 0


def backward_lists(runs: Sequence[Run]) -> BackwardLists:
    """Return the backward work lists of a packed batch, each sorted longest item first."""
    lists = BackwardLists()
    branches: list[list[Run]] = [[] for _ in runs]  # per stem
    first_block = [0] * len(runs)  # per branch, counted over all branches of its stem
    for i, run in enumerate(runs):
        if run.stem >= 0:
            first_block[i] = sum(branch.query_blocks for branch in branches[run.stem])
            branches[run.stem].append(run)
    # The maximum blocks of queries per part: those of the longest sequence, with its stem.
    stems = (runs[r.stem].query_blocks if r.stem >= 0 else 0 for r in runs)
    longest = max((r.query_blocks + s for r, s in zip(runs, stems, strict=True)), default=0)
    most = max(longest, _FEWEST_OF_A_PART)
    with_branches = [0] * len(runs)  # per stem, its first dS tile with its branches
    num_blocks = [sum(branch.query_blocks for branch in of_stem) for of_stem in branches]
    work: list[tuple[int, tuple[int, ...]]] = []  # blocks of queries of each entry of key_tiles
    for i, run in enumerate(runs):
        start, end, blocks = run.start, run.start + run.length, run.query_blocks
        tall = -(-run.length // BACKWARD_KEYS)
        # Block of keys j has blocks - 2 j dS tiles in the run; sum over all j.
        own = lists.stored_tiles
        with_branches[i] = own + tall * blocks - (tall - 1) * tall
        lists.stored_tiles = with_branches[i] + tall * num_blocks[i]
        stem = runs[run.stem] if run.stem >= 0 else Run(start, 0, -1)
        step = num_blocks[run.stem] if run.stem >= 0 else 0
        for j, first_row in enumerate(range(start, end, BACKWARD_KEYS)):
            # Block of keys j pairs with blocks of queries from 2 j on; its dS tiles start at the
            # sum of the counts before. The first tile is for block 2 j.
            per_key = BACKWARD_KEYS // BACKWARD_QUERIES
            first_tile = own + j * (blocks - j - 1) + per_key * j
            tile = (first_row, end, first_tile, with_branches[i] + j * num_blocks[i])
            work += _key_tiles(lists, tile, blocks - per_key * j, branches[i], most)
            with_stem = with_branches[run.stem] + first_block[i] + per_key * j
            of_stem = (stem.start, stem.length // BACKWARD_KEYS, with_stem, step)
            lists.stored_query_tiles.append((start, first_row, end, own, *of_stem))
        first = 0
        for branch in branches[i]:
            lists.branches.append((branch.start, branch.start + branch.length, first))
            first += branch.query_blocks
        lists.query_tiles.extend(
            (start, first_row, end, stem.start, stem.start + stem.length)
            for first_row in range(start, end, BACKWARD_QUERIES)
        )
    # Longest first: keys by their number of queries, queries by their number of keys.
    lists.key_tiles.extend(record for _, record in sorted(work, key=lambda w: -w[0]))
    lists.query_tiles.sort(key=lambda t: t[0] - t[1] - (t[4] - t[3]))
    lists.stored_query_tiles.sort(key=lambda t: t[0] - t[1] - t[5] * BACKWARD_KEYS)
    return lists


def _key_tiles(
    lists: BackwardLists, tile: tuple[int, ...], own: int, branches: Sequence[Run], most: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Return the entries of `key_tiles` for a block of keys, one per part, and their work."""
    row, end, first_own_tile, with_branches = tile
    # A part takes branches until the next one would exceed `most` blocks.
    parts, counts = [own], [0]
    for branch in branches:
        if parts[-1] + branch.query_blocks > most:
            parts.append(0)
            counts.append(0)
        parts[-1] += branch.query_blocks
        counts[-1] += 1
    divided = len(parts) > 1
    if divided:
        lists.divided_key_tiles.append((row, lists.num_parts, len(parts)))
    first = len(lists.branches)
    entries: list[tuple[int, tuple[int, ...]]] = []
    for part, (blocks, count) in enumerate(zip(parts, counts, strict=True)):
        place = lists.num_parts + part if divided else -1
        first_tile = -1 if part else first_own_tile
        record = (row, end, first_tile, first, count, with_branches, place)
        entries.append((blocks, record))
        first += count
    lists.num_parts += len(parts) if divided else 0
    return entries
