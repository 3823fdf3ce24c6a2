"""Result files made by arithmetic alone match what their commands write.

Effects of studies have their own test (tests/study/test_committed_studies.py); the other files of
benchmarks/results take minutes of a CPU, or a GPU.
"""

import json
from pathlib import Path

import pytest

from benchmarks import memory_many_gpus, scaling

CPU = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu"


@pytest.mark.parametrize(("benchmark", "most"), [(memory_many_gpus, 32), (scaling, 64)])
def test_a_committed_file_is_what_its_command_writes(benchmark, most, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "COUNTS", (1, 8, 64))  # 1,024 GPUs take over a minute
    name = f"{benchmark.__name__.rpartition('.')[2]}.json"
    benchmark.main(["--out", str(tmp_path / name)])
    made, committed = (json.loads((at / name).read_text("utf-8")) for at in (tmp_path, CPU))
    committed["rows"] = [row for row in committed["rows"] if row["gpus"] <= most]
    for key in ("versions", "date", "commit"):
        assert made.pop(key)
        assert committed.pop(key)
    assert made == committed, f"stale: {committed['command']} --out benchmarks/results/cpu/{name}"
