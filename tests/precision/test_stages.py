"""A program has as many stages of copies as fit in shared memory to the last byte, at least 2."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="it is there on Linux alone")

from jetrl.precision.hopper.launch import (
    SHARED_MEMORY,
    TRITONS_OWN,
    fitting_stages,
    program_bytes,
    room_beside,
)


@pytest.mark.parametrize(
    ("room", "stages"), [(4, 4), (4 - 1 / 1024, 3), (9, 5), (2.5, 2), (0.5, 2)], ids=str
)
def test_stages_fit(room: float, stages: int) -> None:
    beside = 300
    found = fitting_stages(5, 1024, beside, int(room * 1024) + beside + TRITONS_OWN)
    assert found == stages
    assert program_bytes(found, 1024, beside) == stages * 1024 + beside + TRITONS_OWN


def test_programs_share_a_multiprocessor() -> None:
    """A multiprocessor has 228 KiB, of which the system takes one for each program."""
    assert SHARED_MEMORY == 227 * 1024
    assert room_beside(48 * 1024) == (228 - 1 - 48 - 1) * 1024
    assert 2 * (room_beside(48 * 1024, programs=2) + 1024) == (228 - 1 - 48) * 1024
