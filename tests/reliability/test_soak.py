"""The short form of `make soak`: a few steps with every kind of fault."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.distributed.ranks import apart

sys.path.insert(0, str(Path(__file__).parent))


def _soaked(folder: Path) -> None:
    from soak import soak

    soak(folder, 20, 3, 1.0)


def test_a_run_in_which_everything_goes_wrong_ends_as_one_in_which_nothing_does(
    tmp_path: Path,
) -> None:
    apart(_soaked, tmp_path)
