"""A results file that was lost: what the runs left goes into a new one, or it is said why not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from benchmarks.study.results import read_results
from tests.study.test_study import NoPool

from jetrl.cli.main import main


@pytest.fixture
def left(tiny_study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The study file of the tiny study with all that it left but its results file and weights.

    No command may be started.
    """
    monkeypatch.setattr("benchmarks.study.running.Pool", NoPool)
    monkeypatch.setattr("benchmarks.study.scheduler.POLL_S", 0.0)
    shutil.copytree(
        tiny_study.parent,
        tmp_path,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("results.json", "checkpoints", "*.html", "plots"),
    )
    for folder in (tmp_path / "out" / "runs").iterdir():
        shutil.rmtree(folder / "model", ignore_errors=True)
    for path in tmp_path.rglob("*"):
        if path.suffix in (".toml", ".json") and path.is_file():
            text = path.read_text()
            path.write_text(text.replace(str(tiny_study.parent), str(tmp_path)))
    return tmp_path / "tiny.toml"


def test_runs_whose_outcomes_are_there_go_into_the_results_again(
    left: Path, tiny_study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", str(left), "--dry-run"]) == 0
    assert capsys.readouterr().out.count("evaluated, not in the results") == 4
    assert main(["study", str(left), "--no-report"]) == 0
    assert "pages-s1: put back into the results, 3 steps in " in capsys.readouterr().out
    before = read_results(tiny_study.parent / "out" / "results.json")
    again = read_results(left.parent / "out" / "results.json")
    assert again.runs == before.runs
    assert again.devices == before.devices == ["CPU"]


def test_a_run_with_neither_weights_nor_its_outcome_says_so_and_what_to_do(
    left: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left.write_text(left.read_text().replace("samples = 2", "samples = 3"))
    assert main(["study", str(left), "--no-report"]) == 1
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if line.startswith("failed: "))
    assert "has no weights left to evaluate" in line
    assert "is of another evaluation (eval.samples: 2 -> 3)" in line
    assert "or remove that run directory: the run is then trained again" in line
    assert not read_results(left.parent / "out" / "results.json").runs
