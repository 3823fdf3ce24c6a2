"""Warnings about runs that learn nothing: said once, in words, and never to a run that learns."""

from __future__ import annotations

import pytest

from jetrl.runs.anomalies import STEPS, Learning, problems

FINE = {
    "reward/mean": 0.4,
    "reward/std": 0.4,
    "reward/zero_std_groups": 0.3,
    "response_length/clip_ratio": 0.1,
    "reward/part/answered": 0.9,
}
ZERO = FINE | {"reward/mean": 0.0, "reward/std": 0.0, "reward/zero_std_groups": 1.0}


def warnings(*steps: dict[str, float]) -> list[list[str]]:
    learning = Learning()
    return [learning.see(metrics) for metrics in steps]


def test_a_run_that_learns_is_not_warned():
    rising = [FINE | {"reward/mean": 0.1 + 0.02 * step} for step in range(40)]
    assert warnings(*rising) == [[]] * 40


@pytest.mark.parametrize(
    "change, words",
    [
        (ZERO, ["every completion got the reward 0", "warm up on worked answers (sft.steps)"]),
        (
            ZERO | {"reward/mean": 1.0},
            ["every completion got the reward 1", "If the task is solved, the run is done"],
        ),
        (
            {"reward/zero_std_groups": 0.95},
            ["95.0% of the groups", "data.order=pass_rate", "rollout.samples_per_prompt"],
        ),
        ({"response_length/clip_ratio": 0.6}, ["60.0% of the completions", "rollout.max_tokens"]),
        (
            {"reward/part/answered": 0.0},
            ["0.0% of the completions have an answer in the expected form", "task.system_prompt"],
        ),
    ],
)
def test_each_problem_has_words_and_what_to_do(change, words):
    said = warnings(*[FINE | change] * (STEPS + 3))
    assert said[: STEPS - 1] == [[]] * (STEPS - 1), "a few steps are no pattern"
    assert said[STEPS:] == [[]] * 3, "it is said once"
    (text,) = said[STEPS - 1]
    assert text.startswith(f"over {STEPS} steps: ")
    for word in words:
        assert word in text


def test_one_reward_is_told_without_groups_too():
    """An algorithm that compares no groups has no groups counted."""
    steps = [{k: v for k, v in ZERO.items() if k != "reward/zero_std_groups"}] * STEPS
    (text,) = warnings(*steps)[-1]
    assert "every completion got the reward 0" in text


def test_it_is_said_again_when_it_comes_back():
    bad = FINE | {"response_length/clip_ratio": 1.0}
    said = warnings(*[bad] * STEPS, *[FINE] * STEPS, *[bad] * STEPS)
    assert sum(map(len, said)) == 2


def test_evaluations_are_no_steps_and_a_resumed_run_says_the_same():
    steps = [ZERO] * (STEPS - 1)
    uncut, resumed = Learning(), Learning(steps)
    for metrics in (*steps, {"eval/x/mean": 0.0}):
        assert uncut.see(metrics) == []
    assert uncut.see(ZERO) == resumed.see(ZERO) != []


def test_several_problems_at_once():
    found = problems([ZERO | {"reward/part/answered": 0.0}], "4 completions", "look at them")
    assert set(found) == {"format", "one reward"}
    assert all(text.startswith("4 completions: ") for text in found.values())
    assert "look at them" in found["format"]


def test_rewards_that_differ_between_groups_only_are_the_same_rewards():
    split = ZERO | {"reward/mean": 0.5, "reward/std": 0.5}
    assert set(problems([split], "", "")) == {"same rewards"}
