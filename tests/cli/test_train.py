"""`jetrl train` and `jetrl sft`: words to settings, what is printed, and how they end."""

from __future__ import annotations

import functools
import re
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jetrl.errors import RunStopped, Terminated
from jetrl.settings.loading import Settings, load_config, to_toml

SMALL = ["sft.steps=1", "sft.examples_per_step=2", "loop.steps=1", "eval.every=0"]
SMALL += ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_tokens=3"]


class FakeLoop:
    """Stands in for the loop, to see what it is asked for and to end as told."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.chats = False
        self.calls: list[tuple[str, Settings, dict[str, Any]]] = []

    def run(self, name: str, settings: Settings, **options: Any) -> types.SimpleNamespace:
        self.calls.append((name, settings, options))
        if self.error is not None:
            raise self.error
        run = Path("runs") / str(settings.run.name)
        names = {"report": "report.html", "checkpoint": "checkpoints/step_000060", "model": "model"}
        paths = {f"{name}_path": run / place for name, place in names.items()}
        facts = {"run_path": run, "steps": 60, "stopped": "", "chats": self.chats}
        return types.SimpleNamespace(**facts, **paths, digest="ab" * 32)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> FakeLoop:
    fake = FakeLoop()
    for name in ("train", "sft"):
        monkeypatch.setattr(f"jetrl.loop.{name}", functools.partial(fake.run, name))
    return fake


def test_train_of_the_demo_says_what_next(
    jetrl: Callable, loop: FakeLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where nobody has made the run of this name
    done = jetrl("train", "demo")
    assert loop.calls == [("train", load_config("demo"), {"resume": False})]
    assert done.code == 0
    assert done.out.startswith("demo, unchanged, takes about 3 minutes on two CPU cores; ")
    run = Path("runs") / "demo"
    assert done.out.splitlines()[-6:] == [
        f"run         {run}",
        f"report      {run / 'report.html'}",
        f"checkpoint  {run / 'checkpoints' / 'step_000060'}",
        f"model       {run / 'model'}",
        f"digest      {'ab' * 32}",
        f"sample from it: jetrl sample {run / 'model'} '12+07='",
    ]
    # Options may stand between the recipe and its overrides.
    loop.chats = True
    done = jetrl("train", "demo", "--resume", "loop.steps=3")
    assert (done.code, done.out.splitlines()[-1][-16:]) == (0, " --chat '12+07='")
    (_, settings, options) = loop.calls[1]
    assert (settings.loop.steps, options) == (3, {"resume": True})
    loop.error = RunStopped("3 of 900 tokens differ")
    done = jetrl("train", "demo")
    assert (done.code, done.err) == (1, "stopped: 3 of 900 tokens differ\n")


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "    jetrl train demo "),
        (["demoo"], "recipe demoo: no such file or packaged recipe; did you mean demo?"),
        (["my/task.py:Mine"], "for a task, use task=my/task.py:Mine"),
        (["demo", "train.lrr=1"], "did you mean train.lr?"),
        (["demo", "train.lr=x"], "should be a valid number"),
        (["demo", "lr"], "two recipes, demo and lr"),
    ],
)
def test_bad_words_are_refused_before_anything_starts(
    words: list[str], message: str, jetrl: Callable, loop: FakeLoop
) -> None:
    done = jetrl("train", *words)
    assert (done.code, message in done.err, loop.calls) == (2, True, [])


@pytest.mark.parametrize(
    "words, name",
    [
        (["model.path=Qwen/Qwen3-8B", "task=gsm8k"], "qwen3-8b-gsm8k"),
        (["model.path=m/", "task=dataset", "task.path=d/own.jsonl"], "m-own"),
        (["model.config=c.json", "task=my/task.py:Mine"], "mine"),
        (["model.path=m", "task=d/own.jsonl"], "m-own"),
        (["run.name=given", "model.path=m"], "given"),
    ],
)
def test_without_a_recipe_the_defaults_hold(
    words: list[str], name: str, jetrl: Callable, loop: FakeLoop
) -> None:
    assert jetrl("train", *words, "train.lr=2e-6").code == 0
    [(_, settings, _)] = loop.calls
    assert settings == load_config(None, [*words, "train.lr=2e-6", f"run.name={name}"])
    assert (settings.sft.steps, settings.run.device) == (0, "auto")


def test_sft_needs_steps_and_a_free_out(jetrl: Callable, loop: FakeLoop, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    for words, message in (
        (["gsm8k-smoke"], "sft.steps=100"),
        (["demo", "--out", tmp_path], f"--out {tmp_path}: already in use"),
    ):
        done = jetrl("sft", *words)
        assert (done.code, message in done.err, loop.calls) == (2, True, [])
    out = str(tmp_path / "warm")
    assert jetrl("sft", "gsm8k-smoke", "sft.steps=5", "--out", out).code == 0
    name, settings, options = loop.calls[0]
    assert (name, settings.sft.steps, options) == ("sft", 5, {"out": out, "resume": False})


@pytest.mark.parametrize(
    "end, code, word",
    [(KeyboardInterrupt(), 130, "interrupted"), (Terminated(), 143, "terminated")],
)
def test_sft_that_is_stopped_by_a_signal_says_how_to_go_on(
    end: BaseException, code: int, word: str, jetrl: Callable, loop: FakeLoop
) -> None:
    loop.error = end
    done = jetrl("sft", "demo", "run.name=a b", "--out", "models/warm")
    assert done.code == code
    again = "jetrl sft demo 'run.name=a b' --out models/warm --resume"
    assert f"{word}; to resume: {again}\n" in done.err


def test_dry_run_prints_settings_plan_and_memory_and_starts_nothing(
    jetrl: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = jetrl("train", "demo", "--dry-run", "train.lr=0.125")
    assert done.code == 0, done.err
    assert tomllib.loads(done.out)["train"]["lr"] == 0.125  # the rest is in comments
    assert "keep_last" not in done.out, "a default"
    (tmp_path / "again.toml").write_text(done.out)
    assert load_config(tmp_path / "again.toml") == load_config("demo", ["train.lr=0.125"])
    whole = jetrl("train", "demo", "--dry-run", "train.lr=0.125", "--verbose").out
    assert tomllib.loads(whole)["checkpoint"]["keep_last"] == 2
    assert "# precision plan: unified" in done.out
    assert "#   rollout linears" in done.out
    assert "GiB" in done.out
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_says_that_rows_are_few(
    jetrl: Callable, tiny_model: Path, tmp_path: Path
) -> None:
    rows = [f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(3)]
    (tmp_path / "own.jsonl").write_text("".join(rows))
    words = [f"model.path={tiny_model}", f"task={tmp_path / 'own.jsonl'}", f"run.dir={tmp_path}"]
    few = "task.options.format=text"
    done = jetrl("train", "--dry-run", *words, few, "task.workers=0")
    assert "# task own has 2 prompts to train on, fewer than rollout.prompts_per_step" in done.out
    done = jetrl("train", "--dry-run", *words, few, "rollout.prompts_per_step=2")
    assert "prompts to train on" not in done.out


def test_dry_run_plans_for_gpus_that_this_machine_does_not_have(
    jetrl: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "demo", "--dry-run"]
    shape = ["model.config.hidden_size=2048", "model.config.intermediate_size=8192"]
    shape += ["model.config.num_attention_heads=2", "model.config.num_key_value_heads=2"]
    one, four = (jetrl(*words, *shape, "--gpus", count) for count in "14")
    assert (one.code, four.code) == (0, 0), four.err
    assert "# memory plan\n" in one.out
    assert "# memory plan of each of 4 GPUs with 80 GiB (this machine has none" in four.out
    at_a_desk = jetrl(*words, *shape, "run.device=auto")
    assert "# memory plan of a GPU with 80 GiB (this machine has none" in at_a_desk.out
    assert "# memory plan\n" in jetrl(*words, "run.device=auto").out, "tiny: for this CPU"
    faster = "# precision.preset=bf16 trains a model"
    assert [faster in done.out for done in (one, four)] == [False, True]
    integer = "precision.preset=integer"
    for other in ("precision.preset=bf16", "model.config.num_hidden_layers=9", integer):
        assert faster not in jetrl(*words, *shape, other, "--gpus=4").out

    def masters(text: str) -> float:
        return float(text.partition("master weights, FP32")[2].split()[0])

    assert masters(four.out) == pytest.approx(masters(one.out) / 4, abs=0.002)
    heads = ["model.config.head_dim=64", "model.config.vocab_size=128"]
    for backend, plan in (("triton", integer), ("triton", "task.workers=0"), ("hopper", integer)):
        asked = ["run.device=auto", f"run.backend={backend}", plan]
        named = jetrl(*words, *shape, *heads, *asked)
        assert "# memory plan of a GPU with 80 GiB (this machine has none" in named.out, named.err
    asked = ["run.device=auto", "run.backend=triton", "adapter.kind=lora"]
    nvfp4 = jetrl(*words, *shape, *heads, *asked, "precision.base=nvfp4")
    assert "has no kernels for NVFP4; use another precision.preset" in nvfp4.err
    lora = jetrl(*words, *shape, *heads, *asked)
    assert "# memory plan of a GPU with 80 GiB (this machine has none" in lora.out, lora.err
    reference = jetrl(*words, *shape, "run.device=auto", "run.backend=reference")
    assert "# memory plan\n" in reference.out, "a CPU runs it"
    small = jetrl(*words, *shape, "--gpus=1", "--gpu-memory=4")
    assert (small.code, "2.8 GiB are free" in small.err) == (2, True)
    assert jetrl("train", "demo", "--gpus=2").err.startswith("error: --gpus needs --dry-run")
    assert "--gpu-memory -1: must be above 0" in jetrl(*words, "--gpu-memory=-1").err


def test_a_real_run_from_the_command_line(
    jetrl: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["demo", *SMALL]
    done = jetrl("train", *words)
    assert done.code == 0, done.err
    for line in done.out.splitlines()[-7:-3]:
        assert Path(line.split()[1]).exists()
    assert re.fullmatch("digest +[0-9a-f]{64}", done.out.splitlines()[-3])
    reading = "in this task answers are written backwards, lowest digit first: 20+05=520 is right"
    assert done.out.splitlines()[-1].startswith(reading)
    assert reading in done.out.split("step 1/1")[0], "also before the first step"
    assert "In this task answers are written backwards" in Path("runs/demo/report.html").read_text()
    assert jetrl("sample", "runs/demo", "12+07=", "--max-tokens", 2).code == 0
    again = jetrl("train", *words)
    assert again.code == 2
    assert "run.name 'demo' is in use" in again.err


def test_a_resumed_run_has_its_own_settings_and_names_those_of_the_recipe(
    jetrl: Callable, loop: FakeLoop, tmp_path: Path
) -> None:
    place = [f"run.dir={tmp_path}", "run.name=mine"]
    started = load_config("demo", [*place, "train.lr=0.25", "eval.every=7"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.toml").write_text(to_toml(started))
    assert jetrl("train", "demo", *place, "loop.steps=3", "--resume").code == 0
    (_, settings, _) = loop.calls[0]
    assert (settings.train.lr, settings.loop.steps) == (0.25, 3)
    lr = load_config("demo").train.lr
    for command in ("train", "sft"):
        words = (command, "demo", *place, "eval.every=9", "sft.steps=1", "--resume")
        said = jetrl(*words).err
        assert f"ignores these settings of demo: train.lr = {lr} (run: 0.25). To" in said
        assert str(tmp_path / "mine" / "config.toml") in said
    assert jetrl("train", *place, "--resume").err == ""
    assert jetrl("train", tmp_path / "mine" / "config.toml", "--resume").err == ""
    assert jetrl("train", "demo", *place, "train.lr=0.25", "eval.every=7", "--resume").err == ""
    # A run that was renamed, whose settings have the old name.
    (tmp_path / "mine").rename(tmp_path / "copy")
    (tmp_path / "copy" / "plan.json").write_text("{}")
    (tmp_path / "copy.toml").write_text(f'run.dir = "{tmp_path}"\n')
    for recipe in ("copy.toml", "copy/config.toml"):
        assert jetrl("train", tmp_path / recipe, "--resume").code == 0
        assert loop.calls[-1][1].run.name == "copy"


def test_a_rate_of_rl_is_refused_for_supervised_updates(jetrl: Callable, loop: FakeLoop) -> None:
    done = jetrl("sft", "demo", "sft.steps=1", "train.lr=1e-3")
    assert (done.code, loop.calls) == (2, [])
    assert "'train.lr=1e-3' has no effect: supervised updates read sft.lr" in done.err


def test_a_dry_run_refuses_a_folder_that_takes_no_run(jetrl: Callable, tmp_path: Path) -> None:
    done = jetrl("train", "demo", "run.dir=/proc/runs", "--dry-run")
    assert done.code == 2
    assert "run directory /proc/runs/demo: cannot write into /proc: " in done.err
    assert jetrl("train", "demo", f"run.dir={tmp_path}/a/b", "--dry-run").code == 0
    assert list(tmp_path.iterdir()) == []
