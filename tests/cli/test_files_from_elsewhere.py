"""Commands on a run or a model from elsewhere import no Python file that it names.

The run is trained with a task and an algorithm of users' files, which then leave a mark when they
are imported.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jetrl import load_config, train
from jetrl.cli.opening import open_policy
from jetrl.training.checkpoint_files import fingerprint

TASK = """
from jetrl.tasks import Task
from jetrl.types import Prompt

class Digits(Task):
    alphabet = "0123456789+="
    def prompts(self, split): return [Prompt(id=str(i), text=f"{i}+1=") for i in range(4)]
    def score(self, prompt, completion): return len(completion) / 100

def check(prompt, completion): return 1.0
"""
ALGORITHM = """
def loss(tokens): return -tokens.trainer_logprobs * tokens.advantages
"""
MARKS = "\nimport pathlib\npathlib.Path(__file__).with_suffix('.imported').touch()\n"
SHORT = ("--max-tokens", 2, "--device", "cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, with task and algorithm of users' files beside it."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "evil.py").write_text(TASK)
    (folder / "loss.py").write_text(ALGORITHM)
    words = [
        *("sft.steps=0", "loop.steps=1", f"run.dir={folder}", "run.name=run", "eval.every=0"),
        *("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_tokens=4"),
        *(f"task={folder / 'evil.py'}:Digits", "task.workers=0", "report.enabled=false"),
        f"algorithm.name={folder / 'loss.py'}:loss",
    ]
    return train(load_config("demo", words)).run_path


@pytest.fixture
def run(trained: Path) -> Path:
    """The run, whose files leave a mark from now on."""
    for name, source in (("evil", TASK), ("loss", ALGORITHM)):
        (trained.parent / f"{name}.py").write_text(source + MARKS)
    for mark in trained.parent.glob("*.imported"):
        mark.unlink()
    for module in [name for name in sys.modules if name.startswith("jetrl_user_")]:
        del sys.modules[module]
    return trained


def imported(run: Path) -> list[str]:
    return sorted(path.stem for path in run.parent.glob("*.imported"))


@pytest.mark.parametrize("place", ["", "checkpoints/step_000001"])
def test_no_file_is_imported_to_sample_export_or_compare_the_sides(
    place: str, jetrl: Callable, run: Path, tmp_path: Path
) -> None:
    assert jetrl("sample", run / place, "1+1=", *SHORT).code == 0
    assert jetrl("export", run / place, tmp_path / "out").code == 0
    assert jetrl("parity", run / place, "--prompts", 1, "--samples", 1, *SHORT).code == 0
    built_in = ("--task", "arithmetic", "--prompts", 1, "--workers", 0, *SHORT)
    assert jetrl("eval", run / place, *built_in).code == 0
    assert imported(run) == []


def test_the_checkpoints_own_alphabet_is_the_tokenizers(run: Path) -> None:
    last = run / "checkpoints" / "step_000001"
    assert json.loads((last / "state.json").read_text())["alphabet"] == "0123456789+="
    tokenizer = open_policy(last, None, "cpu").tokenizer
    assert tokenizer is not None
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 13]) == ["<pad>", "<eos>", "0", "="]


@pytest.mark.parametrize("place", ["", "checkpoints/step_000001"])
def test_a_runs_own_task_is_named_and_asked_for(place: str, jetrl: Callable, run: Path) -> None:
    words = ("eval", run / place, "--prompts", 1, "--samples", 1, *SHORT)
    done = jetrl(*words)
    assert done.code == 2
    assert str(run.parent / "evil.py") in done.err
    assert "--trust-task" in done.err
    assert imported(run) == []
    trusted = jetrl(*words, "--trust-task")
    assert trusted.code == 0, trusted.err
    assert imported(run) == ["evil"]


def test_a_task_that_is_typed_is_imported_and_nothing_else(
    jetrl: Callable, run: Path, tiny_model: Path
) -> None:
    own = f"{run.parent / 'evil.py'}:Digits"
    words = ("--prompts", 1, "--workers", 0, *SHORT)
    assert jetrl("eval", tiny_model, "--task", own, *words).code == 0
    assert imported(run) == ["evil"]


@pytest.mark.parametrize(
    "task",
    [
        'name = "dataset"\npath = "{data}"\n[task.options]\nchecker = "{file}:check"\n'
        'format = "text"\nanswer = ""',
        'name = "mix"\n[[task.options.tasks]]\nname = "arithmetic"\n'
        '[[task.options.tasks]]\nname = "{file}:Digits"',
    ],
    ids=["checker", "mix"],
)
def test_a_file_in_a_tasks_options_is_asked_for_as_well(
    task: str, jetrl: Callable, run: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Even where the folder above a model is what has the config.toml."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1="}\n' * 20)
    model = shutil.copytree(tiny_model, tmp_path / "model")
    words = task.format(data=data, file=run.parent / "evil.py")
    (tmp_path / "config.toml").write_text(f"[task]\n{words}\n")
    shutil.copy(run / "plan.json", tmp_path)
    done = jetrl("eval", model, "--prompts", 1, "--workers", 0, *SHORT)
    assert (done.code, "--trust-task" in done.err) == (2, True), done.err
    assert imported(run) == []
    assert jetrl("eval", model, "--trust-task", "--prompts", 1, "--workers", 0, *SHORT).code == 0
    assert imported(run) == ["evil"]


def test_replay_asks_for_the_files(jetrl: Callable, run: Path) -> None:
    done = jetrl("replay", run)
    assert (done.code, "--trust-task" in done.err, imported(run)) == (2, True, [])
    assert jetrl("replay", run, "--trust-task").code == 0
    assert imported(run) == ["evil", "loss"]


def test_of_older_files_without_an_alphabet_the_task_is_asked_for(
    jetrl: Callable, run: Path, tmp_path: Path
) -> None:
    older = shutil.copytree(run, tmp_path / "older")
    last = older / "checkpoints" / "step_000001"
    state = json.loads((last / "state.json").read_text())
    del state["alphabet"]
    (last / "state.json").write_text(json.dumps(state))
    manifest = json.loads((last / "manifest.json").read_text())
    manifest["state.json"] = fingerprint(last / "state.json")
    (last / "manifest.json").write_text(json.dumps(manifest))
    done = jetrl("sample", last, "1+1=", *SHORT)
    assert (done.code, "--trust-task" in done.err, imported(run)) == (2, True, [])
    assert jetrl("sample", last, "1+1=", "--trust-task", *SHORT).code == 0
    assert imported(run) == ["evil"]


def test_commands_that_look_at_a_run_import_no_file(jetrl: Callable, run: Path) -> None:
    for words in (
        ("doctor", run),
        ("runs", "list", "--dir", run.parent),
        ("runs", "show", run),
        ("runs", "plot", run, "--out", run.parent / "runs.png"),
        ("compare", run, run),
        ("train", run / "config.toml", "run.name=run", "--resume", "--dry-run"),
    ):
        done = jetrl(*words)
        assert done.code in (0, 1), done.err
    assert imported(run) == []


def test_training_runs_the_files_of_its_recipe(jetrl: Callable, run: Path, tmp_path: Path) -> None:
    own = shutil.copytree(run, tmp_path / "run")
    words = (own / "config.toml", f"run.dir={tmp_path}", "loop.steps=2")
    done = jetrl("train", *words, "--resume")
    assert done.code == 0, done.err
    assert imported(run) == ["evil", "loss"]
