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
from tests.cli.test_models import DIGITS

from jetrl import load_config, train
from jetrl.training.checkpoint_files import fingerprint

TASK = DIGITS + "def check(prompt, completion): return 1.0\n"
ALGORITHM = """
def loss(tokens): return -tokens.trainer_logprobs * tokens.advantages
"""
MARKS = "\nimport pathlib\npathlib.Path(__file__).with_suffix('.imported').touch()\n"
SHORT = "--max-tokens 2 --device cpu"
OWN_TASK = f"--prompts 1 --workers 0 {SHORT}"
CHECKER = (
    'name = "dataset"\npath = "{data}"\n[task.options]\nchecker = "{file}:check"\n'
    'format = "text"\nanswer = ""'
)
MIX = (
    'name = "mix"\n[[task.options.tasks]]\nname = "arithmetic"\n'
    '[[task.options.tasks]]\nname = "{file}:Digits"'
)


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
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, whose files leave a mark from now on."""
    for name, source in (("evil", TASK), ("loss", ALGORITHM)):
        (trained.parent / f"{name}.py").write_text(source + MARKS)
    for mark in trained.parent.glob("*.imported"):
        mark.unlink()
    for module in [name for name in sys.modules if name.startswith("jetrl_user_")]:
        del sys.modules[module]
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def imported(trained: Path) -> Callable[[], list[str]]:
    return lambda: sorted(path.stem for path in trained.parent.glob("*.imported"))


@pytest.mark.parametrize(
    "words",
    [
        *(
            words.replace("RUN", place)
            for place in ("RUN", "RUN/checkpoints/step_000001")
            for words in (
                f"sample RUN 1+1= {SHORT}",
                "export RUN RUN/out",
                f"parity RUN --prompts 1 --samples 1 {SHORT}",
                f"eval RUN --task arithmetic {OWN_TASK}",
            )
        ),
        "doctor RUN",
        "runs list --dir RUN/..",
        "runs show RUN",
        "runs plot RUN --out RUN/runs.png",
        "compare RUN RUN",
        "train RUN/config.toml run.name=run --resume --dry-run",
    ],
)
def test_no_file_is_imported_to_look_at_a_run_or_its_model(
    words: str, jetrl: Callable, run: Path, imported: Callable
) -> None:
    done = jetrl(*words.replace("RUN", str(run)).split())
    assert (done.code in (0, 1), imported()) == (True, []), done.err


@pytest.mark.parametrize(
    "words, files, change",
    [
        (f"eval RUN --prompts 1 --samples 1 {SHORT}", ["evil"], ""),
        (f"eval RUN/checkpoints/step_000001 --prompts 1 --samples 1 {SHORT}", ["evil"], ""),
        ("replay RUN", ["evil", "loss"], ""),
        (f"sample RUN/checkpoints/step_000001 1+1= {SHORT}", ["evil"], "no alphabet"),
        (f"eval RUN/model {OWN_TASK}", ["evil"], CHECKER),
        (f"eval RUN/model {OWN_TASK}", ["evil"], MIX),
    ],
    ids=["own task", "of a checkpoint", "replay", "older checkpoint", "checker", "mix"],
)
def test_a_file_that_the_run_names_is_asked_for(
    words: str, files: list[str], change: str, jetrl: Callable, run: Path, imported: Callable,
    trained: Path,
) -> None:  # fmt: skip
    if change == "no alphabet":  # checkpoints of older versions have none
        last = run / "checkpoints" / "step_000001"
        state, manifest = last / "state.json", last / "manifest.json"
        content = json.loads(state.read_text())
        del content["alphabet"]
        state.write_text(json.dumps(content))
        found = json.loads(manifest.read_text()) | {"state.json": fingerprint(state)}
        manifest.write_text(json.dumps(found))
    elif change:
        rows = [json.dumps({"prompt": f"{n}+1="}) for n in range(20)]
        (run / "data.jsonl").write_text("\n".join(rows))
        task = change.format(data=run / "data.jsonl", file=trained.parent / "evil.py")
        (run / "config.toml").write_text(f"[task]\n{task}\n")
    command = words.replace("RUN", str(run)).split()
    done = jetrl(*command)
    assert (done.code, "--trust-task" in done.err, imported()) == (2, True, [])
    assert str(trained.parent / f"{files[-1]}.py") in done.err
    trusted = jetrl(*command, "--trust-task")
    assert (trusted.code, imported()) == (0, files), trusted.err


def test_files_that_are_typed_or_trained_with_are_imported(
    jetrl: Callable, run: Path, tiny_model: Path, imported: Callable, trained: Path
) -> None:
    own = f"{trained.parent / 'evil.py'}:Digits"
    assert jetrl("eval", tiny_model, "--task", own, *OWN_TASK.split()).code == 0
    assert imported() == ["evil"]
    words = (run / "config.toml", f"run.dir={run.parent}", "loop.steps=2")
    done = jetrl("train", *words, "--resume")
    assert (done.code, imported()) == (0, ["evil", "loss"]), done.err
