"""The recipe, make targets and commands that the README tells a reader to type are right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jetrl.settings.loading import load_config, packaged_recipes
from jetrl.tasks import build_task

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_recipe_trains_on_own_rows_with_an_own_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (recipe,), (reward,) = blocks("toml"), blocks("python")
    (row,) = re.findall(r"`(\{\"question.*?\})`", README)
    assert 10 <= len([line for line in recipe.splitlines() if line.strip()]) <= 14
    Path("mine.toml").write_text(recipe, encoding="utf-8")
    Path("mine.py").write_text(reward, encoding="utf-8")
    Path("mine.jsonl").write_text(f"{row}\n" * 4, encoding="utf-8")
    settings = load_config("mine.toml")
    assert settings.run.name == "mine"
    assert settings.precision.preset == "int8"
    assert settings.train.optimizer_states == "compact"
    task = build_task(settings.task)
    (prompt,) = task.prompts("test")
    assert [task.score(prompt, text) for text in ("It is 7", "It is 8", "")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("tables", ["models", "GPU", "recipe"])
def test_the_tables_name_recipes_and_families_that_exist(tables: str) -> None:
    (table,) = re.findall(rf"^\| {tables} \|.*\n\|.*\n((?:\|.*\n)+)", README, re.MULTILINE)
    first = [row.split("|")[1] for row in table.splitlines()]
    assert len(first) >= 4
    if tables == "recipe":
        assert {name.strip(" `") for name in first} <= set(packaged_recipes())


def typed(command: str) -> list[str]:
    """The words behind a command, of each line of a block and each inline code that begins so."""
    starts = re.findall(rf"(?:^|`){command} ([a-z -]+)", README, re.MULTILINE)
    return [words.split("  ")[0].strip() for words in starts]


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {target for words in typed("make") for target in words.split()}
    assert {"demo", "test", "check"} <= targets
    assert [target for target in targets if f"\n{target}:" not in makefile] == []


def test_the_commands_exist() -> None:
    commands = {words.split()[0] for words in typed("jetrl")} - {"trains"}  # "jetrl trains large"
    assert {"train", "doctor", "export"} <= commands
    folder = ROOT / "src" / "jetrl" / "cli"
    assert [name for name in commands if not (folder / f"{name}.py").is_file()] == []


def test_what_comes_before_the_list_of_documents_is_short() -> None:
    before, documents, _ = README.partition("\n## Documents\n")
    assert documents
    assert len(before.splitlines()) < 110
