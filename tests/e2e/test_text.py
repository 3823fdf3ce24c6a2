"""Raw text from the command line into a run: packed without leaks, killed and resumed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.e2e.small import before_call, cut, metrics

from jetrl.cli.main import main
from jetrl.models.policy import Policy
from jetrl.models.tiny import make_tiny
from jetrl.precision import PrecisionPlan
from jetrl.runs.directory import RunDirectory
from jetrl.training.micro_batches import batch_logprobs
from jetrl.training.packing import pack_examples
from jetrl.training.sft import SftTrainer
from jetrl.types import Example

PLANS = ("bf16", "fp32", "unified", "int8", "integer")
TEXT = "The quick brown fox jumps over the lazy dog, again and again.\n"
WORDS = """
    task=text sft.steps=5 sft.tokens_per_step=192 sft.lengths=[32,96] sft.length_steps=[3]
    sft.lr=1e-2 eval.every=2 checkpoint.every=2 report.enabled=false run.device=cpu
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text")
    shape = {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64}
    make_tiny(path / "tiny", vocab_size=128, max_position_embeddings=128, **shape)
    (path / "data").mkdir()
    for name, count in (("train", 12), ("test", 2)):
        documents = [f"{n}: {TEXT * (n % 3 + 1)}" for n in range(count)]
        (path / "data" / f"{name}.txt").write_text("<end>\n".join(documents))
    return path


def words_of(place: Path, name: str, *more: str) -> list[str]:
    paths = [f"model.path={place / 'tiny'}", f"task.path={place / 'data'}", f"run.dir={place}"]
    return [
        "sft",
        *paths,
        "task.options.separator=<end>",
        *WORDS.split(),
        f"run.name={name}",
        *more,
    ]


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan != "int8"])  # killed below
def test_cut_and_resumed_equals_uncut(
    place: Path, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    precision = f"precision.preset={plan}"
    assert main(words_of(place, f"{plan}-uncut", precision)) == 0
    with monkeypatch.context() as patch:
        before_call(SftTrainer, "step", 4, cut, patch.setattr)
        with pytest.raises(RuntimeError, match="cut"):
            main(words_of(place, f"{plan}-cut", precision))
    assert main([*words_of(place, f"{plan}-cut"), "--resume"]) == 0
    lines = metrics(place / f"{plan}-uncut")
    assert metrics(place / f"{plan}-cut") == lines
    assert weights(place / f"{plan}-cut") == weights(place / f"{plan}-uncut")
    assert [i + 1 for i, line in enumerate(lines) if "text/eval_loss" in line] == [2, 4, 5]
    assert lines[-1]["sft/loss"] < lines[0]["sft/loss"] - 0.2
    assert lines[-1]["text/eval_loss"] < lines[1]["text/eval_loss"]


@pytest.fixture(scope="module")
def uncut(place: Path) -> Path:
    assert main(words_of(place, "uncut")) == 0
    return place / "uncut"


def test_what_it_reports(uncut: Path) -> None:
    first, *_, last = RunDirectory.open(uncut).metrics("sft")
    assert 0.8 * math.log(128) < first["sft/loss"] < 1.2 * math.log(128)  # nats per token
    for line in (first, last):
        assert 96 < line["sft/tokens"] < 192
        speed = line["throughput/train_tokens_per_s"]
        assert 0.95 < line["sft/tokens"] / (speed * line["timing/step_s"]) < 1.0
        assert line["memory/peak_gib"] > 0


def test_killed_and_resumed_equals_unkilled(place: Path, uncut: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from tests.e2e.small import before_call\n"
        "from jetrl.cli.main import main\n"
        "from jetrl.training.sft import SftTrainer\n"
        "before_call(SftTrainer, 'step', 5, lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    words = words_of(place, "killed", "checkpoint.background=false")
    killed = subprocess.run(
        [sys.executable, "-c", program, *words], env=environment, check=False, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not (place / "killed" / "model").exists()
    assert main([*words, "--resume"]) == 0
    assert metrics(place / "killed") == metrics(uncut)
    assert weights(place / "killed") == weights(uncut)


def logprobs_of(policy: Policy, examples: list[Example]) -> list[torch.Tensor]:
    (batch,) = pack_examples(examples, 1000)
    logprobs, _ = batch_logprobs(policy, batch)
    return list(logprobs.split([len(example.completion) for example in examples]))


@pytest.mark.parametrize("plan", PLANS)
def test_a_document_does_not_see_its_neighbors(place: Path, plan: str) -> None:
    policy = Policy.from_pretrained(place / "tiny", plan=PrecisionPlan.preset(plan), device="cpu")
    random = np.random.default_rng(0)
    a, b, c, other = (random.integers(0, 128, n).tolist() for n in (33, 50, 20, 50))

    def of(tokens: list[int]) -> Example:
        return Example(tokens[:1], tokens[1:])

    before = logprobs_of(policy, [of(a), of(b), of(c)])
    changed = logprobs_of(policy, [of(a), of(other), of(c)])
    assert torch.equal(before[0], changed[0])
    assert torch.equal(before[2], changed[2])
    assert not torch.equal(before[1], changed[1])
    (alone,) = logprobs_of(policy, [of(c)])
    assert torch.equal(before[2], alone)
    # One sequence of the same tokens does see them, so the comparison could fail.
    joined = logprobs_of(policy, [of([*a, *b, *c])])[0]
    assert not torch.equal(joined[-len(c) + 1 :], alone)


@pytest.mark.parametrize("words", [["sft.lengths=[32,256]"], ["task.path=none"]])
def test_what_cannot_be_trained_on_is_refused_before_a_run(
    place: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words_of(place, "refused", *words, "sft.tokens_per_step=256")) == 2
    error = capsys.readouterr().err
    assert ("sft.lengths = 256: the model's context is 128" in error) != ("task.path" in error)
    assert not (place / "refused").exists()
