"""The GPU's kernels compile for a Hopper GPU under the Triton that is installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="it is there on Linux alone")

COMPILE = Path(__file__).with_name("compile_kernels.py")
SOURCE = Path(__file__).parents[2] / "src" / "jetrl"


@pytest.mark.timeout(300)
def test_every_kernel_compiles(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(COMPILE), str(out)], capture_output=True, text=True
    )
    assert out.exists(), done.stderr
    found = json.loads(out.read_text())
    assert found["failed"] == {}
    assert found["broken"] == {}
    launched = {
        name
        for file in SOURCE.rglob("*.py")
        for name in re.findall(r"^ +(?:\w+ = )?(\w*kernel)\[", file.read_text(), re.MULTILINE)
    }
    assert len(launched) > 20
    assert launched - {name.rpartition(".")[2] for name in found["compiled"]} == set()
