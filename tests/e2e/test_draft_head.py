"""Whole runs with a draft head: the same bits as without, and resumed with the same head."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.e2e.small import SMALL, demo, metrics, without_last_checkpoint

from jetrl import train
from jetrl.runs.directory import RunDirectory

TINY = [
    *SMALL,
    "sft.steps=8",
    "sft.until=none",
    "sft.examples_per_step=16",
    "rollout.max_tokens=12",
    "eval.every=2",
    "eval.prompts=4",
    "checkpoint.keep_last=9",
    "loop.steps=4",
    "draft_head.share=1.0",
    "precision.key_smoothing=false",  # with it these few updates teach the head nothing yet
    "draft_head.lr=5e-3",
    "draft_head.tokens_per_update=16",
]
settings = partial(demo, TINY)


def numbers(path: Path) -> list[dict[str, float]]:
    """The metrics of all steps, without those of the head."""
    lines = metrics(path)
    return [{n: v for n, v in r.items() if not n.startswith("draft_head/")} for r in lines]


def rollouts(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (path / "rollouts").iterdir()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        mode: train(settings(folder, f"rollout.speculation={mode}", name=mode)).run_path
        for mode in ("off", "head")
    }


def test_a_run_has_the_same_bits_with_a_head_and_without(runs: Any) -> None:
    plain, other = runs["off"], runs["head"]
    assert numbers(plain) == numbers(other)
    assert rollouts(plain) == rollouts(other)
    for name in ("model.safetensors", "config.json"):
        assert (plain / "model" / name).read_bytes() == (other / "model" / name).read_bytes()
    masters = "checkpoints/step_000004/masters.safetensors"
    assert (plain / masters).read_bytes() == (other / masters).read_bytes()


def test_a_run_says_what_its_head_was_worth(runs: Any) -> None:
    steps = RunDirectory.open(runs["head"]).metrics("rl")[-4:]
    assert steps[-1]["draft_head/loss"] < steps[0]["draft_head/loss"]
    assert 0 < steps[-1]["draft_head/accuracy"] <= 1
    assert all(line["timing/draft_head_s"] > 0 for line in steps)
    assert "speculation/acceptance_head" not in steps[0], "it had learned nothing by then"
    assert steps[-1]["speculation/acceptance_head"] > 0
    assert steps[-1]["speculation/tokens_per_forward"] > 1
    exported = load_file(runs["head"] / "model" / "model.safetensors")
    assert not any("fc.weight" in name for name in exported)


def test_a_resumed_run_has_the_same_policy_and_the_same_head(runs: Any, tmp_path: Path) -> None:
    cut = without_last_checkpoint(runs["head"], tmp_path / "head")
    train(settings(tmp_path, "rollout.speculation=head", name="head"), resume=True)
    for name in ("masters", "optimizer", "draft_head"):
        file = f"checkpoints/step_000004/{name}.safetensors"
        assert (cut / file).read_bytes() == (runs["head"] / file).read_bytes(), name
    assert numbers(cut) == numbers(runs["head"])
    losses = [
        [line.get("draft_head/loss") for line in RunDirectory.open(path).metrics("rl")]
        for path in (cut, runs["head"])
    ]
    assert losses[0] == losses[1]


def test_a_run_may_get_a_head_later_change_it_and_lose_it_again(runs: Any, tmp_path: Path) -> None:
    cut = without_last_checkpoint(runs["off"], tmp_path / "later")
    train(settings(tmp_path, "rollout.speculation=head", name="later"), resume=True)
    masters = "checkpoints/step_000004/masters.safetensors"
    assert (cut / masters).read_bytes() == (runs["off"] / masters).read_bytes()
    head = load_file(cut / "checkpoints/step_000004/draft_head.safetensors")
    assert int(head["updates"]) > 0
    # Its weights are the same for any number of guesses.
    two = ("rollout.speculation=head", "draft_head.tokens=2", "loop.steps=5")
    assert train(settings(tmp_path, *two, name="later"), resume=True).steps == 5
    train(settings(tmp_path, "rollout.speculation=off", "loop.steps=6", name="later"), resume=True)
    files = {file.name for file in (cut / "checkpoints" / "step_000006").iterdir()}
    assert "draft_head.safetensors" not in files
