"""Damaged run directories: what reads them gives an answer or a UserError."""

import json
import shutil

import pytest

from jetrl.runs import RunDirectory, write_report
from jetrl.runs.report import _sample
from jetrl.settings.loading import load_config
from jetrl.types import Completion, Prompt, Sample, Score, StepStats

FILES = [
    "metrics.jsonl",
    "attempts.jsonl",
    "plan.json",
    "config.toml",
    "rollouts/step_000001.jsonl",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    settings = load_config("demo", [f"run.dir={folder}", "run.name=whole"])
    sample = Sample(
        Prompt(id="p", text="1+1="), 0, (1, 2), Completion((3,), (-0.5,), "stop", "2"), Score(1.0)
    )
    metrics = {"reward/mean": 0.5, "policy/entropy": 1.0, "eval/arithmetic/mean": 0.25}
    run = RunDirectory.create(settings, {"name": "unified", "kv": "fp8"})
    with run, run.attempt(["jetrl", "train"]):
        run.write_rollouts(1, [sample])
        for step in range(1, 4):
            run.write_step(StepStats(step, metrics))
    return run.path


@pytest.mark.parametrize("name", FILES)
def test_a_report_of_a_damaged_run(mutate, attempt, whole, tmp_path, name):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    text = (whole / name).read_bytes()
    for seed in range(40):
        (path / name).write_bytes(mutate(text, seed))
        if seed < 2:  # plots take time
            attempt(write_report, path)
        run = RunDirectory.open(path)
        for read in (run.history, run.state, run.plan, run.config, run.attempts):
            attempt(read)
        for record in attempt(run.rollouts, 1)[0] or ():
            attempt(_sample, record)


ODD = [
    None,
    True,
    "x",
    "1e9",
    [],
    {},
    -1,
    2**70,
    1e308,
    float("nan"),
    float("-inf"),
    [[1]],
    {"a": 1},
]


@pytest.mark.parametrize("number", range(len(ODD)))
def test_values_of_another_type(attempt, whole, tmp_path, number):
    """Every field of every line in turn is of another type than jetrl writes."""
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    for name in ("metrics.jsonl", "attempts.jsonl", "rollouts/step_000001.jsonl"):
        lines = [json.loads(line) for line in (whole / name).read_text().splitlines()]
        for place, key in {key: i for i, line in enumerate(lines) for key in line}.items():
            changed = [dict(line) for line in lines]
            changed[key][place] = ODD[number]
            (path / name).write_text("".join(json.dumps(line) + "\n" for line in changed))
            run = RunDirectory.open(path)
            for read in (run.history, run.state, run.attempts):
                attempt(read)
            for record in attempt(run.rollouts, 1)[0] or ():
                attempt(_sample, record)
        shutil.copy(whole / name, path / name)
