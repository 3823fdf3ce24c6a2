"""The command that makes a run of a study on several processes: its weights and its verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.study.conftest import TINY

ROOT = Path(__file__).parents[2]


def test_a_run_of_a_study_has_the_same_weights_on_two_processes(tmp_path: Path) -> None:
    study, out = tmp_path / "tiny.toml", tmp_path / "ranks.json"
    study.write_text(TINY.replace("OUT", str(tmp_path / "out")), encoding="utf-8")
    script = ROOT / "benchmarks" / "study" / "twin_ranks.py"
    words = ["--study", study, "--arm", "unified", "--processes", 1, 2, "--steps", 2]
    words += ["--folder", tmp_path / "runs", "--out", out]
    command = [sys.executable, str(script), *map(str, words)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    record = json.loads(out.read_text(encoding="utf-8"))
    one, two = record["rows"]
    assert record["equal"]
    assert (one["processes"], two["processes"], one["steps"], two["steps"]) == (1, 2, 2, 2)
    assert one["weights_sha256"] == two["weights_sha256"]
    assert len(one["weights_sha256"]) == 64
    assert one["compared_tokens"] == two["compared_tokens"] > 0
    assert one["different_tokens"] == two["different_tokens"] == 0
