"""A reward model from the command line into a run: trained, written, loaded back, weighed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.small import SMALL, before_call, cut, metrics, task_of
from transformers import AutoModelForSequenceClassification

from jetrl import load_config, train
from jetrl.cli.main import main
from jetrl.errors import UserError
from jetrl.models.scalar_model import ScalarModel
from jetrl.models.tiny import make_tiny
from jetrl.precision import PrecisionPlan
from jetrl.runs.directory import RunDirectory
from jetrl.session import open as opening
from jetrl.session.session import Session
from jetrl.training.optimizer import Optimizer
from jetrl.training.sft import RewardTrainer

WORDS = """
    task.options.max_operand=4 task.options.digits=1 sft.until=none sft.warmup_steps=0 loop.steps=1
    sft.examples_per_step=16 rollout.prompts_per_step=3 eval.prompts=8 train.updates_per_step=1
    checkpoint.every=0
"""
TINY = [*SMALL, *WORDS.split()]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("judge")
    words = ["demo", *TINY, "sft.steps=60", f"run.dir={path}", "run.name=judge"]
    assert main(["sft", *words, "--task", "reward", "--out", str(path / "out")]) == 0
    return path


def test_it_learns_and_is_written(judge: Path) -> None:
    lines = RunDirectory.open(judge / "judge").metrics()
    assert lines[0]["reward_model/accuracy"] == 0
    assert lines[-1]["reward_model/eval_accuracy"] > 0.6
    assert lines[-1]["sft/loss"] < lines[0]["sft/loss"]
    plan = PrecisionPlan.preset("unified")
    model = ScalarModel.from_pretrained(judge / "out", plan, frozen=True)
    assert model.tokenizer is not None


def test_checkpoints_are_exported_with_the_scores_that_transformers_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, "sft.steps=4", f"run.dir={tmp_path}", "run.name=judge"]
    words[words.index("checkpoint.every=0")] = "checkpoint.every=2"
    for adapter in ([], ["adapter.kind=lora", "adapter.rank=4", "run.name=lora"]):
        assert main(["sft", "demo", *words, "--task", "reward", *adapter]) == 0
    run, lora = tmp_path / "judge", tmp_path / "lora"
    (checkpoint,) = (run / "checkpoints" / "sft").glob("step_*4")
    places = {"a": run, "b": run / "model", "c": checkpoint}
    for name, place in places.items():
        assert main(["export", str(place), str(tmp_path / name)]) == 0
    files = [tmp_path / name / "model.safetensors" for name in places]
    assert {file.read_bytes() for file in files} == {
        (run / "model" / "model.safetensors").read_bytes()
    }
    assert main(["export", str(lora), str(tmp_path / "merged"), "--merge"]) == 0
    for name in ("c", "merged"):
        ours = ScalarModel.from_pretrained(tmp_path / name, "fp32")
        theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / name)
        sequences = [[5, 6, 7], [9, 8, 7, 6, 5, 4]]
        with torch.no_grad():
            expected = [theirs(torch.tensor([tokens])).logits.item() for tokens in sequences]
        # As in tests/models/test_scalar_model.py.
        bound = 10 * 20 * 128**0.5 * 2**-24
        assert ours.scores(sequences, 100).tolist() == pytest.approx(expected, abs=bound)
        assert max(map(abs, expected)) > 100 * bound
    assert main(["export", str(checkpoint), str(tmp_path / "bf16"), "--dtype", "bfloat16"]) == 0
    assert (tmp_path / "bf16" / "model.safetensors").stat().st_size < files[0].stat().st_size
    capsys.readouterr()
    assert main(["sample", str(checkpoint), "1+1="]) == 2
    assert "a checkpoint of a reward model, which has scores and no" in capsys.readouterr().err


def test_cut_and_resumed_equals_uncut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*TINY, "sft.steps=5", "sft.check_every=2", "checkpoint.every=2", f"run.dir={tmp_path}"]
    words[words.index("sft.until=none")] = "sft.until=1.1"  # it is looked at, and never reached

    def train_it(name: str, *more: str) -> int:
        return main(["sft", "demo", *words, f"run.name={name}", "--task", "reward", *more])

    assert train_it("uncut") == 0
    with monkeypatch.context() as patch:
        before_call(RewardTrainer, "step", 4, cut, patch.setattr)
        with pytest.raises(RuntimeError, match="cut"):
            train_it("cut")
    assert train_it("cut", "--resume") == 0
    uncut, resumed = tmp_path / "uncut", tmp_path / "cut"
    lines = metrics(uncut)
    assert metrics(resumed) == lines
    evaluated = [i + 1 for i, line in enumerate(lines) if "reward_model/eval_accuracy" in line]
    assert evaluated == [2, 4, 5]
    model = Path("model") / "model.safetensors"
    assert (uncut / model).read_bytes() == (resumed / model).read_bytes()
    assert train_it("cut", "--resume", "sft.steps=6", "report.enabled=true") == 0
    page = (resumed / "report.html").read_text()
    assert "6 supervised updates" in page
    assert "Pairs ranked correctly" in page


def test_a_nan_that_adamw_makes_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    apply = Optimizer.apply

    def spoiling(optimizer: Optimizer, total_norm: torch.Tensor) -> None:
        apply(optimizer, total_norm)
        with torch.no_grad():
            optimizer.masters["score.weight"][0, 3] *= float("inf")

    monkeypatch.setattr(Optimizer, "apply", spoiling)
    words = ["demo", *TINY, "sft.steps=1", f"run.dir={tmp_path}", "run.name=judge"]
    assert main(["sft", *words, "--task", "reward", "--out", str(tmp_path / "out")]) == 4
    assert "after step 1 there is a NaN or an infinity in masters/score" in capsys.readouterr().err
    assert not list((tmp_path / "judge" / "checkpoints").rglob("step_*"))
    assert not (tmp_path / "out").exists()


def test_its_score_is_weighed_into_the_reward(judge: Path, tmp_path: Path) -> None:
    reward = ["reward.rule=2.0", "reward.model=0.5", f"reward.model_path={judge / 'out'}"]
    words = [*TINY, "sft.steps=2", *reward, f"run.dir={tmp_path}", "run.name=run"]
    run = RunDirectory.open(train(load_config("demo", words)).run_path)
    line = run.metrics("rl")[-1]
    expected = 2 * line["reward/part/rule"] + 0.5 * line["reward/part/model"]
    assert line["reward/mean"] == pytest.approx(expected, rel=1e-12)
    assert line["reward/part/model"] != 0


def test_what_is_no_reward_model_of_the_policy_is_refused(judge: Path, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", vocab_size=128, alphabet="0123456789+=ab")
    words = [*TINY, "sft.steps=2", f"run.dir={tmp_path}", f"model.path={other}", "reward.model=0.5"]
    words += ["model.config=none", "model.tokenizer=none"]
    with pytest.raises(UserError, match=r"reward\.model_path = .* its tokenizer is not the policy"):
        train(load_config("demo", [*words, f"reward.model_path={judge / 'out'}"]))


def with_pairs(tmp_path: Path, body: str) -> list[str]:
    preference = f"def preference(self, prompt):\n        return {body}"
    task = task_of(tmp_path, f"return 0.0\n\n    {preference}")
    words = [word for word in TINY if not word.startswith("task.options")]
    words += ["sft.steps=2", "eval.prompts=2", f"task={task}", f"run.dir={tmp_path / 'runs'}"]
    return ["sft", "demo", *words, "--task", "reward"]


def test_a_dry_run_says_what_is_odd_of_pairs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = with_pairs(tmp_path, "('1', '1' if prompt.id == '3' else '123')")
    assert main([*words, "--dry-run"]) == 0
    assert "1 of 20 pairs are the same completion twice" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "body, message",
    [
        ("('1', '1' * (5000 if prompt.id == '7' else 1))", "prompt '7' and its completion"),
        ("'12'", "its preference is not a pair"),
    ],
)
def test_every_pair_is_looked_at_before_the_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture, body: str, message: str
) -> None:
    assert main(with_pairs(tmp_path, body)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_its_training_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    words = with_pairs(tmp_path, "('1', '2')")
    assert main([*words, "--dry-run"]) == 0
    assert "decode" not in capsys.readouterr().out.split("# memory plan")[1]
    monkeypatch.setattr(opening, "free_bytes", lambda device: 10_000)
    assert main(words) == 2
    assert "the model does not fit in CPU memory" in capsys.readouterr().err


def test_kv_pages_of_a_gpu_make_room_for_the_reward_model(
    judge: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = [f"reward.model_path={judge / 'out'}", "reward.model=0.5"]
    words = [*TINY, "sft.steps=0", *reward, f"run.dir={tmp_path}", "run.name=run"]
    scores, order = ScalarModel.scores, []

    def seen(model: ScalarModel, *arguments: Any) -> torch.Tensor:
        order.append("scores")
        return scores(model, *arguments)

    monkeypatch.setattr(ScalarModel, "scores", seen)
    with Session(load_config("demo", words)) as session:
        step = session.sample(session.draw_prompts(1))
        monkeypatch.setattr(session.context.policy, "device", torch.device("cuda"))
        monkeypatch.setattr(session.context.engine, "free_cache", lambda: order.append("free"))
        session.score(step)
    assert order == ["free", "scores"]
