"""`jetrl bench mismatch`: which component has which form, and the rows of the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import mismatch


def test_rows_are_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mismatch.json"
    words = ["--shape", "tiny", "--device", "cpu", "--layers", "1", "--load", "2x4x30"]
    mismatch.main([*words, "--out", str(out)])
    written = json.loads(out.read_text())
    assert written["command"].endswith("--shape tiny --device cpu --layers 1 --load 2x4x30")
    rows = {row["sampler"]: row for row in written["rows"]}
    assert list(rows) == list(mismatch.plans())
    for name in ("preset unified", "preset jet", "preset bf16, pinned sums"):
        assert (rows[name]["exact_plan"], rows[name]["different"]) == (True, 0)
    for name in ("all five in the sampler's form", "preset mixed", "preset alike"):
        assert rows[name]["different"] > 0
        assert rows[name]["k3_kl"] > 0
    assert "weights in the trainer's form" in capsys.readouterr().out
