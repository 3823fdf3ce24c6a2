"""Whole runs on one, two, three and four ranks have the same results, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed.ranks import run_ranks
from tests.distributed.runs import results, run_small


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(run_small(str(tmp_path_factory.mktemp("runs")), "alone"))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_run_has_the_same_results_on_any_number_of_ranks(
    size: int, alone: Path, tmp_path: Path
) -> None:
    path = Path(run_ranks(size, run_small, str(tmp_path), "run")[0])
    expected, found = results(alone), results(path)
    assert found["metrics"] == expected["metrics"]
    assert [name for name in expected if found.get(name) != expected[name]] == []
    assert found.keys() == expected.keys()
    assert max(line.get("dynamic_sampling/rounds", 0) for line in found["metrics"]) > 1
    logs = sorted(file.name for file in (path / "ranks").iterdir())
    assert logs == [f"rank_{rank}.txt" for rank in range(1, size)]
