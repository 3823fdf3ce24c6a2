"""The short form of `make soak`'s kills: a few, each at a random moment."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import faults

HARNESS = Path(__file__).with_name("kill_and_resume.py")


@pytest.mark.parametrize("point", [*faults.POINTS, *faults.DISK_POINTS])
def test_points_are_in_the_sources(point: str) -> None:
    module, path, _ = {**faults.POINTS, **faults.DISK_POINTS}[point]
    owner = importlib.import_module(module)
    for part in path.split("."):
        owner = getattr(owner, part)
    assert callable(owner)


@pytest.mark.parametrize("seed", ["5", "6"])
def test_a_run_killed_anywhere_ends_as_if_nobody_had_touched_it(seed: str) -> None:
    command = [sys.executable, str(HARNESS), "--kills", "4", "--seed", seed]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit" in done.stdout
