"""Scoring in processes: nothing that a task or a completion does may stop or disturb the others."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jetrl.errors import UserError
from jetrl.tasks import Scorer, get_task
from jetrl.types import Prompt

FILE = str(Path(__file__).with_name("awkward_task.py"))
AWKWARD = f"{FILE}:Awkward"
PROMPT = Prompt(id="p7", text="?")


def score(scorer, *completions):
    return scorer.score([(PROMPT, completion) for completion in completions])


@pytest.fixture(scope="module")
def scorer():
    with Scorer(AWKWARD, workers=2, timeout_s=0.5) as scorer:
        yield scorer


@pytest.mark.parametrize(
    "completion, why",
    [
        ("hang", r"took longer than 0.5 s \(.*awkward_task.py, line \d+, in score\)"),
        ("hang-in-c", r"took longer than 0.5 s \(.*, in (fullmatch|score)\)"),
        ("slow 30", "took longer than 0.5 s"),
        ("exit 3", "ended its worker with exit code 3"),
        ("exit 0", "ended its worker with exit code 0"),
        ("segfault", r"SIGSEGV \(.*, in string_at\)"),
        ("raise oh", r"score raised KeyError: 'oh' \(.*awkward_task.py, line \d+, in score\)"),
        ("leave", "score raised SystemExit: 3"),
        ("none", "task awkward, prompt 'p7': score returned None"),
        ("text", r"score returned '1.0' \(str\), which is not a number"),
        ("several", r"score returned \[1.0, 0.0\] \(list\), which is not a number"),
        ("nan", "score returned nan"),
        ("inf", "score returned inf"),
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


def test_order_is_kept_and_results_do_not_depend_on_the_number_of_workers(scorer):
    completions = [str(i / 7) if i % 40 else "exit 1" for i in range(300)]
    expected = [i / 7 if i % 40 else 0.0 for i in range(300)]
    with Scorer(AWKWARD, workers=1, timeout_s=5) as single:
        for each in (scorer, single):
            assert [item.score.reward for item in score(each, *completions)] == expected


def test_hangs_on_every_worker_at_once_end_within_their_time(scorer):
    start = time.monotonic()
    results = score(scorer, *["hang"] * 4, *["1"] * 50)
    assert [bool(item.failure) for item in results] == [True] * 4 + [False] * 50
    assert time.monotonic() - start < 10  # 4 hangs of 0.5 s on 2 workers, and 4 restarts


def test_the_time_limit_is_of_one_item_and_not_of_a_chunk(scorer):
    results = score(scorer, *["slow 0.2"] * 8)  # 1.6 s in all
    assert [item.failure for item in results] == [""] * 8


def test_workers_import_no_torch_and_print_nowhere(scorer, capfd):
    assert [item.score.reward for item in score(scorer, "modules", "flood")] == [0.0, 1.0]
    assert capfd.readouterr() == ("", "")


def test_a_worker_that_dies_while_idle_is_replaced(scorer):
    pid = int(score(scorer, "pid")[0].score.reward)
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    results = score(scorer, *["1"] * 64)
    assert [item.failure for item in results] == [""] * 64


def test_no_items_and_scoring_after_close():
    with Scorer(AWKWARD, workers=1) as scorer:
        assert scorer.score([]) == []
    assert score(scorer, "1")[0].score.reward == 1.0
    scorer.close()
    scorer.close()


def test_short_answers_are_scored_in_no_time():
    prompts = list(get_task("arithmetic").prompts("train"))[:256]
    with Scorer("arithmetic", workers=2) as scorer:
        items = [(prompt, prompt.answer or "") for prompt in prompts]
        times = []
        for _ in range(5):
            start = time.perf_counter()
            results = scorer.score(items)
            times.append(time.perf_counter() - start)
    assert all(item.score.reward == 1 for item in results)
    # 0.015 s on an idle machine of two cores; 256 round trips of 1 ms would already be too slow
    assert min(times) < 0.1


def test_without_workers_exceptions_are_still_failures():
    with Scorer(AWKWARD, workers=0) as scorer:
        results = score(scorer, "1", "raise oh", "nan")
    assert [item.score.reward for item in results] == [1.0, 0.0, 0.0]
    assert "KeyError" in results[1].failure
    assert "nan" in results[2].failure


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "name, message",
    [
        (
            "Refuses",
            "cannot score completion '' of prompt 'train-0': .*checker's package is broken",
        ),
        ("AlwaysZero", "reward of 0.0, not the 1.0 it is known to be worth"),
        ("Empty", "split 'train' has no prompts"),
        ("Awkwart", "did you mean Awkward"),
    ],
)
def test_a_scorer_that_cannot_work_is_an_error_at_start(name, message, workers):
    with pytest.raises(UserError, match=message):
        Scorer(f"{FILE}:{name}", workers=workers)


def test_a_worker_that_cannot_build_the_task_is_an_error_at_start(tmp_path):
    file = tmp_path / "moody.py"
    file.write_text(
        "import os, sys\n"
        "from jetrl.tasks import Task\n"
        "from jetrl.types import Prompt\n"
        f"if os.getpid() != {os.getpid()}:\n"
        "    import no_such_package\n"
        "class Moody(Task):\n"
        "    def prompts(self, split): return [Prompt(id='0', text='?')]\n"
    )
    with pytest.raises(UserError, match=r"moody.py, line 5: does not import: ModuleNotFoundError"):
        Scorer(f"{file}:Moody", workers=2)


def test_metadata_that_cannot_be_sent_names_the_prompt(scorer):
    prompt = Prompt(id="p8", text="?", metadata={"file": sys.stdout, "call": lambda: 0})
    with pytest.raises(UserError, match="prompt 'p8': its metadata cannot be sent"):
        scorer.score([(prompt, "1")])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


def test_workers_end_when_their_parent_is_killed():
    program = textwrap.dedent(f"""
        import os, signal
        from jetrl.tasks import Scorer
        from jetrl.types import Prompt
        scorer = Scorer({AWKWARD!r}, workers=1, timeout_s=600)
        prompt = Prompt(id="0", text="?")
        print(int(scorer.score([(prompt, "pid")])[0].score.reward), flush=True)
        scorer.score([(prompt, "hang")])
    """)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        time.sleep(0.3)
        assert alive(worker)
        parent.kill()
    deadline = time.monotonic() + 20
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(worker)


def test_ctrl_c_stops_scoring_at_once_and_leaves_a_scorer_that_works():
    with Scorer(AWKWARD, workers=2, timeout_s=600) as scorer:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(KeyboardInterrupt):
                score(scorer, "hang", "hang", "1")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        assert [item.score.reward for item in score(scorer, "1", "2")] == [1.0, 2.0]


@pytest.mark.parametrize("bad", ["hang", "exit 3"])
def test_a_batch_of_nothing_but_hangs_or_crashes_is_given_up(bad, caplog):
    with Scorer(AWKWARD, workers=2, timeout_s=0.3, max_lost_s=1.0) as scorer:
        began = time.monotonic()
        results = score(scorer, "1", *[bad] * 512, "1")
        took = time.monotonic() - began
        # Two workers lose a second each, and each may be at one more score or start by then.
        assert took < 1.0 + 20.0, "one after the other they would take minutes"
        assert results[0].score.reward == score(scorer, "1")[0].score.reward == 1.0
        assert all(result.failure for result in results[1:-1])
        assert re.search(
            r"not judged: others .* \(task.max_lost_s = 1 s a worker\)", results[-1].failure
        )
        assert "of 514 completions get no verdict" in caplog.text


def test_what_is_begun_is_scored_while_the_caller_does_something_else(scorer):
    tickets = [scorer.begin(PROMPT, f"slow 0.{i % 2}5") for i in range(6)]
    deadline = time.monotonic() + 20
    while len(scorer._replies) < 6 and time.monotonic() < deadline:
        scorer.attend()
        time.sleep(0.01)  # a forward
    began = time.monotonic()
    assert [item.score.reward for item in scorer.finish(tickets)] == [1.0] * 6
    assert time.monotonic() - began < 0.02  # nothing was left to do: one score sleeps 0.05 s


def test_the_time_that_nobody_looked_is_not_counted_as_lost():
    with Scorer(AWKWARD, workers=1, timeout_s=0.1, max_lost_s=4.0) as scorer:
        tickets = [scorer.begin(PROMPT, completion) for completion in ("hang", "1")]
        scorer.attend()
        time.sleep(4.5)  # a forward that is compiled first: the worker ended itself after 0.1 s
        hung, scored = scorer.finish(tickets)
    assert "took longer than 0.1 s" in hung.failure
    assert scored.failure == ""  # about 2.2 s of 4 were lost


def test_what_is_begun_and_dropped_is_forgotten(scorer):
    for completion in ("hang", "1", "slow 0.1"):
        scorer.begin(PROMPT, completion)
    scorer.attend()
    scorer.drop()
    assert [item.score.reward for item in score(scorer, "2", "3")] == [2.0, 3.0]
    assert not scorer._replies
