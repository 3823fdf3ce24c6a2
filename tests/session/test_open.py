"""Mistakes are found before anything is written: no run directory, no warm-up."""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from jetrl.cli.train import recipe_settings
from jetrl.errors import UserError
from jetrl.loop import sft, train
from jetrl.models.tiny import make_tiny
from jetrl.runs import RunDirectory
from jetrl.session import open as opening
from jetrl.session.prompt_order import PromptOrder
from jetrl.session.sampling import EncodedPrompt
from jetrl.session.session import Session
from jetrl.settings.loading import load_config
from jetrl.settings.presets import PRESETS
from jetrl.tasks import get_task
from jetrl.types import Prompt


@pytest.mark.parametrize(
    "wrong",
    [
        ["algorithm.name=nowhere.py:loss"],
        ["algorithm.name=ppo", "critic.path=/nowhere"],
        ["algorithm.kl=0.1", "reference.path=/nowhere"],
    ],
)
def test_what_is_built_after_the_warm_up_is_checked_before(
    tmp_path: Path, wrong: list[str]
) -> None:
    settings = load_config("demo", [f"run.dir={tmp_path}", *wrong])
    with pytest.raises(UserError, match="nowhere"), Session(settings):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["reference.path={}"],
        ["critic.path={}", "algorithm.name=ppo", "algorithm.aggregation=none"],
        ["reward.model_path={}", "reward.model=1.0"],
    ],
)
def test_a_model_whose_context_is_shorter_than_a_sequence_is_refused(
    tmp_path: Path, words: list[str]
) -> None:
    """Positions behind the model's rotary table would be read in the middle of the run."""
    other = make_tiny(tmp_path / "other", max_position_embeddings=17)  # 6 + 12 tokens are needed
    if "reward" in words[0]:
        config = json.loads((other / "config.json").read_text())
        config |= {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
        (other / "config.json").write_text(json.dumps(config))
    changes = [word.format(other) for word in words]
    settings = load_config("demo", [f"run.dir={tmp_path / 'runs'}", *changes])
    message = "its context of 17 tokens is shorter than .* 6 tokens and rollout.max_tokens = 12"
    with pytest.raises(UserError, match=message), Session(settings):
        pass
    assert not (tmp_path / "runs").exists()


def test_a_tracker_that_is_not_installed_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(opening, "build_policy", lambda *_: pytest.fail("the model was loaded"))
    settings = load_config("demo", [f"run.dir={tmp_path}", 'trackers.names=["wandb"]'])
    with pytest.raises(UserError, match="pip install wandb"):
        Session(settings).__enter__()
    assert not list(tmp_path.iterdir())


def test_more_bf16_layers_than_the_model_has_are_refused(tmp_path: Path) -> None:
    settings = load_config("demo", [f"run.dir={tmp_path}", "precision.last_layers_bf16=3"])
    with pytest.raises(UserError, match="last_layers_bf16 = 3: the model has 2 layers"):
        Session(settings).__enter__()
    assert not list(tmp_path.iterdir())


def test_more_pages_than_there_is_memory_for_are_refused_before_the_warm_up(tmp_path: Path) -> None:
    settings = load_config("demo", [f"run.dir={tmp_path}", "rollout.num_pages=1000000000"])
    with pytest.raises(UserError, match=r"num_pages = 1000000000: .* GiB are free; at most"):
        Session(settings).__enter__()
    assert not list(tmp_path.iterdir())


def test_a_task_without_worked_answers_is_refused_before_the_run_directory(
    plain_task: str, tmp_path: Path
) -> None:
    words = [f"task={plain_task}", "sft.steps=2", f"run.dir={tmp_path / 'runs'}"]
    with pytest.raises(UserError, match=r"worked answers, and task Plain has none for prompt '0'"):
        sft(load_config("demo", words))
    assert not (tmp_path / "runs").exists()


def test_a_worked_answer_longer_than_the_context_is_named_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(LONG_AT_LAST)
    words = ["model.config.max_position_embeddings=9", "rollout.max_tokens=2", "sft.until=none"]
    words += ["eval.every=0", "sft.steps=1", "sft.examples_per_step=1"]
    words += [f"run.dir={tmp_path / 'runs'}", f"task={tmp_path / 'own.py'}:Own"]
    with pytest.raises(UserError, match=r"'5' .* worked answer have 10 tokens, .* context is 9"):
        sft(load_config("demo", words))
    assert not (tmp_path / "runs").exists()


LONG_AT_LAST = """
from jetrl.tasks import Task
from jetrl.types import Prompt
class Own(Task):
    alphabet = "0123456789="
    def prompts(self, split): return [Prompt(id=str(i), text=f"{i}=") for i in range(6)]
    def score(self, prompt, completion): return 1.0
    def demonstration(self, prompt): return "1" * (7 if prompt.id == "5" else 2)
"""


def test_to_look_for_worked_answers_draws_none_of_the_runs(tmp_path: Path) -> None:
    """The demo's teacher errs at random: its answers of a run are those it would give anyway."""
    words = [
        "sft.steps=1",
        "sft.until=none",
        "eval.every=0",
        "loop.steps=0",
        "report.enabled=false",
    ]
    settings = load_config("demo", [*words, f"run.dir={tmp_path}", "run.name=run"])
    with Session(settings) as session:
        task = get_task("arithmetic", **dict(settings.task.options))
        for encoded in session.context.prompts[:50]:
            theirs = session.context.task.demonstration(encoded.prompt)
            assert theirs == task.demonstration(encoded.prompt)


def test_a_run_is_not_refused_for_prompts_that_it_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan made before the prompts are read is the least that any prompts would take."""
    check, loads = opening.check_fits, []

    def seen(*arguments: Any) -> Any:
        loads.append(arguments[3])
        return check(*arguments)

    monkeypatch.setattr(opening, "check_fits", seen)
    words = ["sft.steps=0", "loop.steps=0", "report.enabled=false", f"run.dir={tmp_path}"]
    with Session(load_config("demo", words)):
        first, second = loads
    assert first.tokens < second.tokens
    assert first.prompts < second.prompts


def test_a_run_says_where_the_context_ends_before_max_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sft.steps=0", "loop.steps=0", "report.enabled=false", f"run.dir={tmp_path}"]
    with Session(load_config("demo", words)):
        assert "rollout.max_tokens" not in capsys.readouterr().out
    with Session(load_config("demo", [*words, "run.name=long", "rollout.max_tokens=251"])):
        said = capsys.readouterr().out
    assert "rollout.max_tokens = 251: after the longest prompt, of 6 tokens" in said
    assert "has room for 250" in said


def test_a_run_says_how_long_it_took_to_prove_that_the_flow_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["sft.steps=0", "loop.steps=0", "report.enabled=false", f"run.dir={tmp_path}"]
    with Session(load_config("demo", words)) as session:
        assert "proven" not in session.context.loading  # on the CPU there is nothing to prove
    monkeypatch.setattr(opening, "require_exact", lambda _: 2.52)
    with Session(load_config("demo", [*words, "run.name=gpu"])) as session:
        assert session.context.loading.endswith(" s, exactness proven in 2.5 s")


@pytest.mark.parametrize("words", [["sft.steps=0"], ["sft.steps=2", "checkpoint.every=1"]])
def test_a_resumed_run_says_the_micro_batches_that_it_takes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    """They are the checkpoint's, also where less memory is free now than was then."""
    words = [*words, "sft.until=none", "eval.every=0", "loop.steps=1", "report.enabled=false"]
    words += [f"run.dir={tmp_path}", "run.name=run", "sft.examples_per_step=4"]
    words += ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_tokens=4"]
    if "sft.steps=0" in words:
        train(load_config("demo", words))
    else:
        monkeypatch.setattr(Session, "_open_trainer", lambda *_: 1 / 0)  # behind the warm-up
        with pytest.raises(ZeroDivisionError):
            train(load_config("demo", words))
    check = opening.check_fits

    def tight(*arguments: Any) -> Any:
        fitted = check(*arguments)
        return dataclasses.replace(fitted, tokens=fitted.tokens // 4)

    monkeypatch.setattr(opening, "check_fits", tight)
    capsys.readouterr()
    with contextlib.suppress(ZeroDivisionError):
        train(load_config("demo", [*words, "loop.steps=2"]), resume=True)
    said = capsys.readouterr().out
    assert "micro-batches of up to 4096 tokens, as before the run was cut" in said
    assert "the memory plan is for 1024" in said
    assert "no room" not in said
    with Session(load_config("demo", [*words, "run.name=another"])):
        assert "micro-batches of up to 1024 tokens: there is no room" in capsys.readouterr().out


def test_the_reference_is_never_of_an_attempt_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that fails at once leaves its name free, also for another model."""
    words = ["sft.steps=0", "eval.every=0", "loop.steps=1", "algorithm.kl=0.1"]
    words += ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_tokens=4"]
    words += [f"run.dir={tmp_path}", "run.name=run", "report.enabled=false"]
    with monkeypatch.context() as patch:
        patch.setattr(Session, "sample", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(load_config("demo", words))
    assert (tmp_path / "run" / "reference").is_dir()
    result = train(load_config("demo", [*words, "run.seed=7"]))
    [line] = RunDirectory.open(result.run_path).metrics()
    assert line["policy/kl_ref"] == 0, "before the first update it is the policy"


def test_a_resume_that_is_refused_leaves_the_settings_of_the_run(tmp_path: Path) -> None:
    words = ["sft.steps=0", "eval.every=0", "loop.steps=1", "report.enabled=false"]
    words += ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_tokens=4"]
    words += [f"run.dir={tmp_path}", "run.name=run"]
    train(load_config("demo", words))
    own = tmp_path / "run" / "config.toml"
    before = own.read_text()
    other = ["loop.steps=2", "train.optimizer_states=compact"]
    with pytest.raises(UserError, match="the checkpoint has fp32 optimizer states"):
        train(load_config(own, other), resume=True)
    assert own.read_text() == before
    assert train(load_config(own, ["loop.steps=2"]), resume=True).steps == 2
    assert "steps = 2" in own.read_text()


def test_a_resumed_run_keeps_the_keys_and_values_that_its_preset_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["sft.steps=0", "eval.every=0", "loop.steps=1", "report.enabled=false"]
    words += ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_tokens=4"]
    words += [f"run.dir={tmp_path}"]
    train(load_config("demo", [*words, "run.name=old"]))
    old, meant = tmp_path / "old", PRESETS["unified"]
    plan = RunDirectory.open(old).plan()
    other = "bf16" if meant.kv != "bf16" else "fp8"
    monkeypatch.setitem(PRESETS, "unified", meant._replace(kv=other))
    own = old / "config.toml"
    with pytest.raises(UserError, match=r"another precision plan \(kv: \S+ there, \S+ here\)"):
        train(load_config(own, [f"precision.kv={other}"]), resume=True)
    assert train(load_config(own, ["loop.steps=2"]), resume=True).steps == 2
    assert recipe_settings(["demo", *words, "run.name=old"], resume=True).precision.kv == meant.kv
    assert RunDirectory.open(old).plan() == plan
    train(load_config("demo", [*words, "run.name=new"]))
    assert RunDirectory.open(tmp_path / "new").plan()["kv"] == other


def test_pass_rates_are_not_kept_of_two_prompts_under_one_id() -> None:
    prompts = [EncodedPrompt(Prompt(id=i, text="?"), (1,), ()) for i in ("a", "b", "b")]
    settings = load_config("demo", ["data.order=pass_rate"])
    with pytest.raises(UserError, match=r"pass_rate: 2 prompts have the id 'b'"):
        PromptOrder(settings, prompts, {})
    PromptOrder(load_config("demo"), prompts, {})
