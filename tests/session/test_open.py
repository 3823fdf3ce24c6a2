"""The opening of a run, at its start and when it is resumed."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jetrl.cli.train import recipe_settings
from jetrl.errors import UserError
from jetrl.loop import train
from jetrl.models.tiny import make_tiny
from jetrl.runs.directory import RunDirectory
from jetrl.session import open as opening
from jetrl.session.prompt_order import PromptOrder
from jetrl.session.sampling import EncodedPrompt
from jetrl.session.session import Session
from jetrl.settings.loading import load_config
from jetrl.settings.presets import PRESETS
from jetrl.tasks import get_task, read_prompts
from jetrl.tasks.registry import trained_on
from jetrl.types import Prompt, PromptInputs

WORDS = """sft.steps=0 sft.until=none eval.every=0 loop.steps=1 report.enabled=false
rollout.prompts_per_step=4 rollout.samples_per_prompt=2 rollout.max_tokens=4
sft.examples_per_step=4"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return [*WORDS.split(), f"run.dir={tmp_path}", "run.name=run"]


ASKED = {  # the split: what it asks, of two tasks
    "first": {"train": range(10), "test": range(8, 14)},
    "second": {"train": range(20, 30), "test": (9, 21, 30)},
}


def write_rows(folder: Path, name: str) -> str:
    (folder / name).mkdir()
    for split, numbers in ASKED[name].items():
        rows = [
            {"prompt": f"{n}+1=", "answer": "1", "chosen": "1", "rejected": "2"} for n in numbers
        ]
        (folder / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / name)


@pytest.mark.parametrize(
    "weight, said",
    [
        (1, "4 of 9 evaluation prompts are also trained on, such as first/test-0 (in training: "),
        (0, "3 of 9 evaluation prompts are also trained on, such as first/test-0 (in training: "),
    ],
)
def test_tasks_that_are_mixed_share_prompts_in_spite_of_their_system_prompts(
    weight: int, said: str, tmp_path: Path
) -> None:
    """The first task trains on 8 and 9 of its own eval set; the second asks 9 and 21 again."""
    first, second = (
        {"name": "dataset", "path": write_rows(tmp_path, name), "label": name} for name in ASKED
    )
    first["system_prompt"], second["weight"] = "Add.", weight
    mix = get_task("mix", tasks=[first, second])
    trained, held_out = (read_prompts(mix, split) for split in ("train", "test"))
    assert trained_on(mix, trained, held_out).startswith(said)
    assert trained_on(mix, trained[:8], held_out[2:6]) == ""


