"""Committed study files can be run, and committed results belong to the runs that they plan."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.study import effects
from benchmarks.study.definition import read_definition
from benchmarks.study.plan import planned_runs
from benchmarks.study.results import read_results

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks" / "study").glob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_committed_study_has_valid_runs_and_its_own_results(file, monkeypatch):
    """Else its command would end with a message, after a change of a recipe or of a default."""
    monkeypatch.chdir(ROOT)  # a study names files of the repository
    definition = read_definition(file)
    seed = definition.study.seeds[0]
    one_seed = definition.study.model_copy(update={"seeds": (seed,)})
    planned = {run.name: run for run in planned_runs(replace(definition, study=one_seed))}
    assert {run.arm for run in planned.values()} == set(definition.arms)
    assert definition.study.name == file.stem
    assert definition.results_file == Path(f"benchmarks/results/study/{file.stem}.json")
    for run in planned.values():
        config = run.settings.model.config
        assert not isinstance(config, str) or Path(config).is_file()
    if definition.results_file.is_file():
        results = read_results(definition.results_file)
        assert results.definition == definition.tree
        for name, run in results.runs.items():
            if run.seed == seed:
                assert run.digest == planned[name].digest or run.said == planned[name].said, name


EFFECTS = [
    file
    for file in sorted((ROOT / "benchmarks" / "results").glob("*/*.json"))
    if "benchmarks.study.effects " in file.read_text(encoding="utf-8")[:200]
]
assert EFFECTS


@pytest.mark.parametrize("file", EFFECTS, ids=lambda file: file.stem)
def test_committed_effects_are_those_of_their_studies(file, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    words = json.loads(file.read_text(encoding="utf-8"))["command"].split()[3:]
    effects.main([*words, "--out", str(tmp_path / "effects.json")])
    assert (tmp_path / "effects.json").read_text() == file.read_text(encoding="utf-8")
