"""The order of prompts: shares by weight, draws by measured pass rate, all repeatable."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from jetrl.errors import UserError
from jetrl.randomness import shares
from jetrl.session.prompt_order import PromptDigest, PromptOrder, with_steps
from jetrl.session.sampling import EncodedPrompt
from jetrl.settings.loading import load_config
from jetrl.types import Completion, Prompt, PromptInputs, Sample, Score


@pytest.mark.parametrize("weights", [[1.0], [3, 1], [0.2, 0.3, 0.5], [5, 0, 1]])
@pytest.mark.parametrize("count", [1, 7, 64])
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


def order(explore=None, tasks=("",) * 12, weights=None, seed=5):
    """Return the order of prompts p0, p1, ... with the given tasks."""
    words = [f"run.seed={seed}"]
    words += ["data.order=pass_rate", f"data.explore={explore}"] if explore else []
    prompts = [
        EncodedPrompt(Prompt(id=f"p{i}", text="?", task=task), PromptInputs((1,)))
        for i, task in enumerate(tasks)
    ]
    return PromptOrder(load_config("demo", words), prompts, weights or {})


def drawn(order, step, count):
    return [int(encoded.prompt.id[1:]) for encoded in order.draw(step, count)]


def tried(order, i, solved, count):
    """Let an order see completions of a prompt."""
    prompt, completion = Prompt(id=f"p{i}", text="?"), Completion((2,), (0.0,), "stop")
    scores = [Score(float(k < solved)) for k in range(count)]
    order.observe([Sample(prompt, 0, PromptInputs((1,)), completion, score) for score in scores])


def ordered(kind, difficulties, use="prompts"):
    prompts = [
        EncodedPrompt(Prompt(id=f"p{i}", text="?", metadata={"level": d}), PromptInputs((1,)))
        for i, d in enumerate(difficulties)
    ]
    words = [f"data.order={kind}", *["data.difficulty=level"] * (kind == "curriculum")]
    return PromptOrder(load_config("demo", words), prompts, {}, use)


def test_sequential_and_curriculum_repeat_their_order_in_every_epoch():
    levels = [3, 1, 2.5, 1, 0]
    sequential = ordered("sequential", levels)
    assert [drawn(sequential, step, 3) for step in (1, 2, 3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    by_level = ordered("curriculum", levels)
    assert [drawn(by_level, step, 3) for step in (1, 2)] == [[4, 1, 3], [2, 0, 4]]
    assert drawn(ordered("curriculum", levels, "sft"), 1, 5) == [4, 1, 3, 2, 0]
    assert drawn(ordered("sequential", levels, "oversample"), 1, 5) != [0, 1, 2, 3, 4]


@pytest.mark.parametrize("level", [None, "hard", True, float("nan")])
def test_a_prompt_without_a_difficulty_is_named(level):
    with pytest.raises(UserError, match=r"prompt 'p1' has level = .*set data\.difficulty"):
        ordered("curriculum", [1, level])
    with pytest.raises(UserError, match=r"data\.difficulty = level has no effect with data\.order"):
        load_config("demo", ["data.difficulty=level"])


def test_mixed_tasks_share_a_step_and_each_runs_through_its_own_epochs():
    tasks = ["a"] * 4 + ["b"] * 8
    mixed = order(tasks=tasks, weights={"a": 1.0, "b": 3.0})
    steps = [drawn(mixed, step, 8) for step in range(1, 13)]
    for indices in steps:
        assert sorted(tasks[i] for i in indices) == ["a"] * 2 + ["b"] * 6
    for task, size in (("a", 4), ("b", 8)):
        own = [i for indices in steps for i in indices if tasks[i] == task]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size
    assert drawn(order(tasks=tasks, weights={"a": 0.0, "b": 1.0}), 3, 8).count(0) == 0


@pytest.mark.parametrize(
    "word, steps",
    [("epochs=2", 7), ("epochs=0.1", 1), ("epochs=1e-30", 1), ("steps=3", 3), ("epochs=none", 100)],
)
def test_epochs_are_steps_over_the_prompts_that_are_trained_on(word, steps):
    """Ten prompts count, and 3 are drawn per step."""
    tasks = ["a"] * 10 + ["b"] * 5
    prompts = order(tasks=tasks)._prompts
    given = load_config(None, [f"loop.{word}", "rollout.prompts_per_step=3", "sft.steps=1"])
    settings, note = with_steps(given, prompts, {"a": 1.0, "b": 0.0})
    assert settings.loop.steps == steps
    assert note.startswith("10 training prompts: an epoch is 3.333 steps (supervised: 0.1562 upd")


@pytest.mark.parametrize("epochs", ["1e13", "1e308"])
def test_epochs_of_more_steps_than_a_run_may_have_are_refused(epochs):
    given = load_config(None, [f"loop.epochs={epochs}", "rollout.prompts_per_step=3"])
    with pytest.raises(UserError, match=r"loop\.epochs = 1e\+.* steps, more than the maximum"):
        with_steps(given, order(tasks=["a"] * 100)._prompts, {})


@pytest.mark.parametrize("explore", [None, 0.1])
@pytest.mark.parametrize("updates", [2, 8])
def test_every_update_of_a_step_is_a_mix_of_the_tasks(explore, updates):
    """Updates take consecutive groups, and dynamic sampling cuts off the last ones."""
    tasks = ["a"] * 20 + ["b"] * 20 + ["c"] * 20
    weights = {"a": 2.0, "b": 1.0, "c": 1.0}
    mixed = order(explore, tasks, weights)
    for step in range(1, 6):
        indices = [tasks[i] for i in drawn(mixed, step, 16)]
        each = 16 // updates
        for start in range(0, 16, each):
            part = Counter(indices[start : start + each])
            for task, weight in weights.items():
                assert abs(part[task] - each * weight / 4) <= 1, (start, indices)


def test_prompts_solved_half_of_the_time_come_more_often():
    curriculum = order(explore=0.1)
    for i in range(12):
        for _ in range(4):
            tried(curriculum, i, (0, 4, 8)[i % 3], 8)
    assert order(explore=0.1).rate("p0") == 0.5
    # 8 + 4 + 2 + 1 = 15 completions count: rates 1/17, 8.5/17 and 16/17, so weights .221, 1, .221
    assert [curriculum.rate(f"p{i}") for i in range(3)] == [1 / 17, 0.5, 16 / 17]
    seen = Counter(i % 3 for step in range(1, 401) for i in drawn(curriculum, step, 2))
    assert seen[1] > 2 * seen[0]
    assert seen[1] > 2 * seen[2]
    assert min(seen.values()) > 0


def test_the_record_of_pass_rates_outlives_a_cut():
    one, other = order(explore=0.2), order(explore=0.2)
    for step in range(1, 6):
        for i in drawn(one, step, 4):
            tried(one, i, (i + step) % 4, 3)
    other.load_state(json.loads(json.dumps(one.state())))
    assert [drawn(one, step, 4) for step in (6, 7)] == [drawn(other, step, 4) for step in (6, 7)]
    assert drawn(one, 6, 4) != drawn(order(explore=0.2), 6, 4)


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
    settings = load_config("demo", ["data.order=pass_rate", *words])
    drawing = PromptOrder(settings, [EncodedPrompt(prompt, PromptInputs((1,)))], {})
    completion = Completion((2,), (0.0,), "stop")
    drawing.observe([Sample(prompt, 0, PromptInputs((1,)), completion, Score(reward, parts))])
    assert drawing.state() == {"a": [solved, 1]}


@pytest.mark.parametrize(
    "prompt, token_ids, warned",
    [
        (Prompt(id="a", text="?", answer="1"), (1, 2), False),
        (Prompt(id="a", text="?", answer="2"), (1, 2), True),
        (Prompt(id="a", text="?", answer="1"), (1, 3), True),
    ],
)
def test_a_resumed_run_is_warned_of_other_prompts(caplog, prompt, token_ids, warned) -> None:
    stored = PromptDigest(
        [EncodedPrompt(Prompt(id="a", text="?", answer="1"), PromptInputs((1, 2)))]
    ).state()
    PromptDigest([EncodedPrompt(prompt, PromptInputs(token_ids))]).load_state(stored)
    assert ("are not those of the checkpoint" in caplog.text) == warned
