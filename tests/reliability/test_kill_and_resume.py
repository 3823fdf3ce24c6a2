"""The short form of `make soak`'s kills: a few, each at a random moment."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.distributed.ranks import apart

sys.path.insert(0, str(Path(__file__).parent))
import faults


def test_points_are_in_the_sources() -> None:
    for place, _ in [*faults.POINTS.values(), *faults.DISK_POINTS.values()]:
        owner, name = faults.found(place)
        assert callable(getattr(owner, name, None)), place


def _killed(folder: Path) -> int:
    from kill_and_resume import kill_and_resume

    return kill_and_resume(folder, 5, 5, "cpu", []).total()


def test_a_run_killed_anywhere_ends_as_if_nobody_had_touched_it(tmp_path: Path) -> None:
    assert apart(_killed, tmp_path) >= 5
