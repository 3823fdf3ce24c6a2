"""The cut of an FP8 product of few rows into programs and stages, by its shape.

The kernel is that of `precision.hopper.gemm_rows`. No bit depends on the cut. Cuts were measured at
the shapes of some models (docs/notes-gemm.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jetrl.precision.hopper.adapter_rows import down_program_bytes
from jetrl.precision.hopper.launch import MULTIPROCESSORS
from jetrl.precision.hopper.stages import BARRIER, fitting_stages, room_beside
from jetrl.precision.layout import cdiv


@dataclass(frozen=True)
class Tiles:
    """The cut of a product into programs and stages.

    Attributes:
        block_m: rows of X that a program has: 64 or 128.
        block_n: rows of such a tile.
        group: blocks of 128 along K that share a pair of barriers.
    """

    block_m: int
    parts: int
    block_n: int
    rounds: int
    group: int


def tiles_for(rows: int, n: int) -> Tiles:
    """Return the cut of a product with a weight of n rows.

    All programs are resident at once, one a multiprocessor or, where tiles are small, two: that
    matters more than equal shares (docs/notes-gemm.md).
    """
    if rows > 64:
        for tiles in (Tiles(128, 1, 32, 5, 2), Tiles(128, 1, 64, 4, 2), Tiles(128, 3, 32, 7, 1)):
            if cdiv(n, tiles.parts * tiles.block_n) <= MULTIPROCESSORS:
                return tiles
        return Tiles(128, 3, 64, 5, 1)
    if n <= 16 * MULTIPROCESSORS:
        return Tiles(64, 1, 16, 4, 4)
    if n <= 32 * MULTIPROCESSORS:
        return Tiles(64, 1, 32, 4, 4)
    if n <= 64 * MULTIPROCESSORS:
        return Tiles(64, 1, 32, 4, 2)
    if n <= 128 * MULTIPROCESSORS:
        return Tiles(64, 1, 64, 3, 2)
    if n <= 192 * MULTIPROCESSORS:
        return Tiles(64, 3, 64, 6, 1)
    return Tiles(64, 2, 64, 4, 1)


def tiles_beside(rows: int, n: int, rank: int) -> Tiles | None:
    """Return the cut of a product to which an adapter's is added; None where a library is faster.

    It leaves room for the tiles of u and B, and for a program of the product with A, which runs on
    the same multiprocessor meanwhile. Up to 256 rows are cut where all programs run at once.
    """
    tiles = tiles_for(rows, n)
    if rows > 128:
        if rows > 256 or n > 48 * MULTIPROCESSORS:
            return None
        tiles = Tiles(128, 1, 64, 4, 2) if n <= 32 * MULTIPROCESSORS else Tiles(128, 3, 32, 7, 1)
    block = (tiles.block_m + tiles.parts * tiles.block_n) * 128 + tiles.block_m * 4
    adapter = tiles.parts * (tiles.block_m + tiles.block_n) * rank * 2 + BARRIER
    room = room_beside(down_program_bytes(rows))
    stage = tiles.group * block + 2 * BARRIER
    return replace(tiles, rounds=fitting_stages(tiles.rounds, stage, adapter, room))
