"""The recipe, make targets and commands that the README tells a reader to type are right."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from jetrl.config import load_config

from jetrl.tasks import build_task

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_recipe_loads(tmp_path: Path) -> None:
    (recipe,) = blocks("toml")
    assert 10 <= len([line for line in recipe.splitlines() if line.strip()]) <= 14
    (tmp_path / "mine.toml").write_text(recipe, encoding="utf-8")
    settings = load_config(tmp_path / "mine.toml")
    assert settings.run.name == "mine"
    assert settings.precision.preset == "unified"
    assert settings.train.optimizer_states == "compact"
    assert list(build_task(settings.task).prompts("test"))


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


def test_python_blocks_are_python() -> None:
    for block in blocks("python"):
        ast.parse(block)


def test_what_comes_before_the_list_of_documents_is_short() -> None:
    before, documents, _ = README.partition("\n## Documents\n")
    assert documents
    assert len(before.splitlines()) < 110
