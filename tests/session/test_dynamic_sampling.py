"""Dynamic sampling on groups whose rewards are given."""

from __future__ import annotations

import pytest

from jetrl.errors import RunStopped
from jetrl.session.evaluate import _results
from jetrl.session.step import refill, sample_metrics
from jetrl.types import Completion, Prompt, PromptInputs, Sample, Score


def group(number, *rewards):
    return [
        Sample(
            Prompt(f"p{number}", "?"),
            number,
            PromptInputs((1,)),
            Completion((2,), (0.0,), "stop"),
            Score(r),
        )
        for r in rewards
    ]


def names(samples):
    return [(s.group, s.prompt.id, s.score.reward) for s in samples]


def no_draw(again, count):
    raise AssertionError("nothing was missing")


def test_idle_groups_are_replaced_in_order():
    asked = []

    def draw(again, count):
        asked.append((again, count))
        return [*group(0, 1, 1), *group(1, 0, 1)] if again == 2 else group(0, 1, 0)

    three = [*group(0, 0, 1), *group(1, 0, 0), *group(2, 1, 1)]
    samples, drawn, counts = refill(three, 3, 1, 4, draw)
    # One of three taught: 2 missing at a share of 1/3 would be 6, at most 3. Then 2 of 5 did.
    assert asked == [(2, 3), (3, 3)]
    assert names(samples) == [
        *((0, "p0", 0), (0, "p0", 1)),
        *((1, "p1", 0), (1, "p1", 1)),
        *((2, "p0", 1), (2, "p0", 0)),
    ]
    assert (counts, len(drawn)) == ({"rounds": 3, "dropped_groups": 3}, 12)
    assert refill(samples, 3, 1, 4, no_draw)[2] == {"rounds": 1, "dropped_groups": 0}


def test_the_rounds_have_an_end_and_what_taught_is_kept():
    two = [*group(0, 0, 1), *group(1, 0, 0)]
    samples, _, counts = refill(two, 2, 1, 3, lambda again, count: group(0, 1, 1))
    assert names(samples) == [(0, "p0", 0), (0, "p0", 1)]
    assert counts == {"rounds": 3, "dropped_groups": 3}
    idle = [*group(0, 0, 0), *group(1, 1, 1)]
    assert names(refill(idle, 2, 2, 1, no_draw)[0]) == names(idle), "as many as it needs"


def test_completions_that_no_function_judged_are_left_out():
    """A group teaches by its judged members; means and pass@k are those of judged ones."""
    samples = [*group(0, 1.0, None, 1.0), *group(1, None, 0.0, 1.0), *group(2, None, None, None)]
    kept, _, counts = refill(samples, 1, 1, 1, no_draw)
    assert [sample.score.reward for sample in kept] == [None, 0.0, 1.0]
    assert counts["dropped_groups"] == 2
    metrics = sample_metrics(samples, compares_group=True)
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/left_out"] == 5.0
    assert metrics["reward/zero_std_groups"] == pytest.approx(2 / 3)
    evaluation = _results(samples, 3, threshold=1.0)
    assert evaluation.mean == 0.75
    assert evaluation.pass_at_k == {1: 0.75, 2: 1.0, 3: 1.0}  # of the two prompts that were judged
    with pytest.raises(RunStopped, match="returned None for the evaluation's 3 completions"):
        _results(samples[6:], 3, threshold=1.0)
