"""Scores that are begun while others are still drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jetrl.errors import UserError
from jetrl.rollout.options import Progress
from jetrl.runs.console import _step_line
from jetrl.runs.metrics import check_metrics
from jetrl.session.evaluate import _interval, _majorities, _results, _t_value
from jetrl.session.sampling import EncodedPrompt, Scoring, encode_prompts, sample_prompts
from jetrl.session.step import eval_metrics
from jetrl.tasks import Scorer, get_task
from jetrl.types import Completion, Prompt, PromptInputs, Sample, SamplingParams, Score

TASK = f"{Path(__file__).parents[1] / 'tasks' / 'awkward_task.py'}:Awkward"
PROMPTS = [
    EncodedPrompt(Prompt(id=str(i), text="?"), PromptInputs((i,)), ("stop",) * (i % 2))
    for i in range(4)
]
PARAMS = SamplingParams(n=2)


@pytest.fixture(scope="module")
def scorer():
    with Scorer(TASK, workers=2, timeout_s=60) as scorer:
        yield scorer


class Engine:
    """An engine that finishes completions one after the other, the last one first.

    The text of completion s of prompt p is its reward, 10 p + s.
    """

    def __init__(self, scorer=None, fails=False, changes=False):
        self.scorer, self.fails, self.changes = scorer, fails, changes

    def generate(self, prompts, params, progress, options):
        numbers = [prompt.token_ids[0] for prompt in prompts]
        drawn = [Completion((1,), (0.0,), "stop", f"{10 * p + k}") for p in numbers for k in (0, 1)]
        for i in reversed(range(len(drawn))):
            early = Completion((1,), (0.0,), "stop", "77") if self.changes else drawn[i]
            options.finished(i, early)
            progress(Progress(0, 0, 0, 0.0, 0, 0, 0.0, None))
            if self.fails:
                raise KeyboardInterrupt
        while self.scorer is not None and self.scorer._payloads:
            progress(Progress(0, 0, 0, 0.0, 0, 0, 0.0, None))
        return drawn


def rewards(scorer, engine):
    scoring = Scoring(scorer, PROMPTS, PARAMS.n)
    samples = scoring.samples(sample_prompts(engine, scoring, PARAMS))
    assert [sample.group for sample in samples] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(sample.inputs is PROMPTS[sample.group].inputs for sample in samples)
    return [sample.score.reward for sample in samples]


EXPECTED = [10.0 * p + k for p in range(4) for k in (0, 1)]


def test_rewards_are_there_when_sampling_ends_and_are_those_of_their_completions(scorer):
    begun = []
    begin, pump = scorer.begin, scorer._pump
    scorer.begin = lambda *item: begun.append(item) or begin(*item)

    def no_wait(wait_for_one):
        assert not wait_for_one, "nothing is left to wait for"
        pump(wait_for_one)

    scorer._pump = no_wait
    try:
        assert rewards(scorer, Engine(scorer)) == EXPECTED
    finally:
        del scorer.begin, scorer._pump
    assert len(begun) == len(EXPECTED)


def test_a_completion_that_was_drawn_anew_is_scored_anew(scorer):
    assert rewards(scorer, Engine(changes=True)) == EXPECTED
    assert not scorer._payloads
    assert not scorer._replies, "the next step's losses are not added to this one's"


def test_an_error_while_sampling_leaves_nothing_behind(scorer):
    scoring = Scoring(scorer, PROMPTS, PARAMS.n)
    with pytest.raises(KeyboardInterrupt):
        sample_prompts(Engine(fails=True), scoring, PARAMS)
    assert not scorer._payloads
    assert rewards(scorer, Engine()) == EXPECTED


def test_the_majority_is_the_most_frequent_answer_and_of_several_the_first():
    answers = [["1", "2", "2", None], ["2", "1", None, None], [None] * 4]
    samples = [
        SimpleNamespace(score=Score(float(answer == "2"))) for group in answers for answer in group
    ]
    votes = [answer for group in answers for answer in group]
    # of one: 3 of 12; of two: {1, 2} no, {2, -} yes, {2, 1} yes (the first), no, no, no
    assert _majorities(samples, votes, 4, 1.0) == {
        1: pytest.approx(3 / 12),
        2: pytest.approx(2 / 6),
        4: pytest.approx(2 / 3),
    }


@pytest.mark.parametrize("stop", ["\n", ("\n", "")])
def test_a_task_with_bad_stop_strings_is_refused_before_sampling(stop, monkeypatch):
    monkeypatch.setattr("jetrl.session.sampling.encode_prompt", lambda *_: PromptInputs((1,)))
    task = get_task("arithmetic")
    task.stop = stop
    model = SimpleNamespace(tokenizer=None, plain_text=None, tower=None)
    with pytest.raises(UserError, match=r"task arithmetic, split train: stop of prompt .* a list"):
        encode_prompts(model, task, "train")


@pytest.mark.parametrize(
    "rewards, interval",
    [
        ([[0.0]] * 30, (0.0, 0.113514)),  # Wilson: z2 / (30 + z2), z2 = 3.841459
        ([[1.0]] * 30, (0.886486, 1.0)),
        ([[1.0]] + [[0.0]] * 29, (0.005909, 0.166704)),
        # Completions of a prompt that all do the same count as one.
        ([[1.0] * 4] + [[0.0] * 4] * 29, (0.005909, 0.166704)),
        # No more alike than those of different prompts: all 12 count.
        ([[1.0, 0.0]] * 6, (0.253782, 0.746218)),
        ([[0.5], [1.0], [0.0], [0.25]], (-0.241883, 1.116883)),  # t of 3 degrees of freedom
        ([[0.25]] * 5, None),
        ([[1.0, 0.0]], None),
    ],
)
def test_the_interval_of_the_mean_is_wilsons_or_t(rewards, interval):
    found = _interval(np.array(rewards))
    assert found == (interval and pytest.approx(interval, abs=2e-6))


def test_the_accuracy_of_partial_credit_is_a_metric():
    samples = [
        Sample(
            PROMPTS[0].prompt, 0, PROMPTS[0].inputs, Completion((1,), (0.0,), "stop"), Score(reward)
        )
        for reward in (1.0, 0.5, 0.75, 0.25)
    ]
    result = _results(samples, 2, 1.0)
    assert (result.mean, result.accuracy, result.has_partial_credit) == (0.625, 0.25, True)
    found = eval_metrics("sums", replace(result, by_task={"own": result}), partial_credit=True)
    assert (found["eval/sums/mean"], found["eval/sums/accuracy"]) == (0.625, 0.25)
    assert (check_metrics(found), found["eval/own/accuracy"]) == (found, 0.25)
    assert "eval/sums/accuracy" not in eval_metrics("sums", result)
    line = "".join(text for text, _ in _step_line("step", 1, 9, found))
    assert "eval sums 62.5%  accuracy 25.0%" in line


@pytest.mark.parametrize("rewards, outside", [((0.5, 1.0), 0), ((1.5, -0.5), 2), ((0, -0.1), 1)])
def test_rewards_outside_0_to_1_are_counted(rewards, outside):
    samples = [
        Sample(PROMPTS[0].prompt, 0, PROMPTS[0].inputs, Completion((1,), (0.0,), "stop"), Score(r))
        for r in rewards
    ]
    found = check_metrics(eval_metrics("sums", _results(samples, 2, 1.0)))
    assert found.get("eval/sums/outside_0_1", 0) == outside


def test_the_interval_covers_the_mean_of_few_prompts_and_a_small_share():
    """The normal interval from the spread covers p = 0.02 of 30 prompts in 45% of the draws."""
    generator = np.random.default_rng(0)
    for each, share in ((1, 0.02), (1, 0.5), (4, 0.02), (4, 0.3)):
        shares = generator.beta(10 * share, 10 * (1 - share), (2000, 30, 1))
        draws = (generator.random((2000, 30, each)) < shares).astype(float)
        covered = [low <= share <= high for low, high in map(_interval, draws)]
        assert np.mean(covered) > 0.93  # 0.95 - 4 sqrt(0.95 * 0.05 / 2000)


@pytest.mark.parametrize(
    "freedom, value",
    [(1, 12.706205), (2, 4.302653), (3, 3.182446), (10, 2.228139), (1000, 1.962339)],
)
def test_quantiles_of_students_t_are_those_of_tables(freedom, value):
    assert _t_value(freedom) == pytest.approx(value, abs=2e-6)
