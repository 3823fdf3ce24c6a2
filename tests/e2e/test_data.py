"""Whole runs on mixed tasks in an order by pass rate, and on a task that teaches nothing."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from jetrl import load_config, train
from jetrl.runs import RunDirectory, reproducible

TINY = [
    "sft.steps=0",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=2",
    "rollout.max_tokens=4",
    "train.updates_per_step=1",
    "eval.every=0",
    "checkpoint.every=1",
    "report.enabled=false",
    "model.config.num_hidden_layers=1",
    "model.config.max_position_embeddings=64",
]

TASK = """
from jetrl.tasks import Task
from jetrl.types import Prompt

class Mine(Task):
    alphabet = "0123456789+-="

    def __init__(self, solved=True):
        self.solved = solved

    def prompts(self, split):
        return [Prompt(id=str(i), text=f"{i}+{i}=", answer=str(2 * i)) for i in range(12)]

    def score(self, prompt, completion):
        return float(self.solved and len(completion) % 2)
"""


def run(path: Path, name: str, *overrides: str, resume: bool = False) -> Any:
    words = [*TINY, f"run.dir={path}", f"run.name={name}", *overrides]
    return train(load_config("demo", words), resume=resume)


def test_mixed_by_weight_in_an_order_by_pass_rate_and_resumed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TASK)
    tasks = [{"name": f"{file}:Mine", "label": "mine", "weight": 3}, {"name": "arithmetic"}]
    mixed = [
        "task=mix",
        "task.options.tasks=[" + ", ".join(toml(task) for task in tasks) + "]",
        "data.order=pass_rate",
        "eval.every=4",
        "eval.prompts=2",
    ]
    uncut = run(tmp_path, "uncut", *mixed, "loop.steps=4")
    run(tmp_path, "cut", *mixed, "loop.steps=2")
    resumed = run(tmp_path, "cut", *mixed, "loop.steps=4", resume=True)
    records = [RunDirectory.open(r.run_path) for r in (uncut, resumed)]
    drawn = [[r["prompt_id"] for s in (3, 4) for r in record.rollouts(s)] for record in records]
    assert drawn[0] == drawn[1]
    last = [reproducible(record.metrics()[-1]) for record in records]
    assert last[0] == last[1]
    for step in records[0].rollout_steps():
        ids = [r["prompt_id"].partition("/")[0] for r in records[0].rollouts(step)]
        assert sorted(ids) == ["arithmetic"] * 2 + ["mine"] * 6
    for name in ("reward/task/mine", "response_length/task/arithmetic", "eval/mix/mean"):
        assert name in last[0]
    assert {"eval/mine/mean", "eval/arithmetic/pass_at_k"} <= set(last[0])


def toml(task: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{key} = {value!r}" for key, value in task.items()) + "}"


def test_a_run_that_learns_nothing_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TASK)
    done = run(
        tmp_path,
        "idle",
        f"task={file}:Mine",
        "task.options.solved=false",
        "loop.steps=6",
        "report.enabled=true",
    )
    printed = capsys.readouterr().out
    words = "over 5 steps: every completion got the reward 0"
    assert printed.count(f"warning: {words}") == 1
    assert words in (done.run_path / "log.txt").read_text()
    page = (done.run_path / "report.html").read_text()
    assert "<h2>Warnings</h2>" in page
    assert words in page


def test_trackers_get_settings_steps_and_summary_and_a_failing_one_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []

    class Wandb:
        summary = types.SimpleNamespace(update=lambda values: calls.append(("summary", values)))

        def __init__(self, **arguments: Any) -> None:
            calls.append(("config", arguments["config"]))

        def define_metric(self, *_: Any, **__: Any) -> None: ...

        def log(self, metrics: dict[str, float]) -> None:
            calls.append(("log", metrics))

        def finish(self) -> None:
            calls.append(("finish", None))

    def broken(*_: Any, **__: Any) -> None:
        raise ConnectionError("the dashboard is gone")

    trackio = types.SimpleNamespace(init=lambda **_: None, log=broken, finish=broken)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=Wandb))
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    done = run(tmp_path, "tracked", "loop.steps=2", 'trackers.names=["wandb", "trackio"]')
    assert done.steps == 2
    assert [name for name, _ in calls] == ["config", "log", "log", "summary", "finish"]
    assert calls[0][1]["loop"]["steps"] == 2
    assert [logged["step"] for name, logged in calls if name == "log"] == [1, 2]
    last = RunDirectory.open(done.run_path).metrics()[-1]
    assert calls[3][1]["summary/reward/mean/last"] == last["reward/mean"]
    assert (done.run_path / "log.txt").read_text().count("tracker trackio could not") == 1


def test_rows_that_changed_are_noticed_by_a_resumed_run(tmp_path: Path, caplog: Any) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    file = tmp_path / "rows.jsonl"
    words = ("task=dataset", f"task.path={file}", "task.options.format=text")
    for steps, changed in ((1, {}), (2, {}), (3, {"answer": "9"})):
        assert "not those of the checkpoint" not in caplog.text
        file.write_text("".join(json.dumps(row | changed) + "\n" for row in rows))
        run(tmp_path, "cut", *words, f"loop.steps={steps}", resume=steps > 1)
    assert "not those of the checkpoint" in caplog.text
