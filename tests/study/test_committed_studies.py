"""The study files of this repository can be run: settings, arms and metrics are known."""

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.study.definition import read_definition
from benchmarks.study.plan import planned_runs
from benchmarks.study.results import read_results

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks" / "study").glob("*.toml"))
RESULTS = ROOT / "benchmarks" / "results" / "study"
BEGUN = [file for file in FILES if (RESULTS / f"{file.stem}.json").is_file()]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_committed_study_has_valid_runs(file, monkeypatch):
    monkeypatch.chdir(ROOT)  # a study names files of the repository
    definition = read_definition(file)
    first = definition.study.seeds[:1]
    one_seed = definition.study.model_copy(update={"seeds": first})
    runs = planned_runs(replace(definition, study=one_seed))
    assert {run.arm for run in runs} == set(definition.arms)
    assert definition.results_file == Path(f"benchmarks/results/study/{file.stem}.json")
    assert definition.study.name == file.stem
    for run in runs:
        config = run.settings.model.config
        assert not isinstance(config, str) or (ROOT / config).is_file()


@pytest.mark.parametrize("file", BEGUN, ids=lambda file: file.stem)
def test_committed_results_are_of_what_the_study_file_says(file, monkeypatch):
    """Else its command would end with a message, after a change of a recipe or of a default."""
    monkeypatch.chdir(ROOT)
    definition = read_definition(file)
    results = read_results(definition.results_file)
    planned = {run.name: run for run in planned_runs(definition)}
    for name, run in results.runs.items():
        assert run.digest == planned[name].digest or run.said == planned[name].said, name
    assert results.definition == definition.tree


def test_there_are_committed_studies():
    assert {"flows", "doses", "ablations", "twins", "sanity"} <= {file.stem for file in BEGUN}
