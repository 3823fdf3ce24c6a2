"""Decode of integer attention by the portable kernels, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_decode_has_the_bits_of_the_reference() -> None:
    pytest.importorskip("triton", reason="only available on Linux")
    program = Path(__file__).with_name("interpreted_attention_decode.py")
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found, too_long_is_nan = json.loads(done.stdout)
    assert {case: result for case, result in found.items() if result["different"]} == {}
    special = [result for case, result in found.items() if "special=''" not in case]
    assert all(result["nan"] and result["finite"] for result in special), special
    assert too_long_is_nan
