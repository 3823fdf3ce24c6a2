"""A run on the GPU, killed five times at random moments, ends as one that nobody touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
HARNESS = Path(__file__).parents[1] / "reliability" / "kill_and_resume.py"


@pytest.mark.long(105)
def test_killed_and_resumed_on_the_gpu() -> None:
    command = [sys.executable, str(HARNESS), "--kills", "5", "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit" in done.stdout
