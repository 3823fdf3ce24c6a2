"""A worker that a model's text has taken over does not take over the run.

Whatever the worker sends, prints or holds, the scorer continues, runs nothing of that, and says
which completion it was.
"""

import os
import re
from pathlib import Path

import pytest
from tests.tasks.awkward_task import SENT

from jetrl.tasks import Scorer
from jetrl.types import Prompt

AWKWARD = f"{Path(__file__).with_name('awkward_task.py')}:Awkward"
PROMPT = Prompt(id="p7", text="?")


@pytest.fixture(scope="module")
def touched(tmp_path_factory):
    """A file that exists once somebody has unpickled what the worker sends."""
    file = tmp_path_factory.mktemp("touch") / "touched"
    os.environ["JETRL_TEST_TOUCH"] = str(file)
    yield file
    del os.environ["JETRL_TEST_TOUCH"]


@pytest.fixture(scope="module")
def scorer(touched):
    with Scorer(AWKWARD, workers=1, timeout_s=60, memory_mib=256) as scorer:
        yield scorer


def score(scorer, *completions):
    return scorer.score([(PROMPT, completion) for completion in completions])


@pytest.mark.parametrize("what", sorted(SENT.keys() - {"many replies"}))
def test_what_is_no_reply_ends_the_worker_and_runs_nothing(scorer, touched, what):
    first, failed, last = score(scorer, "1.5", f"send {what}", "2.5")
    assert (first.score.reward, first.failure) == (1.5, "")
    assert (last.score.reward, last.failure) == (2.5, "")
    assert failed.score.reward == 0.0
    assert "made its worker send what is no answer" in failed.failure
    assert not touched.exists()


def test_nobody_answers_for_items_that_were_not_handed_out_yet(scorer, tmp_path, wait_until):
    """A score that has control of its worker can give its own chunk any reward, and no other chunk.

    The first is true of any checker. What it sends later, or for others, is thrown away with the
    worker.
    """
    pid = score(scorer, "pid")[0].score.reward
    assert [r.score.reward for r in score(scorer, "send many replies", "2.5")] == [0.0, 2.5]
    answered = tmp_path / "answered"
    assert score(scorer, f"send-once-there-is {answered}")[0].score.reward == 1.0
    answered.touch()
    wait_until(scorer._workers[0].channel.has_spoken)
    assert [r.score.reward for r in score(scorer, "4.5", "5.5")] == [4.5, 5.5]
    assert score(scorer, "pid")[0].score.reward != pid


def test_memory_is_limited_and_the_others_are_scored(scorer):
    first, failed, last = score(scorer, "memory 16", "memory 2048", "2.5")
    assert (first.score.reward, last.score.reward) == (1.0, 2.5)
    assert failed.score.reward == 0
    assert re.search(
        r"ran out of memory: MemoryError.*in score\); task.memory_mib = 256", failed.failure
    )


def test_what_earlier_items_left_behind_is_not_held_against_a_later_one(scorer):
    results = score(scorer, *["leak 100"] * 6)
    assert [(item.score.reward, item.failure) for item in results] == [(1.0, "")] * 6


def test_endless_output_costs_no_memory_and_no_disk(limits_of_starts):
    limits_of_starts(60.0, 0.5, 60.0)
    with Scorer(AWKWARD, workers=1, memory_mib=256) as scorer:
        scorer.close()
        first, last = score(scorer, "print-forever", "2.5")
        assert "took longer than " in first.failure
        assert last.score.reward == 2.5
        assert all(len(worker.output.tail) <= 100_000 for worker in scorer._workers)


def test_too_many_parts_are_a_failure(scorer):
    few, many = score(scorer, "parts 64", "parts 65")
    assert len(few.score.parts) == 64
    assert many.score.reward == 0
    assert "should have at most 64 items" in many.failure


def test_a_worker_needs_no_network(tmp_path):
    file = tmp_path / "offline.py"
    file.write_text(
        "import socket\n"
        "from jetrl.tasks.questions import Gsm8k\n"
        "def refuse(*_): raise OSError('no network')\n"
        "class Offline(Gsm8k):\n"
        "    def score(self, prompt, completion):\n"
        "        socket.socket.connect = socket.getaddrinfo = refuse\n"
        "        return super().score(prompt, completion)\n"
    )
    with Scorer(f"{file}:Offline", path="openai/gsm8k", workers=1) as scorer:  # and its self-test
        assert scorer.score([(PROMPT, "#### 1")])[0].failure == ""
