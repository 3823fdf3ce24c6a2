"""Scores that are begun while others are still drawn."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from jetrl.errors import UserError
from jetrl.rollout.options import Progress
from jetrl.session.evaluate import _majorities
from jetrl.session.sampling import EncodedPrompt, Scoring, encode_prompts, sample_prompts
from jetrl.tasks import Scorer, get_task
from jetrl.types import Completion, Prompt, SamplingParams, Score

TASK = f"{Path(__file__).parents[1] / 'tasks' / 'awkward_task.py'}:Awkward"
PROMPTS = [EncodedPrompt(Prompt(id=str(i), text="?"), (i,), ("stop",) * (i % 2)) for i in range(4)]
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
        drawn = [
            Completion((1,), (0.0,), "stop", f"{10 * p + k}") for (p,) in prompts for k in (0, 1)
        ]
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
    monkeypatch.setattr("jetrl.session.sampling.encode_prompt", lambda *_: [1])
    task = get_task("arithmetic")
    task.stop = stop
    model = SimpleNamespace(tokenizer=None, plain_text=None)
    with pytest.raises(UserError, match=r"task arithmetic, split train: stop of prompt .* a list"):
        encode_prompts(model, task, "train")