def test_a_run_says_how_many_of_its_evaluation_prompts_it_trains_on(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = write_rows(tmp_path, "first"), str(tmp_path / "model")
    sizes = {"hidden_size": 64, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    sizes["head_dim"] = 64
    make_tiny(model, family="qwen3", tokenizer="bpe", text_files=[f"{path}/train.jsonl"], **sizes)
    words += [f"model.path={model}", f"task={path}", "task.options.format=text", "eval.every=1"]
    settings = load_config(None, [*words, "precision.preset=fp32"])
    said = "warning: 2 of 6 evaluation prompts are also trained on, such as test-0 (in training: "
    notes = opening.check_pairs(settings).notes
    assert [note.startswith(said) for note in notes if "trained on" in note] == [True]
    with Session(settings):
        pass
    assert said in " ".join(capsys.readouterr().out.split())
    assert said in (tmp_path / "run" / "log.txt").read_text()


def test_to_look_for_worked_answers_draws_none_of_the_runs(words: list[str]) -> None:
    """The demo's teacher errs at random: its answers of a run are those it would give anyway."""
    settings = load_config("demo", [*words, "sft.steps=1", "loop.steps=0"])
    with Session(settings) as session:
        task = get_task("arithmetic", **dict(settings.task.options))
        for encoded in session.context.prompts[:50]:
            theirs = session.context.task.demonstration(encoded.prompt)
            assert theirs == task.demonstration(encoded.prompt)


def test_a_run_is_not_refused_for_prompts_that_it_does_not_have(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan made before the prompts are read is the least that any prompts would take."""
    check, loads = opening.check_fits, []

    def seen(*arguments: Any, **options: Any) -> Any:
        loads.append(arguments[0].load)
        return check(*arguments, **options)

    monkeypatch.setattr(opening, "check_fits", seen)
    with Session(load_config("demo", words)):
        first, second = loads
    assert first.tokens < second.tokens
    assert first.prompts < second.prompts


def test_a_run_says_where_the_context_ends_and_how_long_the_proof_of_exactness_took(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Session(load_config("demo", words)) as session:
        out = capsys.readouterr().out
        assert "rollout.max_tokens" not in out
        assert "train.warmup_steps is above its 2 updates" in out
        assert "proven" not in session.context.loading  # on the CPU there is nothing to prove
    monkeypatch.setattr(opening, "require_exact", lambda _: 2.52)
    long = [*words, "run.name=long", "rollout.max_tokens=251", "train.warmup_steps=2"]
    with Session(load_config("demo", long)) as session:
        assert session.context.loading.endswith(" s, exactness proven in 2.5 s")
    said = capsys.readouterr().out
    assert "rollout.max_tokens = 251: after the longest prompt, of 6 tokens" in said
    assert "has room for 250" in said
    assert "warmup_steps" not in said, "the second of two updates has train.lr"


@pytest.mark.parametrize("more", [[], ["sft.steps=2", "checkpoint.every=1"]])
def test_a_resumed_run_says_the_micro_batches_that_it_takes(
    words: list[str],
    more: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They are the checkpoint's, also where less memory is free now than was then."""
    words += more
    if more:
        monkeypatch.setattr(Session, "_open_trainer", lambda *_: 1 / 0)  # behind the warm-up
    with pytest.raises(ZeroDivisionError) if more else contextlib.nullcontext():
        train(load_config("demo", words))
    check = opening.check_fits

    def tight(*arguments: Any, **options: Any) -> Any:
        fitted = check(*arguments, **options)
        return dataclasses.replace(fitted, tokens=fitted.tokens // 4)

    monkeypatch.setattr(opening, "check_fits", tight)
    capsys.readouterr()
    with contextlib.suppress(ZeroDivisionError):
        train(load_config("demo", [*words, "loop.steps=2"]), resume=True)
    said = capsys.readouterr().out
    assert "micro-batches of up to 4096 tokens, as before the interruption" in said
    assert "the memory plan has 1024" in said
    assert "does not fit" not in said
    with Session(load_config("demo", [*words, "run.name=another"])):
        assert "micro-batches of up to 1024 tokens: train.tokens_per" in capsys.readouterr().out


def test_the_reference_is_never_of_an_attempt_before_the_first_step(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that fails at once leaves its name free, also for another model."""
    words += ["algorithm.kl=0.1"]
    with monkeypatch.context() as patch:
        patch.setattr(Session, "sample", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(load_config("demo", words))
    assert (tmp_path / "run" / "reference").is_dir()
    result = train(load_config("demo", [*words, "run.seed=7"]))
    [line] = RunDirectory.open(result.run_path).metrics()
    assert line["policy/kl_ref"] == 0, "before the first update it is the policy"


@pytest.mark.parametrize(
    "undefined",
    [
        "adapter.kind=lora",
        "rollout.speculation=head",
        "data.order=pass_rate",
        "data.batch=shuffle_r1",
        "algorithm.name=ppo critic.path=policy",
    ],
)
def test_what_has_no_definition_is_refused_under_the_plan_integer(
    undefined: str, words: list[str]
) -> None:
    given = [*words, "precision.preset=integer", *undefined.split()]
    with pytest.raises(UserError, match=r"not defined for every machine yet, as preset integer"):
        train(load_config("demo", given))


MEANT = [("unified", "kv", "int8+fp8", "bf16"), ("mixed", "bf16_rounding", "nearest", "dithered")]


@pytest.mark.parametrize("preset, key, meant, other", MEANT)
def test_a_resumed_run_keeps_its_settings_and_the_formats_that_its_preset_meant(
    preset: str, key: str, meant: str, other: str, words: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    words += [f"precision.preset={preset}"]
    monkeypatch.setitem(PRESETS, preset, PRESETS[preset]._replace(**{key: meant}))
    train(load_config("demo", words))
    own, plan = tmp_path / "run" / "config.toml", RunDirectory.open(tmp_path / "run").plan()
    before = own.read_text()
    monkeypatch.setitem(PRESETS, preset, PRESETS[preset]._replace(**{key: other}))
    for changed, message in (
        ("train.optimizer_states=compact", "the checkpoint has fp32 optimizer states"),
        (f"precision.{key}={other}", rf"another precision plan \({key}: \S+ there, \S+ here\)"),
    ):
        with pytest.raises(UserError, match=message):
            train(load_config(own, ["loop.steps=2", changed]), resume=True)
        assert own.read_text() == before
    assert train(load_config(own, ["loop.steps=2"]), resume=True).steps == 2
    assert "steps = 2" in own.read_text()
    assert getattr(recipe_settings(["demo", *words], resume=True).precision, key) == meant
    assert RunDirectory.open(tmp_path / "run").plan() == plan
    train(load_config("demo", [*words, "run.name=new"]))
    assert RunDirectory.open(tmp_path / "new").plan()[key] == other


def test_a_run_of_before_keeps_log_probs_of_all_tokens(
    words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(load_config("demo", [*words, "rollout.top_k=5", "rollout.truncated_logprobs=false"]))
    own = tmp_path / "run" / "config.toml"
    assert "truncated_logprobs = false" in own.read_text()
    lines = own.read_text().splitlines()
    older = [line for line in lines if not line.startswith(("truncated_logprobs", "min_p"))]
    own.write_text("\n".join(older))
    asked = recipe_settings([str(own), "rollout.truncated_logprobs=true"], resume=True)
    assert asked.rollout.truncated_logprobs
    assert recipe_settings([str(own), "rollout.top_p=0.9"], resume=True).rollout.top_p == 0.9
    train(load_config(own, ["loop.steps=2"]), resume=True)
    assert "truncated_logprobs = false" in own.read_text()
    assert "this run began before that setting" in (tmp_path / "run" / "log.txt").read_text()
    metrics = RunDirectory.open(tmp_path / "run").metrics("rl")[-1]
    assert metrics["mismatch/num_different"] == 0


def test_pass_rates_are_not_kept_of_two_prompts_under_one_id() -> None:
    prompts = [
        EncodedPrompt(Prompt(id=i, text="?"), PromptInputs((1,)), ()) for i in ("a", "b", "b")
    ]
    settings = load_config("demo", ["data.order=pass_rate"])
    with pytest.raises(UserError, match=r"pass_rate: 2 prompts have the id 'b'"):
        PromptOrder(settings, prompts, {})
    PromptOrder(load_config("demo"), prompts, {})
