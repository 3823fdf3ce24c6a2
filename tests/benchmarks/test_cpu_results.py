"""A result file that arithmetic alone makes is what its command writes.

Effects of studies have their own test (tests/study/test_committed_studies.py); the other files of
benchmarks/results take minutes of a CPU, or a GPU.
"""

import json
from pathlib import Path

from benchmarks import memory_many_gpus

COMMITTED = Path(__file__).parents[2] / "benchmarks/results/cpu/memory_many_gpus.json"


def test_the_committed_memory_plans_are_what_the_command_writes(tmp_path):
    memory_many_gpus.main(["--out", str(tmp_path / "made.json")])
    made, committed = (
        json.loads(p.read_text("utf-8")) for p in (tmp_path / "made.json", COMMITTED)
    )
    for key in ("versions", "date", "commit"):
        assert made.pop(key)
        assert committed.pop(key)
    assert made == committed, f"stale: {committed['command']} --out {COMMITTED}"
