"""Machine code that gives a stage back too early is told from code that does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from stage_reads import barrier_of, last_barrier, reads_under_way


def line(address: int, text: str, code: int, control: int) -> str:
    """Return an instruction as the disassembler writes it, in two lines."""
    return f" /*{address:04x}*/ {text} ; /* 0x{code:016x} */\n /* 0x{control:016x} */"


# As the assembler made them of an NVFP4 product of 16 rows that was wrong on a GPU.
LOAD = line(0x00, "LDSM.16.M88.4 R24, [R12+0x1800]", 0x001800000C18783B, 0x0000620000000200)
BARRIER = line(0x40, "BAR.SYNC.DEFER_BLOCKING 0x0, 0x80", 0x0002000000007B1D, 0x000FE20000010000)
ARRIVAL = "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2+UR5], RZ"
LEAVE = line(0x60, ARRIVAL, 0x000000FF02FF89A7, 0x0001E20008100005)
# As it made them of the same product with a fence: the second instruction waits for the first.
FENCE = line(0x10, "MEMBAR.ALL.CTA", 0x0000000000007992, 0x0005EC0000008000)
FENCE += "\n" + line(0x20, "FENCE.VIEW.ASYNC.S", 0x00000000000073C6, 0x004EA20000000000)
# A product that waits for the load's scoreboard, which is 1, and one that waits for none.
PRODUCT = "HMMA.16816.F32.BF16 R60, R4, R24, R60"
USE = line(0x30, PRODUCT, 0x00000018043C723C, 0x002FE2000004183C)
OTHER = line(0x30, PRODUCT, 0x00000018043C723C, 0x000FE2000004183C)
AGAIN = line(0x70, "@P1 BRA `(.L_x_1)", 0x0000000000007947, 0x000FEA000383FFFF)


EARLY = [
    (LOAD, BARRIER, LEAVE),
    (LOAD, OTHER, BARRIER, LEAVE),
    (LOAD, BARRIER, USE, LEAVE),  # other warps may be behind
    (FENCE, LOAD, BARRIER, LEAVE),
    (".L_x_1:", BARRIER, LEAVE, LOAD, AGAIN),  # in the turn before
]
LATE = [(LOAD, FENCE, BARRIER, LEAVE), (LOAD, USE, BARRIER, LEAVE), (BARRIER, LEAVE, LOAD, USE)]
LATE += [(".L_x_1:", BARRIER, LEAVE, LOAD, USE, AGAIN)]


@pytest.mark.parametrize("code", [*EARLY, *LATE], ids=range(9))
def test_reads_under_way_are_found(code: tuple[str, ...]) -> None:
    found = reads_under_way("\n".join(code))
    assert [x.endswith(": 0000") for x in found] == [True] * (code in EARLY)


def test_the_last_barrier_is_told_from_others() -> None:
    last = LEAVE.replace("[R2+UR5]", "[UR7+0x23ba0]")
    code = "\n".join((LOAD, BARRIER, LEAVE.replace("[R2+UR5]", "[UR9+0x23b80]"), last, LEAVE))
    barriers = [barrier_of(arrival) for arrival in reads_under_way(code)]
    assert barriers == [0x23B80, 0x23BA0, 0]
    assert last_barrier(code) == 0x23BA0
