"""Run a program of this folder in Triton's interpreter on a CPU.

The program has a process of its own, since the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def interpreted(name: str) -> Any:
    """Return what the program prints as JSON; skip the test where Triton cannot be installed."""
    pytest.importorskip("triton", reason="it is there on Linux alone")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name(name))],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
