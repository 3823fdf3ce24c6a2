"""The command that makes a run of a study on several processes: its weights and its verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.study.conftest import TINY

ROOT = Path(__file__).parents[2]


def command(folder: Path, steps: int, *processes: int) -> list[str]:
    """Return the command that makes a tiny run on these numbers of processes in a folder."""
    study = folder / "tiny.toml"
    study.write_text(TINY.replace("OUT", str(folder / "out")), encoding="utf-8")
    words = ["--study", study, "--arm", "unified", "--processes", *processes, "--steps", steps]
    words += ["--folder", folder / "runs", "--out", folder / "ranks.json"]
    return [sys.executable, "-m", "benchmarks.study.twin_ranks", *map(str, words)]


def test_a_run_of_a_study_has_the_same_weights_on_two_processes(tmp_path: Path) -> None:
    subprocess.run(
        command(tmp_path, 2, 1, 2), check=True, capture_output=True, timeout=300, cwd=ROOT
    )
    record = json.loads((tmp_path / "ranks.json").read_text(encoding="utf-8"))
    one, two = record["rows"]
    assert record["equal"]
    assert (one["processes"], two["processes"], one["steps"], two["steps"]) == (1, 2, 2, 2)
    assert one["weights_sha256"] == two["weights_sha256"]
    assert len(one["weights_sha256"]) == 64
    assert one["compared_tokens"] == two["compared_tokens"] > 0
    assert one["different_tokens"] == two["different_tokens"] == 0
