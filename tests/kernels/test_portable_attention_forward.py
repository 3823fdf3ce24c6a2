"""The portable attention forward has the bits of `attention.integer`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_have_the_bits_of_the_reference() -> None:
    """Triton's interpreter runs them on the CPU, in a process of its own."""
    pytest.importorskip("triton", reason="it is there on Linux alone")
    program = Path(__file__).with_name("interpreted_attention_forward.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) >= 8
    assert {name: counts for name, counts in found.items() if any(counts.values())} == {}
