"""The order of prompts: shares by weight, draws by measured pass rate, all repeatable."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from jetrl.randomness import draw_range, shares, weighted_draw
from jetrl.session.prompt_order import PassRates, PromptDigest, PromptOrder, ShuffledPrompts
from jetrl.session.sampling import EncodedPrompt
from jetrl.settings.loading import load_config
from jetrl.types import Completion, Prompt, Sample, Score


@pytest.mark.parametrize("weights", [[1.0], [1, 1], [3, 1], [0.2, 0.3, 0.5], [5, 0, 1], [1e-3, 1]])
@pytest.mark.parametrize("count", [1, 4, 7, 64])
def test_shares_are_off_by_less_than_one_in_a_step_and_exact_in_the_long_run(weights, count):
    steps = 500
    counts = shares(weights, count, steps, seed=3)
    exact = count * np.array(weights) / sum(weights)
    assert (counts.sum(1) == count).all()
    assert (np.abs(counts - exact) < 1).all()
    # The marks' offsets are multiples of the golden ratio: their discrepancy over n steps is below
    # (3 + log n / log golden) / n, about 16 of 500, for each of the two edges of a share.
    assert (np.abs(counts.sum(0) - steps * exact) <= 2 * (3 + np.log(steps) / np.log(1.618))).all()
    assert (shares(weights, count, 20, seed=3) == counts[:20]).all()


def test_consecutive_ranges_make_whole_epochs():
    drawn = [i for step in range(7) for i in draw_range(5, 3 * step, 3, seed=1)]
    assert drawn == draw_range(5, 0, 21, seed=1)
    for start in (0, 5, 10, 15):
        assert sorted(drawn[start : start + 5]) == [0, 1, 2, 3, 4]


def test_weighted_draws_have_the_probabilities_of_their_weights():
    weights = np.array([1.0, 2.0, 4.0, 1.0])
    first = Counter(weighted_draw(weights, 1, seed)[0] for seed in range(4000))
    expected = 4000 * weights / weights.sum()
    deviation = np.sqrt(expected * (1 - weights / weights.sum()))  # binomial
    assert (np.abs([first[i] for i in range(4)] - expected) < 5 * deviation).all()
    assert sorted(weighted_draw(weights, 4, seed=9)) == [0, 1, 2, 3]
    assert Counter(weighted_draw(weights, 10, seed=9)).most_common()[-1][1] >= 2


def order(explore=None, tasks=("",) * 12, weights=None, seed=5):
    return ShuffledPrompts(
        list(tasks), [f"p{i}" for i in range(len(tasks))], weights or {}, seed, explore
    )


def test_one_task_shuffled_is_the_plain_shuffle():
    assert [order().draw(step, 5) for step in (1, 2, 9)] == [
        draw_range(12, 5 * (step - 1), 5, seed=5) for step in (1, 2, 9)
    ]


def test_mixed_tasks_share_a_step_and_each_runs_through_its_own_epochs():
    tasks = ["a"] * 4 + ["b"] * 8
    mixed = order(tasks=tasks, weights={"a": 1.0, "b": 3.0})
    steps = [mixed.draw(step, 8) for step in range(1, 13)]
    for drawn in steps:
        assert sorted(tasks[i] for i in drawn) == ["a"] * 2 + ["b"] * 6
    for task, size in (("a", 4), ("b", 8)):
        own = [i for drawn in steps for i in drawn if tasks[i] == task]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size
    assert order(tasks=tasks, weights={"a": 0.0, "b": 1.0}).draw(3, 8).count(0) == 0


@pytest.mark.parametrize("explore", [None, 0.1])
@pytest.mark.parametrize("updates", [2, 4, 8])
def test_every_update_of_a_step_is_a_mix_of_the_tasks(explore, updates):
    """Any run of a step's prompts has each task by its weight.

    Updates take consecutive groups (packing.split_minibatches), and dynamic sampling cuts off the
    last ones.
    """
    tasks = ["a"] * 20 + ["b"] * 20 + ["c"] * 20
    weights = {"a": 2.0, "b": 1.0, "c": 1.0}
    mixed = order(explore, tasks, weights)
    for step in range(1, 6):
        drawn = [tasks[i] for i in mixed.draw(step, 16)]
        each = 16 // updates
        for start in range(0, 16, each):
            part = Counter(drawn[start : start + each])
            for task, weight in weights.items():
                assert abs(part[task] - each * weight / 4) <= 1, (start, drawn)


def test_prompts_solved_half_of_the_time_come_more_often():
    curriculum = order(explore=0.1)
    for i in range(12):
        for _ in range(4):
            curriculum.pass_rates.observe(f"p{i}", solved=(0, 4, 8)[i % 3], tried=8)
    assert PassRates().rate("untried") == 0.5
    # 8 + 4 + 2 + 1 = 15 completions count: rates 1/17, 8.5/17 and 16/17, so weights .221, 1, .221
    assert [curriculum.pass_rates.rate(f"p{i}") for i in range(3)] == [1 / 17, 0.5, 16 / 17]
    seen = Counter(i % 3 for step in range(1, 401) for i in curriculum.draw(step, 2))
    assert seen[1] > 2 * seen[0]
    assert seen[1] > 2 * seen[2]
    assert min(seen.values()) > 0


def test_the_record_of_pass_rates_outlives_a_cut():
    one, other = order(explore=0.2), order(explore=0.2)
    for step in range(1, 6):
        for i in one.draw(step, 4):
            one.pass_rates.observe(f"p{i}", solved=(i + step) % 4, tried=3)
    other.pass_rates.load_state(json.loads(json.dumps(one.pass_rates.state())))
    assert [one.draw(step, 4) for step in (6, 7)] == [other.draw(step, 4) for step in (6, 7)]
    assert one.draw(6, 4) != order(explore=0.2).draw(6, 4)


@pytest.mark.parametrize(
    "words, reward, parts, solved",
    [
        ([], 1.0, {}, 1),
        ([], 0.5, {"rule": 1.0}, 0),  # a part of the task's own, that is called so
        (["reward.rule=0.5"], 0.5, {"rule": 1.0}, 1),
        (["reward.rule=2.0"], 1.0, {"rule": 0.5}, 0),
        (["reward.model_path=judge", "reward.model=1.0"], 4.0, {"rule": 0.0, "model": 4.0}, 0),
    ],
)
def test_solved_is_what_evaluation_calls_solved(words, reward, parts, solved) -> None:
    """A sample is solved by the task's own score, whatever [reward] adds."""
    prompt = Prompt(id="a", text="?")
    drawing = PromptOrder(
        load_config("demo", ["data.order=pass_rate", *words]), [EncodedPrompt(prompt, (1,))], {}
    )
    completion = Completion((2,), (0.0,), "stop")
    drawing.observe([Sample(prompt, 0, (1,), completion, Score(reward, parts))])
    assert drawing.state() == {"a": [solved, 1]}


@pytest.mark.parametrize(
    "prompt, token_ids, warned",
    [
        (Prompt(id="a", text="?", answer="1"), (1, 2), False),
        (Prompt(id="b", text="?", answer="1"), (1, 2), True),
        (Prompt(id="a", text="?", answer="2"), (1, 2), True),
        (Prompt(id="a", text="?", answer="1"), (1, 3), True),
    ],
)
def test_a_resumed_run_is_warned_of_other_prompts(caplog, prompt, token_ids, warned) -> None:
    stored = PromptDigest([EncodedPrompt(Prompt(id="a", text="?", answer="1"), (1, 2))]).state()
    PromptDigest([EncodedPrompt(prompt, token_ids)]).load_state(stored)
    assert ("are not those of the checkpoint" in caplog.text) == warned
