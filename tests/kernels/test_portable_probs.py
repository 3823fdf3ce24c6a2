"""The portable kernels of log-probs and sampling have the bits of their references."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_have_the_bits_of_the_references() -> None:
    """Triton's interpreter runs them on the CPU, in a process of its own."""
    pytest.importorskip("triton", reason="it is there on Linux alone")
    program = Path(__file__).with_name("interpreted_probs.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {}
