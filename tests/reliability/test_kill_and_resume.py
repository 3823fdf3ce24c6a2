"""The short form of `make soak`'s kills: a few, each at a random moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HARNESS = Path(__file__).with_name("kill_and_resume.py")


def test_a_run_killed_anywhere_ends_as_if_nobody_had_touched_it() -> None:
    command = [sys.executable, str(HARNESS), "--kills", "12", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit" in done.stdout
