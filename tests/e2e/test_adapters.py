"""Whole runs with adapters: they learn, stay exact, resume with the same bits, and are exported."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import run_ranks
from tests.distributed.runs import results, run_small
from tests.e2e.small import SMALL, demo, metrics, without_last_checkpoint

from jetrl import load_config, train
from jetrl.cli.main import main
from jetrl.cli.opening import open_policy
from jetrl.errors import UserError
from jetrl.models.scalar_model import ScalarModel
from jetrl.models.tiny import make_tiny
from jetrl.precision import PrecisionPlan
from jetrl.runs.directory import RunDirectory

OWN = "sft.steps=2 train.lr=1e-2 algorithm.kl=0.01 adapter.kind=lora adapter.rank=4"
TINY = [*SMALL, *OWN.split()]
settings = partial(demo, TINY)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(settings(tmp_path_factory.mktemp("runs"), "loop.steps=4")).run_path


def test_a_run_is_exact_and_leaves_an_adapter(run: Path) -> None:
    steps = RunDirectory.open(run).metrics("rl")[-4:]
    assert all(line["mismatch/num_different"] == 0 for line in steps)
    assert all(line["policy/kl_ref"] > 0 for line in steps), "the warm-up has moved the adapter"
    names = {file.name for file in (run / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert "model.safetensors" not in names
    assert not (run / "reference").exists(), "the base is the reference"
    saved = sorted((run / "checkpoints").glob("step_*"))[-1]
    assert (saved / "masters.safetensors").stat().st_size < 200_000
    state = json.loads((saved / "state.json").read_text())
    assert state["model"]["adapter"]["rank"] == 4


def is_as_uncut_after_step_2(uncut: Path, cut: Path, *overrides: str) -> bool:
    """Continue a copy of a run of 4 steps from its second."""
    without_last_checkpoint(uncut, cut)
    train(settings(cut.parent, "loop.steps=4", *overrides, name=cut.name), resume=True)
    files = [f"checkpoints/step_000004/{n}.safetensors" for n in ("masters", "optimizer")]
    same = all((cut / file).read_bytes() == (uncut / file).read_bytes() for file in files)
    return same and metrics(cut)[-2:] == metrics(uncut)[-2:]


def test_a_resumed_run_has_the_bits_of_an_uncut_one(run: Path, tmp_path: Path) -> None:
    assert is_as_uncut_after_step_2(run, tmp_path / "run")
    with pytest.raises(UserError, match=r"model adapter.*rank"):
        train(settings(tmp_path, "loop.steps=6", "adapter.rank=5"), resume=True)


def test_two_ranks_have_the_bits_of_one(tmp_path: Path) -> None:
    options = ("adapter.kind=lora", "adapter.rank=4", "adapter.train_norms=true", "loop.steps=2")
    alone = Path(run_small(str(tmp_path), "alone", *options))
    path = Path(run_ranks(2, run_small, str(tmp_path), "two", *options)[0])
    assert results(path) == results(alone)


def test_commands_take_a_run_with_an_adapter(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: object) -> str:
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    prompts = ["12+7=", "--temperature", "0", "--max-tokens", "6", "--device", "cpu"]
    of_run = said("sample", run, *prompts)
    assert said("sample", run / "model", *prompts) == of_run
    base = tmp_path / "base"
    exported = said("export", run, tmp_path / "adapter", "--base", base)
    assert "the random base" in exported
    assert "an adapter, float32" in exported
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(base)
    assert said("sample", tmp_path / "adapter", *prompts, "--plan", "unified") == of_run
    of_export = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    assert of_export == (run / "model" / "adapter_model.safetensors").read_bytes()
    printed = said("export", run, tmp_path / "whole", "--merge", "--dtype", "float32")
    assert "measured: after rounding to FP8, the merged change is off by" in printed
    merged, adapted = (open_policy(p, "fp32", "cpu") for p in (tmp_path / "whole", run / "model"))
    with torch.no_grad():
        ours, theirs = (p.logprobs([[1, 2, 3, 4, 5, 6]])[0] for p in (merged, adapted))
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    assert main(["export", str(run), str(tmp_path / "x"), "--dtype", "fp8"]) == 2
    assert "add --merge" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "words", "message"),
    [
        ("adapter", [], "random base.*add --base DIR to write the base too, or --merge"),
        ("whole", ["--base", "OUT"], "--base is for .* it has no adapter"),
    ],
)
def test_an_adapter_whose_base_no_reader_could_find_is_not_exported(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    source: str,
    words: list[str],
    message: str,
) -> None:
    model = run if source == "adapter" else make_tiny(tmp_path / "whole", num_layers=1)
    words = [word.replace("OUT", str(tmp_path / "out")) for word in words]
    assert main(["export", str(model), str(tmp_path / "written"), *words]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "written").exists()


def test_a_checkpoint_over_another_base_than_its_own_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    config = copy / "config.toml"
    text = config.read_text()
    assert "\nseed = 0\n" in text
    config.write_text(text.replace("\nseed = 0\n", "\nseed = 7\n", 1))
    assert main(["sample", str(copy), "1+1=", "--device", "cpu"]) == 2
    assert "trained on another base than the random weights" in capsys.readouterr().err


def test_a_reward_model_is_trained_by_an_adapter_and_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sft.until=none", "sft.steps=2", "sft.examples_per_step=4", "eval.prompts=4"]
    words += ["model.config.num_hidden_layers=1", "adapter.kind=lora", "adapter.rank=2"]
    run = [f"run.dir={tmp_path}", "run.name=judge", "report.enabled=false"]
    assert main(["sft", "demo", "--task", "reward", *words, *run]) == 0
    assert "--merge\nuse it" in capsys.readouterr().out
    adapter, whole = tmp_path / "judge" / "model", tmp_path / "whole"
    command = ["export", str(adapter), str(whole), "--merge", "--dtype", "float32"]
    assert main(command) == 0
    assert re.search(r"after rounding to FP8, .* off by \d+%", capsys.readouterr().out)
    judge = ScalarModel.from_pretrained(whole, PrecisionPlan.preset("unified"), frozen=True)
    assert judge.scores([[1, 2, 3]], 9).abs().item() > 0
    with pytest.raises(UserError, match="an adapter, not a whole model"):
        ScalarModel.from_pretrained(adapter, PrecisionPlan.preset("unified"), frozen=True)


def test_a_run_goes_on_from_an_adapter_on_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base is read from its directory; an adapter of another base is refused, not merged."""
    base = make_tiny(
        tmp_path / "base", num_layers=1, alphabet="0123456789+=", initializer_range=0.1
    )
    words = [f"model.path={base}", "sft.steps=0", "loop.steps=1", "algorithm.kl=0"]
    words += ["model.config=none", "model.tokenizer=none"]
    fresh = [w for w in TINY if not w.startswith(("model.config", "adapter.rank", "algorithm.kl"))]

    def go(name: str, *more: str) -> Path:
        overrides = [*fresh, *words, f"run.dir={tmp_path}", f"run.name={name}", *more]
        return train(load_config("demo", overrides)).run_path

    first = go("first", "adapter.rank=2", 'adapter.targets=["q_proj", "down_proj"]')
    second = go("second", f"adapter.path={first / 'model'}")
    config = json.loads((second / "model" / "adapter_config.json").read_text())
    assert (config["r"], sorted(config["target_modules"])) == (2, ["down_proj", "q_proj"])
    assert config["base_model_name_or_path"] == str(base)
    other = make_tiny(tmp_path / "other", num_layers=1, alphabet="0123456789+=", seed=5)
    with pytest.raises(UserError, match="trained on another base"):
        go("third", f"adapter.path={first / 'model'}", f"model.path={other}")
    file, out = second / "model" / "adapter_config.json", str(tmp_path / "merged")
    for base_path, said in ((other, "trained on another base"), ("gone", "'gone': no such direc")):
        file.write_text(json.dumps(config | {"base_model_name_or_path": str(base_path)}))
        assert main(["export", str(second / "model"), out, "--merge"]) == 2
        assert said in capsys.readouterr().err
        assert not Path(out).exists()


def test_a_base_in_nvfp4_with_noise_is_exact_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    options = ["precision.base=nvfp4", "adapter.noise_start=0.05", "adapter.noise_end=0.01"]
    options += [
        "adapter.noise_stages=3",
        "eval.every=4",
        "eval.prompts=4",
        "sft.steps=0",
        "loop.steps=4",
    ]
    uncut = train(settings(tmp_path, *options, name="uncut")).run_path
    lines = [line for line in RunDirectory.open(uncut).metrics("rl") if line["step"] > 0]
    assert [line["mismatch/num_different"] for line in lines] == [0] * 4
    assert lines[0]["policy/kl_ref"] == 0, "a new adapter is its base"
    sigmas = [line["noise/sigma"] for line in lines]
    assert sigmas == pytest.approx([0, 0.05, (0.05 * 0.01) ** 0.5, 0.01])
    assert is_as_uncut_after_step_2(uncut, tmp_path / "cut", *options)
