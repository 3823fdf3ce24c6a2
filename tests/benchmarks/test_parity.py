"""`jetrl bench parity`: what it compares, and the proof that it times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import parity
from jetrl.models.families import SHAPES


def test_loads_and_the_proof_are_rows_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The proof samples contexts as long as the model allows, up to 2,100 tokens.
    monkeypatch.setitem(SHAPES["tiny"], "max_position_embeddings", 450)
    out = tmp_path / "parity.json"
    words = ["--shape", "tiny", "--device", "cpu", "--plan", "unified", "--plan", "mixed"]
    parity.main([*words, "--proof", "--load", "3x4x30", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["command"].endswith("--plan unified --plan mixed --proof --load 3x4x30")
    assert found["versions"]["torch"] == torch.__version__
    proof, unified, _, mixed = found["rows"]
    assert min(proof["proof_s"]) > 0
    assert (len(proof["proof_s"]), proof["broken"]) == (2, [])
    assert (unified["tokens"], unified["different"], unified["longest_context"]) == (12, 0, 34)
    assert mixed["different"] > 0
    assert "first operation that differs" in mixed["located"]
