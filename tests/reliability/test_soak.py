"""The short form of `make soak`: a few steps with every kind of fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).with_name("soak.py")


def test_a_run_in_which_everything_goes_wrong_ends_as_one_in_which_nothing_does() -> None:
    command = [sys.executable, str(SOAK), "--steps", "30", "--pace", "1", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the two runs have the same bits" in done.stdout
