"""The cut of a few-row product with an NVFP4 weight into programs and stages, by its shape.

The kernel is that of `precision.hopper.nvfp4_rows`. No bit depends on the cut. Cuts were measured
at the shapes of some models; at any other one a cut keeps as many of its stages as fit in a
program's shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jetrl.precision.hopper.adapter_rows import DOWN_PROGRAM_REGISTERS, down_program_bytes
from jetrl.precision.hopper.launch import MULTIPROCESSORS
from jetrl.precision.hopper.stages import (
    BARRIER,
    SHARED_MEMORY,
    fitting_stages,
    program_bytes,
    room_beside,
)
from jetrl.precision.layout import cdiv
from jetrl.precision.nvfp4_layout import BLOCK, UNIT

MOST_ROWS = 128  # of a program
_REGISTERS = 65536  # of a multiprocessor
_UNIT_BYTES = 2048 + 256  # of the codes and scales of 32 rows and 128 columns


@dataclass(frozen=True)
class Tiles:
    """The cut of a product into programs and stages.

    Attributes:
        units: units of 32 rows of the weight that a program has: 1 or 2.
        group: blocks of 128 along K of a stage: 1 or 2, or 4 where parts are made side by side.
        together: whether the parts of K are made side by side; up to 16 rows of X.
        sides: how many times so many units a program has, each by four warps that read the same X;
            1 where parts are made side by side.
    """

    units: int
    group: int
    rounds: int
    registers: int
    together: bool = False
    sides: int = 1

    def rings(self, parts: int) -> int:
        """Return how many rings of stages a program has, of a sum in so many parts of K."""
        return cdiv(parts, 2) if self.together else 1

    def chains(self, parts: int) -> int:
        """Return how many parts of K a ring makes in turn, of so many."""
        return min(parts, 2) if self.together else 1

    def block_rows(self, rows: int) -> int:
        """Return the rows of X that a program has, of so many."""
        return min(MOST_ROWS, max(8, 1 << (rows - 1).bit_length()))


def shared_bytes(tiles: Tiles, rows: int, parts: int, rank: int) -> int:
    """Return the most bytes of shared memory that a program of a cut takes.

    Args:
        rank: Columns of an adapter's B; 0 without an adapter.
    """
    return program_bytes(tiles.rounds, *_stage_and_beside(tiles, rows, parts, rank))


def _stage_and_beside(tiles: Tiles, rows: int, parts: int, rank: int) -> tuple[int, int]:
    """Return the bytes of a stage of all rings, and of the sums and the adapter beside the stages.

    Args:
        rank: Columns of an adapter's B, or 0.
    """
    rings, block_m, units = tiles.rings(parts), tiles.block_rows(rows), tiles.sides * tiles.units
    stage = tiles.group * (block_m * BLOCK * 2 + units * _UNIT_BYTES) + 2 * BARRIER
    sums = tiles.chains(parts) * 64 * block_m * 4 + BARRIER if rings > 1 else 0
    adapter = rank * 2 * (tiles.sides * block_m + units * UNIT) + BARRIER if rank else 0
    return rings * stage, sums + adapter


def tiles_for(rows: int, n: int, parts: int) -> Tiles:
    """Return the cut of a product of some rows of X with a weight of n rows."""
    return _with_stages_in(SHARED_MEMORY, _measured_cut(rows, n, parts), rows, parts, 0)


def _with_stages_in(room: int, tiles: Tiles, rows: int, parts: int, rank: int) -> Tiles:
    """Return a cut whose stages, at least 2, fit in the given bytes of shared memory.

    Args:
        rank: Columns of an adapter's B, or 0.
    """
    sizes = _stage_and_beside(tiles, rows, parts, rank)
    return replace(tiles, rounds=fitting_stages(tiles.rounds, *sizes, room))


def _measured_cut(rows: int, n: int, parts: int) -> Tiles:
    """Return the cut that was fastest at the shapes of the models that were measured.

    Where 64 rows of the weight a program would leave multiprocessors idle, a program has 32. wgmma
    takes as long for 32 as for 64, so two such programs a multiprocessor are too many there. With
    some dozens of rows reading X takes longer than reading the weight, so a program has 192 rows of
    a wide weight where all programs run at once.

    Where there is no more than one program for each multiprocessor, its stages take more than half
    of the shared memory: or else two programs were put on one, and others had none (26 microseconds
    in place of 20, with an adapter, for 8 rows and a weight of 4,096 x 12,288).
    """
    narrow, wide = n <= 32 * MULTIPROCESSORS, n > 64 * MULTIPROCESSORS
    if rows <= 16 and parts > 1:
        if not narrow and parts == 2:
            return Tiles(2, 4, 5, 112, True) if rows <= 8 else Tiles(2, 4, 4, 80, True)
        if not narrow:
            return Tiles(2, 2, 9 if rows <= 8 else 7, 80, True)
        if parts == 2:
            return Tiles(1, 4, 7 if rows <= 8 else 5, 80, True)
        return Tiles(1, 4, 4 if rows <= 8 else 3, 80, True)
    if wide and 16 < rows <= 64 and n <= 192 * MULTIPROCESSORS:
        return Tiles(2, 1, 6, 112, sides=3)
    if rows <= 32:
        units = 1 if narrow or (rows <= 16 and not wide) else 2
        rounds = 6 if narrow else 4 if wide else 5
        return Tiles(units, 2, rounds, 80 if rows <= 16 or narrow else 112)
    if rows <= 64:
        return Tiles(1, 2, 4, 128) if narrow else Tiles(2, 1 if wide else 2, 4, 128)
    return Tiles(2, 1, 3, 128) if wide or rows > 128 else Tiles(2, 2, 3, 168)


def tiles_beside(rows: int, n: int, parts: int, rank: int) -> Tiles:
    """Return the cut of a product to which an adapter's is added.

    It leaves room on each multiprocessor for the tiles of u and B, and for a program of the product
    with A, which runs there meanwhile, so that all programs run at once that would without it.
    """
    tiles = _measured_cut(rows, n, parts)
    threads = 128 * (tiles.rings(parts) * tiles.sides + 1)
    programs = cdiv(rows, tiles.block_rows(rows)) * cdiv(n, UNIT * tiles.units * tiles.sides)
    # Programs of a multiprocessor: no more than there are, nor than its registers are enough for.
    programs = min(cdiv(programs, MULTIPROCESSORS), _REGISTERS // (threads * tiles.registers))
    room = room_beside(down_program_bytes(rows), programs)
    tiles = _with_stages_in(room, tiles, rows, parts, rank)
    registers = (_REGISTERS - DOWN_PROGRAM_REGISTERS) // (programs * threads) // 8 * 8
    return replace(tiles, registers=min(tiles.registers, registers))
