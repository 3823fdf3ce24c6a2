"""The recipes that come with jetrl: listed, and each with a memory plan that fits."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from jetrl.models import hf_files
from jetrl.models.tiny import character_tokenizer
from jetrl.session import open as opening
from jetrl.settings.loading import packaged_recipes

CONFIGS = json.loads(Path(__file__).with_name("model_configs.json").read_text(encoding="utf-8"))
REAL = [name for name in packaged_recipes() if name not in ("demo", "gsm8k-smoke")]
GPUS = {"qwen3-8b-math-4gpus": 4, "qwen3-14b-gsm8k": 2}  # of the others: one
DATA = ("task.path=.", "task.workers=0")
OWN = "task.options.checker=own.py:f"
H200_GIB = 139.0  # free on an H200 that nothing else uses


@pytest.fixture
def h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of that size, and a hub's cache with the config of each model and no weights."""
    for name, config in CONFIGS.items():
        folder = tmp_path / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("a" * 40)
        (snapshot / "config.json").write_text(json.dumps(config))
        tokenizer = character_tokenizer()
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        tokenizer.save_pretrained(snapshot)
    row = {"question": "1+1?", "answer": "2\n#### 2", "problem": "1+1?", "solution": "\\boxed{2}"}
    row["demonstration"] = row["answer"]
    (tmp_path / "models").mkdir()
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(opening, "free_bytes", lambda _: int(H200_GIB * 2**30))
    monkeypatch.chdir(tmp_path)
    hf_files.snapshot.cache_clear()


@pytest.mark.parametrize("name", REAL)
def test_a_recipe_fits_the_gpus_that_it_asks_for(name: str, h200: None, jetrl: Callable) -> None:
    count = GPUS.get(name, 1)
    done = jetrl("train", name, "--dry-run", "run.device=cuda", *DATA, "--gpus", count)
    assert done.code == 0, done.err
    recipe = jetrl("recipes", name).out
    assert (count == 1) == ("needs: one h200" in recipe.lower())
    assert (count > 1) == (f"torchrun --standalone --nproc-per-node {count} " in recipe)
    phases = next(line for line in done.out.splitlines() if line.split()[1:2] == ["held"])
    assert max(map(float, phases.split()[2:])) < H200_GIB
    assert "bit for bit equal (checked every step)" in done.out


@pytest.mark.parametrize(
    "name, gib, most", [("qwen3-32b-lora-gsm8k", 140, 138), ("qwen3-1.7b-lora-gsm8k", 24, 22)]
)
def test_adapters_fit_where_all_parameters_do_not(
    name: str, gib: int, most: int, h200: None, jetrl: Callable
) -> None:
    words = ("train", name, "--dry-run", "run.device=cuda", *DATA, "--gpu-memory", gib)
    done = jetrl(*words)
    assert done.code == 0, done.err
    phases = next(line for line in done.out.splitlines() if line.split()[1:2] == ["held"])
    assert max(map(float, phases.split()[2:])) < most
    assert "master weights of the adapter" in done.out
    done = jetrl(*words, "adapter.kind=none", "adapter.rank=none")
    assert (done.code, "the model does not fit" in done.err) == (2, True)


@pytest.mark.parametrize(
    "words, lr, has",
    [
        (["Qwen/Qwen3-8B", "own.jsonl", OWN], 2e-5, {"adapter": {"kind": "lora"}}),
        (["Qwen/Qwen3-8B", "own.jsonl", "train.lr=3e-6", "--gpu-memory", 250], 3e-6, {}),
        (["Qwen/Qwen3-1.7B", "task.path=.", "run.name=a"], 1e-6, {"task": {"name": "gsm8k"}}),
    ],
)
def test_a_recipe_written_for_a_model_and_rows_passes_its_dry_run(
    words: list[Any], lr: float, has: dict[str, Any], h200: None, jetrl: Callable, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("def f(prompt, completion):\n    return 1\n")
    rows = [json.dumps({"question": f"{n}+1?", "answer": n + 1}) for n in range(20)]
    (tmp_path / "own.jsonl").write_text("\n".join(rows))
    done = jetrl("init-recipe", *words, "--out", "mine.toml")
    assert done.code == 0, done.err
    assert "next: jetrl train mine.toml --dry-run" in done.out
    text = (tmp_path / "mine.toml").read_text()
    recipe = tomllib.loads(text)
    for section, values in has.items():
        assert recipe[section].items() >= values.items()
    assert recipe["train"]["lr"] == lr
    gpu = [word for word in words if word in ("--gpu-memory", 250)]
    done = jetrl("train", "mine.toml", "--dry-run", *gpu)
    assert done.code == 0, done.err
    if "own.jsonl" in words:
        assert "# Prompts: 18 for training, 2 for eval." in text
        assert (recipe["rollout"]["prompts_per_step"], recipe["eval"]["prompts"]) == (18, 2)
    spaced = jetrl("init-recipe", *words, "--out", "my own.toml")
    assert (
        spaced.code,
        "#     jetrl train 'my own.toml'\n" in Path("my own.toml").read_text(),
    ) == (0, True)
    again = jetrl("init-recipe", *words, "--out", "mine.toml")
    assert (again.code, "mine.toml exists" in again.err) == (2, True)


def test_the_recipes_are_listed_with_what_they_need_or_shown(jetrl: Callable) -> None:
    done = jetrl("recipes")
    assert done.code == 0
    assert 'path = "Qwen/Qwen3-1.7B"' in jetrl("recipes", "qwen3-1.7b-gsm8k").out
    assert "did you mean qwen3-8b-math?" in jetrl("recipes", "qwen3-8b-mat").err
    recipes = json.loads(jetrl("recipes", "--json").out)
    assert [recipe["name"] for recipe in recipes] == packaged_recipes()
    for recipe in recipes:
        assert recipe["name"] in done.out
        assert recipe["what"].endswith(".")
        assert recipe["needs"].endswith(".")


@pytest.mark.parametrize(
    "words, missing, needs",
    [
        (["smollm2-135m"], "./build/letters", "build/letters, made in a clone of jetrl by `python"),
        (["smollm2-135m", "task.path=./rows"], "./rows", None),
        (["gsm8k-smoke"], "models/tiny-qwen3-gsm8k", "models/tiny-qwen3-gsm8k, made by `jetrl"),
    ],
)
def test_an_error_about_what_a_recipe_names_says_how_to_get_it(
    words: list[str], missing: str, needs: str | None, h200: None, jetrl: Callable
) -> None:
    done = jetrl("train", *words, "--dry-run")
    assert (done.code, f"{missing}: no such" in done.err) == (2, True)
    assert (f"; recipe {words[0]} needs {needs}" in done.err) == (needs is not None)
