"""Answers out of any text: no exception, and the same answer each time."""

import contextlib

import pytest

from jetrl.tasks.answers import final_answer, gold_answer
from jetrl.tasks.sandbox.wire import WireError, WorkerReply, parse_reply, reply_line

TEXTS = [
    "So 48+24 = 72 clips.\n#### 72",
    "The answer is \\boxed{\\frac{36}{2}} dollars",
    "it costs $1,200.00, that is **-3/4** of -1,600",
    "#### Step 2\nthen .5 * 4 = 2.0\n#### $ 2.0 %",
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_damaged_answers(mutate, text):
    for seed in range(200):
        damaged = mutate(text.encode(), seed).decode("utf-8", "surrogateescape")
        for strict in (False, True):
            answer = final_answer(damaged, strict=strict)
            assert answer == final_answer(damaged, strict=strict)
            assert answer is None or isinstance(answer.text, str)
        gold_answer(damaged)


def test_damaged_replies_of_a_worker(mutate):
    line = reply_line(WorkerReply(reward=0.5, parts={"format": 1.0}, chunk="ab"))
    for seed in range(1000):
        with contextlib.suppress(WireError):
            assert isinstance(parse_reply(mutate(line, seed)), WorkerReply)
