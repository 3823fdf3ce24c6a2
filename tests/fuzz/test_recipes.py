"""Recipes and overrides that are not settings are a UserError, and settings survive TOML."""

import random
from pathlib import Path

import pytest

from jetrl.errors import UserError
from jetrl.runs.writer import RunWriter
from jetrl.settings.loading import describe, load_config, to_toml

RECIPE = b"""
[run]
name = "fuzz"
seed = 3
[model.config]
vocab_size = 32
architectures = ["Qwen3ForCausalLM"]
[rollout]
stop = ["a", "b"]
temperature = 0.7
[train]
lr = 1e-3
betas = [0.9, 0.95]
[task.options]
digits = 2
"""
VALUES = [
    *("", "none", "true", "-1", "1e400", "nan", "inf", "9" * 5000, "[" * 2000, "{a=1}", "'''"),
    *('"\\u0000"', "1979-05-27", "[1, 'a', none]", "\x1b[2J", "\udc80", "../x", "0x7fffffffffffff"),
    *("[[[]]]", "{}", "'a'='b'", "1_000", "[none]", "0.5", "3", "abc", "=", "a.b"),
]


def test_damaged_recipes(mutate, attempt, tmp_path):
    file = tmp_path / "fuzz.toml"
    good = 0
    for seed in range(200):
        file.write_bytes(mutate(RECIPE, seed))
        settings, problem = attempt(load_config, file)
        if problem:
            assert str(file) in problem, seed
            continue
        good += 1
        round_trip(settings, file)
    assert good < 200


def round_trip(settings, file):
    file.write_text(to_toml(settings), encoding="utf-8")
    assert load_config(file) == settings


def test_random_overrides(attempt, tmp_path):
    rng = random.Random(5)
    keys = [key for key, *_ in describe()]
    accepted = 0
    for _ in range(500):
        key = rng.choice(keys)
        if rng.random() < 0.2:
            key = rng.choice([f"{key}.x", key.partition(".")[2], f".{key}", key.upper(), key[:-1]])
        settings, problem = attempt(load_config, "demo", [f"{key}={rng.choice(VALUES)}"])
        if problem:
            continue
        accepted += 1
        round_trip(settings, tmp_path / "demo.toml")
    assert 15 < accepted < 470


NAMES = ["../x", "/tmp/x", "a/b", "..", ".", "a\\b", " a", "a\n", "a\0b", "\x1b[2J", ""]


@pytest.mark.parametrize("name", [*NAMES, "x" * 200, None])
def test_a_run_name_is_one_folder(name, tmp_path):
    """The name may come from a recipe or from Python, which may leave the settings' check out."""
    settings = load_config("demo", [f"run.dir={tmp_path}/runs"])
    run = settings.run.model_copy(update={"name": name})
    with pytest.raises(UserError, match=r"run\.name"):
        RunWriter.create(settings.model_copy(update={"run": run}), {})
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_that_is_a_link_is_refused(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to(outside)
    settings = load_config("demo", [f"run.dir={tmp_path}/runs", "run.name=linked"])
    with pytest.raises(UserError, match="is a link to"):
        RunWriter.create(settings, {})
    assert list(Path(outside).iterdir()) == []
