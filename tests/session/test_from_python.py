"""`jetrl.train` from Python: what it takes, which settings that makes, and what it refuses."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jetrl
from jetrl.errors import UserError
from jetrl.session.from_python import settings_of
from jetrl.tasks import build_task, read_prompts
from jetrl.types import Prompt

ROOT = Path(__file__).parents[2]
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(10)]


def right(prompt, completion):
    return float(completion == prompt.answer)


class Ours(jetrl.Task):
    def prompts(self, split):
        return [Prompt(id="0", text="a")]

    def score(self, prompt, completion):
        return 1.0


def test_functions_and_rows_become_settings(caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {**row, "prompt": np.array([{"role": "user", "content": row["prompt"]}])} for row in ROWS
    ]
    model = "Qwen/Qwen3-0.6B"
    made = settings_of(model=model, data=rows, rewards=[right, "exact"], train={"lr": 2e-6})
    assert (made.model.path, made.train.lr, made.run.name) == (model, 2e-6, "qwen3-0.6b-data")
    assert (made.task.name, made.task.workers) == ("dataset", 0)
    assert made.task.options == {"checker": ["python:right", "exact"]}
    assert "right: called in this process, without task.timeout_s" in caplog.text
    task = build_task(made.task)
    prompts = read_prompts(task, "train")
    assert len(prompts) == 9
    assert task.score(prompts[0], "1").reward == 2.0


def test_a_recipe_and_settings_are_changed(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    text = "[task]\nname = 'gsm8k'\noptions.strict = true\n[train]\nlr = 1e-5\neps = 1e-6\n"
    recipe.write_text(text)
    made = settings_of(recipe, train={"lr": 2e-6}, data="rows.jsonl", rewards="math")
    assert (made.run.name, made.train.lr, made.train.eps) == ("mine", 2e-6, 1e-6)
    assert made.task.options == {"checker": "math"}  # those of another task are put aside
    again = settings_of(made, loop={"steps": 3}, task={"options": {"strict": True}})
    assert (again.loop.steps, again.train.eps) == (3, 1e-6)
    assert again.task.options == {"checker": "math", "strict": True}
    assert settings_of(made) == made
    assert settings_of(made, loop={"steps": np.int64(3)}).loop.steps == 3


@pytest.mark.parametrize("task", [Ours, Ours()])
def test_a_task_is_a_class_or_an_instance(task: Any) -> None:
    made = settings_of("demo", task=task)
    assert isinstance(build_task(made.task), Ours)
    assert made.task.workers == 0
    with pytest.raises(UserError, match=r"task.options.checker: task python:Ours.* has no such"):
        build_task(settings_of("demo", task=task, rewards=right).task)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"settings": 3}, "settings: not int; give a recipe's path or a Settings"),
        ({"settings": "nothing.toml"}, "recipe nothing.toml: no such file"),
        ({"model": 3}, "model: not int; give its directory or hub name"),
        ({"data": 3}, r"data: not int; give rows \(dicts\) or a path"),
        (
            {"data": {"train": ROWS}, "rewards": right},
            "data: a table of splits or columns; give the rows",
        ),
        ({"run": "mine"}, r"run is a section: write \[run\] .* \(in Python: give a dict\)"),
        ({"task": 3}, "task: 3 is not a Task; give its name, class or instance"),
        ({"data": {1: "a"}.values()}, "row 0: 'a' is not a dict of columns .of a DataFrame"),
        ({"data": ["a"]}, "data, row 0: 'a' is not a dict of columns"),
        ({"rewards": [3], "data": ROWS}, "rewards: 3 is not a function"),
        ({"rewards": [right]}, "there is nothing to score; add data="),
        (
            {"learning_rate": 1},
            "argument learning_rate: unknown setting learning_rate; here it is train.lr",
        ),
        ({"train": {"lr": "fast"}}, 'argument train: train.lr = "fast": should be a valid number'),
        ({"reward_funcs": [right]}, "unknown setting reward_funcs; .*jetrl.train"),
    ],
)
def test_what_cannot_be_used_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        settings_of(**given)


ODD = (None, 3, math.nan, 10**30, "", b"x", [], {"a": 1}, {1: 2}, print, {3}, (1, 2), int)
ODD += ({"lr": object()}, {"options": 3}, {"name": 3}, {"path": b"x"}, {"config": {"a": {3}}})


@pytest.mark.parametrize("key", [*inspect.signature(settings_of).parameters, "run", "train"])
def test_odd_arguments_raise_user_errors_and_no_others(key: str) -> None:
    for odd in ODD:
        for base in ({}, {"data": ROWS, "rewards": right}):
            with contextlib.suppress(UserError):
                build_task(settings_of(**{**base, key: odd}).task)
        with contextlib.suppress(UserError):
            jetrl.Settings(**{key: odd})


def test_the_public_names_are_listed() -> None:
    assert {"train", "Settings", "UserError", "Task", "load_config"} <= set(dir(jetrl))
    assert all(hasattr(jetrl, name) for name in dir(jetrl))
    with pytest.raises(AttributeError, match="has no attribute 'trian'") as caught:
        jetrl.trian  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("trian", jetrl)


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "examples" / "from_python.py").read_text(encoding="utf-8")
    short = re.sub(r'"steps": 30}', '"steps": 2}, report={"enabled": False}', text)
    assert short != text
    (tmp_path / "short.py").write_text(short)
    monkeypatch.chdir(tmp_path)
    result = runpy.run_path("short.py", run_name="__main__")["result"]
    assert result.steps == 2
    metrics = (tmp_path / "runs/from-python/metrics.jsonl").read_text()
    assert '"reward/part/digits"' in metrics
    assert '"reward/part/right"' in metrics
    shutil.rmtree(tmp_path / "runs")
