"""A start that sees drawn shapes reads its images, and jetrl opens it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.swapped_images import accuracies, swapped

from benchmarks import shapes_start
from jetrl.errors import UserError
from jetrl.models.policy import Policy
from jetrl.tasks.shapes import Shapes

OPTIONS = {"count": 2000, "size": 24, "ask": ["color"], "most": 2}


def train(path: Path, options: dict[str, Any], *words: str) -> None:
    words = ("--device", "cpu", "--options", json.dumps(options), *words)
    shapes_start.main(["tiny", str(path), *words])


def test_answers_fall_to_chance_with_the_images_of_other_prompts(tmp_path: Path) -> None:
    path = tmp_path / "start"
    train(path, OPTIONS, "--sees=0.63", "--until=0.62", "--updates=300")
    start = json.loads((path / "start.json").read_text())
    reached = start["accuracy"]
    assert 0.5 <= reached <= 0.62
    assert max(accuracy for _, _, accuracy in start["curve"]) >= 0.63
    found = accuracies(Policy.from_pretrained(path, "int8"), Shapes(**OPTIONS), samples=8)
    # 200 prompts; the images of other prompts say nothing about one of three colors.
    assert found["right"] == pytest.approx(reached, abs=0.06)
    assert found["swapped"] <= 0.43 < found["right"] - 0.1


def test_a_start_that_is_not_reached_is_no_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"after 20 updates the accuracy is .* raise --updates"):
        train(tmp_path / "start", {**OPTIONS, "count": 100}, "--updates=20")
    assert not (tmp_path / "start").exists()


def test_mistakes_are_wrong_answers_to_the_same_kind_of_question() -> None:
    prompts = Shapes(count=300).prompts("train")
    careless = shapes_start.with_mistakes(prompts, 0.4, seed=1)
    pairs = [(a, b) for a, b in zip(prompts, careless, strict=True) if a.answer != b.answer]
    assert 90 <= len(pairs) <= 150
    kinds = {"color": {"red", "green", "blue"}, "place": {"left", "right"}, "count": {*"01234"}}
    assert all(wrong.answer in kinds[right.metadata["ask"]] for right, wrong in pairs)
    assert shapes_start.with_mistakes(prompts, 0.0, seed=1) == prompts


def test_swapped_images_are_those_of_the_same_kind_of_question() -> None:
    prompts = Shapes(count=120).prompts("train")
    for prompt, other in zip(prompts, swapped(prompts), strict=True):
        assert (prompt.text, prompt.answer) == (other.text, other.answer)
        assert prompt.images != other.images
        (owner,) = (each for each in prompts if each.images == other.images)
        assert owner.metadata["ask"] == prompt.metadata["ask"]
