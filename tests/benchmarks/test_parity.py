"""`jetrl bench parity`: what it compares, and the proof that it times."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks import parity


def test_loads_are_rows_of_the_file(tmp_path: Path) -> None:
    out = tmp_path / "parity.json"
    words = ["--shape", "tiny", "--device", "cpu", "--plan", "unified", "--plan", "mixed"]
    parity.main([*words, "--load", "3x4x30", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["command"].endswith("--plan unified --plan mixed --load 3x4x30")
    assert found["versions"]["torch"] == torch.__version__
    unified, mixed = found["rows"]
    assert (unified["tokens"], unified["different"], unified["longest_context"]) == (12, 0, 34)
    assert mixed["different"] > 0
    assert "first operation that differs" in mixed["located"]
