"""Scoring in processes: nothing that a task or a completion does may stop or disturb the others."""

import os
import re
import signal
import threading
from pathlib import Path

import pytest

from jetrl.errors import UserError
from jetrl.tasks import Scorer
from jetrl.types import Prompt

FILE = str(Path(__file__).with_name("awkward_task.py"))
AWKWARD = f"{FILE}:Awkward"
PROMPT = Prompt(id="p7", text="?")


def score(scorer, *completions):
    return scorer.score([(PROMPT, completion) for completion in completions])


@pytest.fixture(scope="module")
def scorer():
    with Scorer(AWKWARD, workers=2, timeout_s=60) as scorer:
        yield scorer


@pytest.mark.parametrize(
    "completion, why",
    [
        ("hang", r"took longer than 600 s by the clock \(.*awkward_task.py, line \d+, in score\)"),
        ("hang-in-c", r"took longer than 60 s of processor time \(.*, in (fullmatch|score)\)"),
        ("hang-in-sleep", "took longer than 600 s by the clock"),
        ("exit 3", "ended its worker with exit code 3"),
        ("segfault", r"SIGSEGV \(.*, in string_at\)"),
        ("raise oh", r"score raised KeyError: 'oh' \(.*awkward_task.py, line \d+, in score\)"),
        ("leave", "score raised SystemExit: 3"),
        ("none", "task awkward, prompt 'p7': score returned None"),
        ("nan", "score returned nan"),
        ("part", "part 'speed' of the score returned 'fast'"),
    ],
)
def test_a_failure_scores_0_and_says_why_and_the_others_are_scored(scorer, completion, why):
    first, failed, last = score(scorer, "1.5", completion, "2.5")
    assert (first.score.reward, first.failure) == (1.5, "")
    assert (last.score.reward, last.failure) == (2.5, "")
    assert failed.score.reward == 0.0
    assert failed.score.parts == {}
    assert re.search(why, failed.failure), failed.failure


@pytest.mark.parametrize(
    "how, limit", [("hang", "1 s by the clock"), ("hang-in-c", "0.1 s of processor time")]
)
def test_the_time_limits_are_kept(how, limit):
    """A score that waits ends by the clock, and one that computes by its processor time.

    No other score has so short a limit: a busy machine may need longer.
    """
    with Scorer(f"{FILE}:Untested", workers=1, timeout_s=0.1) as scorer:
        (failed,) = score(scorer, f"{how} to the limit")
    assert failed.score.reward == 0.0
    assert f"took longer than {limit}" in failed.failure


def test_a_verdict_does_not_depend_on_what_else_the_machine_does():
    """A score that gets to run a quarter of the time takes longer by the clock, and is judged."""
    with Scorer(f"{FILE}:Untested", workers=1, timeout_s=0.2) as scorer:
        (judged,) = score(scorer, "slow 0.8")
    assert (judged.score.reward, judged.failure) == (1.0, "")


def test_order_is_kept_and_results_do_not_depend_on_the_number_of_workers(scorer):
    completions = [str(i / 7) if i % 100 else "exit 1" for i in range(300)]
    expected = [i / 7 if i % 100 else 0.0 for i in range(300)]
    with Scorer(AWKWARD, workers=1, timeout_s=60) as single:
        for each in (scorer, single):
            assert [item.score.reward for item in score(each, *completions)] == expected


def test_workers_import_no_torch_and_print_nowhere(scorer, capfd):
    assert [item.score.reward for item in score(scorer, "modules", "flood")] == [0.0, 1.0]
    assert capfd.readouterr() == ("", "")


def test_a_worker_that_dies_while_idle_is_replaced(scorer, wait_until):
    pid = int(score(scorer, "pid")[0].score.reward)
    started = [worker for worker in scorer._workers if worker._process is not None]
    (worker,) = (worker for worker in started if worker._process.pid == pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(worker.channel.has_spoken)  # its last thread has closed the connection
    results = score(scorer, *["1"] * 64)
    assert [item.failure for item in results] == [""] * 64


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "name, message",
    [
        (
            "Refuses",
            "cannot score completion '' of prompt 'train-0': .*checker's package is broken",
        ),
        ("AlwaysZero", "reward of 0.0 instead of 1.0"),
        ("Empty", "split 'train' has no prompts"),
        ("Awkwart", "did you mean Awkward"),
    ],
)
def test_a_scorer_that_cannot_work_is_an_error_at_start(name, message, workers):
    with pytest.raises(UserError, match=message):
        Scorer(f"{FILE}:{name}", workers=workers)


def test_ctrl_c_stops_scoring_at_once_and_leaves_a_scorer_that_works(tmp_path, wait_until):
    main, begun = threading.get_ident(), tmp_path / "begun"

    def interrupt():
        wait_until(begun.exists)
        signal.pthread_kill(main, signal.SIGUSR1)

    with Scorer(AWKWARD, workers=2, timeout_s=600) as scorer:
        before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
        try:
            threading.Thread(target=interrupt, daemon=True).start()
            with pytest.raises(KeyboardInterrupt):
                score(scorer, *[f"touch-and-hang {begun}"] * 2, "1")
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert [item.score.reward for item in score(scorer, "1", "2")] == [1.0, 2.0]


@pytest.mark.parametrize("bad", ["hang", "exit 3"])
def test_a_batch_of_nothing_but_hangs_or_crashes_is_given_up(bad, caplog, wait_until):
    with Scorer(AWKWARD, workers=2, timeout_s=60, max_lost_s=1.0) as scorer:
        scorer.begin_step()
        tickets = [scorer.begin(PROMPT, "1")]
        wait_until(lambda: scorer.attend() or scorer._replies)
        tickets += [scorer.begin(PROMPT, completion) for completion in [*[bad] * 512, "1"]]
        results = scorer.finish(tickets)
        # Each start takes more than 20 ms, so two workers lose their second in fewer than 100.
        starts = sum(worker._starts for worker in scorer._workers)
        assert starts < 110, "each may be at one more start by then; 512 would take minutes"
        scorer._max_lost_s = 600.0  # from here on, starting again may take long on a busy machine
        assert results[0].score.reward == score(scorer, "1")[0].score.reward == 1.0
        assert all(result.failure for result in results[1:-1])
        assert re.search(
            r"not scored: others .* \(task.max_lost_s = 1 s a worker\)", results[-1].failure
        )
        assert "of 514 completions get no score" in caplog.text


def test_what_is_begun_and_dropped_is_forgotten(scorer):
    for completion in ("hang", "1", "slow 0.1"):
        scorer.begin(PROMPT, completion)
    scorer.attend()
    scorer.drop()
    assert [item.score.reward for item in score(scorer, "2", "3")] == [2.0, 3.0]
    assert not scorer._replies
