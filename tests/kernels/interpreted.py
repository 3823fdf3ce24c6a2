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
    folder = Path(__file__).parent
    # Programs import from the tests and benchmarks of this tree.
    paths = [str(folder.parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(folder / name)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
