"""The command that makes a run of a study on several processes: its weights and its verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
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


def test_the_same_command_goes_on_with_a_run_that_was_cut(tmp_path: Path) -> None:
    """A call of limited length ended 74 steps before the last of two runs did, and all was lost."""
    typed = command(tmp_path, 20, 1)
    metrics = tmp_path / "runs"
    with subprocess.Popen(
        typed,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=ROOT,
    ) as cut:
        until = time.monotonic() + 200
        while not steps_of(metrics) and time.monotonic() < until:
            time.sleep(0.05)
        os.killpg(cut.pid, signal.SIGTERM)
    assert cut.returncode
    assert 0 < steps_of(metrics) < 20
    subprocess.run(typed, check=True, capture_output=True, cwd=ROOT)
    record = json.loads((tmp_path / "ranks.json").read_text(encoding="utf-8"))
    assert record["equal"] is None  # a single run has nothing to be equal to
    assert [row["steps"] for row in record["rows"]] == [20]
    made = {file: file.read_bytes() for file in metrics.glob("*/metrics.jsonl")}
    subprocess.run(typed, check=True, capture_output=True, cwd=ROOT)
    assert {file: file.read_bytes() for file in metrics.glob("*/metrics.jsonl")} == made


def steps_of(folder: Path) -> int:
    """Return the largest number of steps that a run with mismatch has written below a folder."""
    return max(
        (
            file.read_text(encoding="utf-8").count("mismatch/num_tokens")
            for file in folder.glob("*/metrics.jsonl")
        ),
        default=0,
    )
