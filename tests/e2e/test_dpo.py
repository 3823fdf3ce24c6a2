"""`jetrl sft --task dpo`: learns the task's pairs, resumes, on ranks, and refuses what is odd."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed.ranks import run_ranks
from tests.e2e.small import SMALL, before_call, cut, metrics

from jetrl import load_config
from jetrl.cli.main import main
from jetrl.runs.directory import RunDirectory
from jetrl.session.supervised import train_dpo
from jetrl.training.sft import DpoTrainer

WORDS = """
    task.options.max_operand=4 task.options.digits=1 sft.until=none sft.warmup_steps=0
    sft.examples_per_step=8 sft.lr=1e-3 sft.dpo_beta=0.5 eval.prompts=8 checkpoint.every=2
"""
TINY = [*SMALL, *WORDS.split()]


def command(folder: Path, name: str, *more: str) -> int:
    words = ["demo", *TINY, f"run.dir={folder}", f"run.name={name}"]
    return main(["sft", *words, "--task", "dpo", *more])


def test_it_learns_and_is_written_and_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, "pairs", "sft.steps=40", "--out", str(tmp_path / "out")) == 0
    assert "of 5 pairs ranked correctly" in capsys.readouterr().out
    lines = RunDirectory.open(tmp_path / "pairs").metrics()
    assert lines[0]["dpo/margin"] == 0.0  # the reference is the start, bit for bit
    assert lines[-1]["dpo/eval_accuracy"] > 0.6
    assert lines[-1]["sft/loss"] < lines[0]["sft/loss"]
    # A checkpoint of the updates is exported as one of RL is.
    last = tmp_path / "pairs" / "checkpoints" / "sft" / "step_000040"
    assert main(["export", str(last), str(tmp_path / "exported")]) == 0
    exported, written = ((tmp_path / name / "model.safetensors") for name in ("exported", "out"))
    assert exported.read_bytes() == written.read_bytes()
    # The first run's model is the reference of the next one, under its own path.
    model = [f"model.path={tmp_path / 'out'}", "sft.steps=2"]
    own = [word for word in TINY if not word.startswith("model.config")]
    words = ["demo", *own, *model, f"run.dir={tmp_path}", "run.name=next"]
    assert main(["sft", *words, f"reference.path={tmp_path / 'out'}", "--task", "dpo"]) == 0
    assert RunDirectory.open(tmp_path / "next").metrics()[0]["dpo/margin"] == 0.0


def test_cut_and_resumed_equals_uncut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(tmp_path, "uncut", "sft.steps=5") == 0
    with monkeypatch.context() as patch:
        before_call(DpoTrainer, "step", 4, cut, patch.setattr)
        with pytest.raises(RuntimeError, match="cut"):
            command(tmp_path, "cut", "sft.steps=5")
    assert command(tmp_path, "cut", "sft.steps=5", "--resume") == 0
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "uncut")


def _on_ranks(folder: str, name: str) -> float:
    words = [*TINY, "sft.steps=3", "train.tokens_per_micro_batch=64"]
    settings = load_config("demo", [*words, f"run.dir={folder}", f"run.name={name}"])
    return train_dpo(settings).accuracy


def test_ranks_have_the_bits_of_one_process(tmp_path: Path) -> None:
    alone = _on_ranks(str(tmp_path), "alone")
    assert run_ranks(2, _on_ranks, str(tmp_path), "two") == [alone, alone]
    assert metrics(tmp_path / "two") == metrics(tmp_path / "alone")


def test_the_dry_run_counts_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = ["model.config.hidden_size=1024", "model.config.intermediate_size=4096"]
    assert command(tmp_path, "dry", "sft.steps=2", *large, "--dry-run") == 0
    assert "reference: quantized weights only" in capsys.readouterr().out


def test_what_has_no_effect_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["demo", *TINY, "sft.steps=2", f"run.dir={tmp_path}", "run.name=run"]
    assert main(["sft", *words]) == 2
    assert "sft.dpo_beta=0.5' has no effect without --task dpo" in capsys.readouterr().err
    for word in ("train.graphs=on", "train.router_aux_loss=0.1"):
        assert command(tmp_path, "run", "sft.steps=2", word) == 2
        assert "has no effect in training on pairs" in capsys.readouterr().err
    noise = ["adapter.kind=lora", "adapter.train_norms=true", "reference.path=none"]
    assert command(tmp_path, "run", "sft.steps=2", *noise) == 2
    assert "set reference.path" in capsys.readouterr().err
