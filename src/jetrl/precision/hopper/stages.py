"""Count how many stages of copies fit in the shared memory of a Hopper multiprocessor.

A program that multiplies few rows copies its operands into rings of stages: the more of them, the
more bytes are on their way. The cuts of products (`gemm_tiles`, `nvfp4_tiles`) say how many were
fastest at the shapes that were measured, and count here how many fit at any other.
"""

from __future__ import annotations

SHARED_MEMORY = 227 * 1024  # bytes that a program may have
TRITONS_OWN = 512  # bytes, at most, of what Triton keeps there itself: arguments of warps, padding
BARRIER = 8  # bytes
_OF_SYSTEM = 1024  # bytes that the system has beside each program's
_FEWEST = 2


def program_bytes(stages: int, stage: int, beside: int) -> int:
    """Return the most bytes of shared memory that a program takes; what Triton adds may be less.

    Args:
        stage: Bytes of a stage of all rings, its barriers among them.
        beside: Bytes of all else, such as the tiles of an adapter.
    """
    return stages * stage + beside + TRITONS_OWN


def fitting_stages(fastest: int, stage: int, beside: int, room: int) -> int:
    """Return how many stages a program has: as many as were fastest, or as fit, but at least 2.

    Args:
        stage: As of `program_bytes`.
        beside: As of `program_bytes`.
        room: Bytes of shared memory that the program may take.
    """
    stages = fastest
    while stages > _FEWEST and program_bytes(stages, stage, beside) > room:
        stages -= 1
    return stages


def room_beside(other: int, programs: int = 1) -> int:
    """Return the bytes of each of some programs on a multiprocessor that has another one as well.

    Args:
        other: Bytes of shared memory of the other program.
        programs: How many programs share what it leaves.
    """
    multiprocessor = SHARED_MEMORY + _OF_SYSTEM
    return (multiprocessor - other - _OF_SYSTEM) // programs - _OF_SYSTEM
