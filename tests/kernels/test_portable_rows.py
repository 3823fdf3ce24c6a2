"""The portable kernels of norms, rotary and AdamW: bits of the references, by the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_row_kernels_have_the_bits_of_the_references() -> None:
    pytest.importorskip("triton", reason="it is there on Linux alone")
    program = Path(__file__).with_name("interpreted_rows.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
