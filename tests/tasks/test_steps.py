"""Turns asked about in processes: answers come as they are ready, failures as words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jetrl.errors import UserError
from jetrl.session.sampling import TaskEnvironment
from jetrl.tasks import Scorer
from jetrl.types import Prompt, Turn

FILE = str(Path(__file__).with_name("turn_task.py"))
TEXT = Prompt(id="p7", text="?")
CHAT = Prompt(id="p8", messages=({"role": "user", "content": "?"},))


@pytest.fixture(scope="module")
def scorer():
    with Scorer(f"{FILE}:Turns", workers=2, timeout_s=60) as scorer:
        yield scorer


def ask(scorer, *completions, prompt=TEXT, turns=()):
    """The answers to completions, in their order."""
    tickets = [scorer.ask(prompt, turns, completion) for completion in completions]
    found = {}
    while len(found) < len(tickets):
        found |= {answer.ticket: answer for answer in scorer.answers(wait_for_one=True)}
    assert scorer.answers(wait_for_one=True) == []
    return [found[ticket] for ticket in tickets]


def test_replies_are_texts_messages_or_the_end(scorer):
    turns = (Turn("a", "b"),)
    assert [answer.reply for answer in ask(scorer, "x", "end", turns=turns)] == ["1:x", None]
    (message,) = ask(scorer, "message", prompt=CHAT)
    assert message.reply == {"role": "tool", "content": "42"}
    assert message.failure == ""


@pytest.mark.parametrize(
    "completion, prompt, why",
    [
        ("hang", TEXT, r"step took longer than 600 s by the clock \(.*turn_task.py, line \d+, in"),
        ("exit", TEXT, "step ended its worker with exit code 3"),
        ("raise oh", TEXT, r"step raised KeyError: 'oh' \(.*turn_task.py, line \d+, in step\)"),
        ("number", TEXT, r"task turns, prompt 'p7': step returned 5 \(int\); give a text"),
        ("message", TEXT, r"step returned \{'role': 'tool'.*give a text, since the prompt is one"),
        ("x", CHAT, r"prompt 'p8': step returned '0:x' \(str\); give a message"),
        ("long", TEXT, "step returned 6000 characters; at most 5000"),
    ],
)
def test_a_failure_says_why_and_the_others_are_answered(scorer, completion, prompt, why):
    first, failed, last = (
        ask(scorer, "1", prompt=TEXT)[0],
        ask(scorer, completion, prompt=prompt)[0],
        ask(scorer, "2", prompt=TEXT)[0],
    )
    assert (first.reply, last.reply) == ("0:1", "0:2")
    assert failed.reply is None
    assert re.search(why, failed.failure), failed.failure


def test_slow_steps_do_not_hold_up_what_is_ready(scorer, tmp_path):
    slow = scorer.ask(TEXT, (), f"wait-for {tmp_path / 'quick'}")
    quick = scorer.ask(TEXT, (), "quick")
    assert [answer.ticket for answer in scorer.answers(wait_for_one=True)] == [quick]
    (tmp_path / "quick").touch()
    assert [answer.ticket for answer in scorer.answers(wait_for_one=True)] == [slow]


def test_what_is_dropped_is_forgotten_and_the_scorer_works_on(scorer):
    environment = TaskEnvironment(scorer, [TEXT], n=4, max_turns=3)
    environment.ask(2, (), "hang")
    environment.ask(3, (), "hang")
    assert environment.answers(wait=False) == []
    environment.close()
    assert environment.answers(wait=True) == []
    environment.ask(1, (), "x")
    assert environment.answers(wait=True)[0][:2] == (1, "0:x")
    assert [scored.score.reward for scored in scorer.score([(TEXT, "four")])] == [4.0]


def test_turns_are_scored_by_the_last_one_unless_the_task_says_otherwise(scorer):
    turns = (Turn("a long first turn", "!"), Turn("two"))
    assert scorer.score([(TEXT, turns)])[0].score.reward == 3.0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_that_cannot_work_is_an_error_at_start(workers):
    with pytest.raises(UserError, match=r"cannot answer a turn of prompt 'text': .*package is mis"):
        Scorer(f"{FILE}:Broken", workers=workers)


def test_what_hanging_turns_may_cost_is_of_a_step_and_not_of_a_turn() -> None:
    """Each turn is answered before the next is asked, as in a rollout."""
    with Scorer(f"{FILE}:Turns", workers=1, timeout_s=60, max_lost_s=0.3) as scorer:
        scorer.begin_step()
        said = [ask(scorer, "hang")[0].failure for _ in range(6)]  # of 0.1 s or more each
        assert "took longer" in said[0]
        assert "not scored: others of the batch hung" in said[-1]
        assert "one of them: score took longer than 600 s" in said[-1]
        starts = [worker._starts for worker in scorer._workers]
        assert "not scored" in ask(scorer, "1")[0].failure
        assert "not scored" in scorer.finish([scorer.begin(TEXT, "1")])[0].failure
        assert starts == [worker._starts for worker in scorer._workers], "none for them"
        scorer._max_lost_s = 600.0  # from here on, starting again may take long on a busy machine
        scorer.begin_step()
        assert ask(scorer, "x")[0].reply == "0:x"
        assert scorer.finish([scorer.begin(TEXT, "123")])[0].score.reward == 3.0
