"""Samples as JSON and back: nothing that a replay needs is lost."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jetrl.runs.schemas import record_of, sample_of
from jetrl.types import Completion, Prompt, Sample, Score, Turn

PLAIN = Completion((5, 6), (-0.1, -2.5e-7), "stop", "ab")
TURNS = Completion(
    token_ids=(5, 9, 7, 7, 6),
    logprobs=(-0.1, -0.2, 0.0, 0.0, -0.3),
    finish_reason="length",
    text="2+3=5.",
    environment=((2, 4),),
    turns=(Turn("2+3", "=5"), Turn(".")),
)
TOOL = Completion((5, 7, 6), (-0.1, 0.0, -0.3), "stop", "x42y", ((1, 2),), (
    Turn("x", {"role": "tool", "content": "42"}), Turn("y"),
))  # fmt: skip


@pytest.mark.parametrize("completion", [PLAIN, TURNS, TOOL], ids=["plain", "turns", "messages"])
@pytest.mark.parametrize("task", ["", "sums"])
def test_there_and_back(completion: Completion, task: str) -> None:
    messages = ({"role": "user", "content": "2+3?"},)
    prompt = Prompt("sums/7", messages=messages, answer="5", task=task)
    sample = Sample(prompt, 3, (1, 2), completion, Score(0.5, {"called": 1.0}), "")
    record = json.loads(json.dumps(record_of(9, sample)))
    assert sample_of(record) == sample
    assert "readable" not in record
    read = dataclasses.replace(sample, readable="2 + 3 = 5")
    assert sample_of(json.loads(json.dumps(record_of(9, read)))) == read
    assert ("turns" in record) == bool(completion.turns)
