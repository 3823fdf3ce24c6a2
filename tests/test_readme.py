"""The README runs: its Python and shell blocks, on a CPU; its tables and commands name what exists.

Blocks run as typed, with three exceptions: nothing is installed, a tiny model takes the place of
the hub's, and runs that take minutes are made short.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from jetrl.cli.main import main
from jetrl.models.tiny import make_tiny
from jetrl.settings.loading import load_config, packaged_recipes
from jetrl.tasks import build_task

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HUB_MODEL = "Qwen/Qwen3-8B"  # a tiny model with a chat template stands in for it
NOT_RUN = {"pip install -e ."}
SHORT = {  # by their first words: what is added to a command
    "jetrl train demo": "sft.steps=2 loop.steps=1 rollout.prompts_per_step=4 eval.prompts=4",
    "jetrl train mine.toml": "run.device=cpu loop.steps=1 rollout.prompts_per_step=2"
    " rollout.samples_per_prompt=2 rollout.max_tokens=4",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that has what the README tells a reader to write."""
    (recipe,), (_, reward) = blocks("toml"), blocks("python")
    (row,) = re.findall(r"`(\{\"question.*?\})`", README)
    rows = [row, *(row.replace("4", str(4 + n)).replace("7", str(7 + n)) for n in (10, 20, 30))]
    files = {"mine.toml": recipe, "mine.py": reward, "mine.jsonl": "\n".join(rows)}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_python_example_runs_as_typed_and_learns(folder: Path) -> None:
    (example, _) = blocks("python")
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    lines = (folder / "runs" / "digits" / "metrics.jsonl").read_text().splitlines()
    rewards = [row["reward/mean"] for row in map(json.loads, lines) if "reward/mean" in row]
    assert len(rewards) == 15
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.9
    assert (folder / "runs" / "digits" / "report.html").is_file()


def test_the_commands_of_the_shell_blocks_run(folder: Path) -> None:
    make_tiny(folder / "tiny", tokenizer="bpe", text_files=[ROOT / "README.md"], num_layers=1)
    recipe = folder / "mine.toml"
    assert HUB_MODEL in recipe.read_text(encoding="utf-8")
    recipe.write_text(recipe.read_text(encoding="utf-8").replace(HUB_MODEL, "tiny"))
    lines = [shlex.split(line, comments=True) for line in "".join(blocks("bash")).splitlines()]
    commands = [words for words in lines if " ".join(words) not in NOT_RUN]
    assert {words[0] for words in commands} == {"jetrl"}
    for words in commands:
        more = [value for start, value in SHORT.items() if " ".join(words).startswith(start)]
        assert main([*words[1:], *" ".join(more).split()]) == 0, words
    made = ["runs/demo/report.html", "runs/mine/model", "models/mine/config.json"]
    assert [name for name in made if not (folder / name).exists()] == []


def test_the_recipe_trains_on_own_rows_with_an_own_reward(folder: Path) -> None:
    settings = load_config("mine.toml")
    assert settings.run.name == "mine"
    assert settings.precision.preset == "int8"
    assert settings.train.optimizer_states == "compact"
    task = build_task(settings.task)
    (prompt,) = task.prompts("test")
    texts = (f"It is {prompt.answer}", f"It is {prompt.answer}1", "")
    assert [task.score(prompt, text) for text in texts] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("table", ["models", "GPU"])
def test_the_tables_have_a_row_for_each_kind(table: str) -> None:
    (rows,) = re.findall(rf"^\| {table} \|.*\n\|.*\n((?:\|.*\n)+)", README, re.MULTILINE)
    assert len(rows.splitlines()) >= 4
    if table == "models":
        recipes = re.findall(
            r"`([\w.-]+)`", " ".join(row.split("|")[3] for row in rows.splitlines())
        )
        assert recipes
        assert set(recipes) <= set(packaged_recipes())


def test_figures_are_plain_numbers_with_a_link_to_a_document() -> None:
    """Intervals, errors and pointers into results files stand in docs/."""
    assert "benchmarks/results" not in README
    assert re.findall(r"\[[+-]?\d[\d.]*, [+-]?\d[\d.]*\]|\+-|±", README) == []


def typed(command: str) -> list[str]:
    """The words behind a command, of each line of a block and each inline code that begins so."""
    starts = re.findall(rf"(?:^|`){command} ([a-z -]+)", README, re.MULTILINE)
    return [words.split("  ")[0].strip() for words in starts]


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {target for words in typed("make") for target in words.split()}
    assert {"test", "check"} <= targets
    assert [target for target in targets if f"\n{target}:" not in makefile] == []


def test_the_commands_exist() -> None:
    commands = {words.split()[0] for words in typed("jetrl")} - {"trains"}  # "jetrl trains large"
    assert {"train", "doctor", "export"} <= commands
    folder = ROOT / "src" / "jetrl" / "cli"
    names = [name.replace("-", "_") for name in commands]
    assert [name for name in names if not (folder / f"{name}.py").is_file()] == []


def test_what_comes_before_the_list_of_documents_is_short() -> None:
    before, documents, _ = README.partition("\n## Documents\n")
    assert documents
    assert len(before.splitlines()) < 110
