"""A step with drafts of known quality beside the same step without, tried out on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from benchmarks.flow import Choices, Flow, policy_of
from benchmarks.harness import Load, Row
from benchmarks.step import main
from benchmarks.step_parts import TimedUpdate, measure_with_drafts

from benchmarks import step_parts
from jetrl.errors import UserError
from jetrl.types import Sample

LOAD = Load(prompts=2, samples=2, prompt_length=20, response_length=12)
WORDS = "--shape tiny --device cpu --layers 1 --plan unified --prompts 1 --samples 2 "
LENGTHS = "--prompt-length 8 --response-length 8 "


def _rows(right: float, one_update: bool = False) -> list[Row]:
    choices = Choices("tiny", "cpu", 1, 1e-3, None, None, {}, drafts_right=right)
    policy = policy_of("unified", choices)
    return list(measure_with_drafts(policy, LOAD, choices, 1e12, one_update, mode="text"))


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[TimedUpdate]:
    """The updates that are timed, in their order."""
    timed: list[TimedUpdate] = []
    original = step_parts.train

    def train(flow: Flow, samples: Sequence[Sample]) -> TimedUpdate:
        timed.append(original(flow, samples))
        return timed[-1]

    monkeypatch.setattr(step_parts, "train", train)
    return timed


def test_a_step_with_drafts_draws_the_same_tokens_in_fewer_forwards(
    updates: list[TimedUpdate],
) -> None:
    off, on = _rows(right=1.0)
    assert len(updates) == 2
    for row, update in zip((off, on), updates, strict=True):
        for name, seconds in update.seconds.items():
            assert row["seconds"][name] == pytest.approx(seconds, abs=0.001), "its own update's"
    assert [row["speculation"] for row in (off, on)] == ["off", "text"]
    assert [row["right"] for row in (off, on)] == [None, 1.0]
    for row in (off, on):
        assert (row["different_tokens"], row["different_logprobs"]) == (0, 0)
        assert (row["different"], row["compared_tokens"], row["updates"]) == (0, 48, 2)
        assert row["step_s"] == pytest.approx(sum(row["seconds"].values()), abs=0.01)
        assert {"rollout", "update", "optimizer", "requantize"} == set(row["seconds"])
        assert row["weights_changed"] > 0, "the warm-up has another learning rate than zero"
    assert off["tokens_per_forward"] == 1.0
    assert on["tokens_per_forward"] > 3
    assert on["forwards"] < off["forwards"]
    assert on["accepted"] == on["drafted"] > 0
    assert sum(width["forwards"] for width in on["widths"].values()) == on["forwards"] - 1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--drafts-right 1.5", "--drafts-right 1.5: give a share from 0 to 1"),
        ("--drafts-right 0.6 --digest", "--drafts-right and --digest do not go together"),
        ("--drafts-right 0.6 --rollout-only", "--drafts-right and --rollout-only do not"),
        ("--one-update", "--one-update goes with --drafts-right"),
    ],
)
def test_words_that_do_not_go_together_are_named(words: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        main([*(WORDS + LENGTHS + words).split()])
