"""Reward functions with the signatures of jetrl, TRL and verl, of a file and of a program."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from jetrl.errors import UserError
from jetrl.settings.sections import TaskSettings
from jetrl.tasks import ScoredText, ScoreError, Scorer, get_task
from jetrl.tasks.base import Answer, TrainerState
from jetrl.tasks.dataset import Dataset, get_checker
from jetrl.tasks.user_files import live, name_of
from jetrl.types import Prompt, Score, Turn
from jetrl.untrusted import exits_raised

ROW = {"prompt": "1+1=", "answer": "2", "data_source": "sums", "extra_info": {"split": "train"}}
PLAIN = Prompt(id="a", messages=({"role": "user", "content": "1+1="},), answer="2", metadata=ROW)
CHAT = Prompt(id="b", messages=PLAIN.messages, metadata={"prompt": [*PLAIN.messages]})


def ours(prompt, completion):
    return 0.5


def of_trl(completions, answer, **columns):
    assert columns["prompts"] == ["1+1="]
    assert columns["extra_info"] == [{"split": "train"}]
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def of_trl_without_columns(prompts, completions):
    return [float(completions[0][0]["content"] == "2" and prompts[0][0]["role"] == "user")]


class Judge:
    async def __call__(self, completions, **columns):
        return [0.5 for _ in completions]


async def of_trl_async(completions, **columns):
    return np.array([0.25])


def of_trl_with_ids(completion_ids, **columns):
    return [1.0]


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("sums", {"split": "train"})
    return {"score": float(solution_str == ground_truth), "acc": 1, "pred": solution_str}


@pytest.mark.parametrize(
    "function, prompt, reward",
    [
        (ours, PLAIN, 0.5),
        (of_trl, PLAIN, Score(1.0)),
        (of_trl_without_columns, CHAT, Score(1.0)),
        (of_trl_with_ids, CHAT, Score(1.0)),
        (functools.partial(of_trl_with_ids, extra_info=3), PLAIN, Score(1.0)),
        (lambda **columns: [len(columns["completions"])], PLAIN, Score(1.0)),
        (lambda completions: [math.nan], PLAIN, Score(None)),
        (of_verl, PLAIN, Score(1.0, {"acc": 1})),
        (of_trl_async, PLAIN, Score(0.25)),
        (Judge(), PLAIN, Score(0.5)),
        (lambda prompt, completion: {"score": 2}, PLAIN, Score(2)),
        (lambda prompt, completion: 3, PLAIN, 3),
    ],
)
def test_signatures(function: Callable, prompt: Prompt, reward: Any) -> None:
    assert get_checker(name_of(function))(prompt, "2") == reward


def test_parts_of_one_of_several_functions_are_kept() -> None:
    def f(prompt, completion):
        return Score(1.0, {"length": 2.0})

    def g(prompt, completion):
        return Score(None, {"length": 3.0})

    names = [name_of(f, "f"), name_of(g, "g"), "math"]
    score = get_checker(names)(PLAIN, "#### 2")
    assert (score.reward, score.parts["f"], "g" in score.parts) == (2.0, 1.0, False)
    assert (score.parts["length"], score.parts["g_length"]) == (2.0, 3.0)
    assert score.parts["answered"] == 1.0, "of math"


def test_several_rewards_are_added_with_weights() -> None:
    names = [name_of(ours), name_of(of_trl), name_of(lambda completions: [None], "skipped")]
    check = get_checker([*names, "exact"], weights=[1, 2, 100, 0.5])
    assert check(PLAIN, "2") == Score(3.0, {"ours": 0.5, "of_trl": 1.0, "exact": 1.0})
    assert check(PLAIN, "3") == Score(0.5, {"ours": 0.5, "of_trl": 0.0, "exact": 0.0})


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda completions: 1.0, r"returned 1.0 \(float\); give a list with a number or None"),
        (
            lambda completions: [1.0, 2.0],
            "give a list with a number or None per completion, 1 here",
        ),
        (lambda completions: "1", "returned '1' .str.; give a list"),
        (lambda completions: [1e300], "wrong: completion 1 of 1 returned 1e.300; give a finite"),
        (
            lambda completions, log_extra: log_extra("a", [1, 2]),
            r"'a'\): 2 values for 1 completions",
        ),
        (
            lambda completions, log_metric: log_metric("a", "b"),
            r"'a'\) returned 'b' \(str\), which",
        ),
        (lambda completions, solution: [1.0], "argument: 'solution'; there is: .*, data_source"),
        (lambda: 1.0, r"too many positional .*; write it as f\(prompt, completion\), f\(co"),
        (lambda completions: ["a"], "which is not a number"),
        (lambda completion, answer: 1.0, "argument: 'answer'; there is: prompt, completion"),
        (lambda prompt, completion: {"reward": 1}, r"{'reward': 1} \(dict\), which is not a num"),
    ],
)
def test_what_is_no_reward_is_named(function: Callable, words: str) -> None:
    with pytest.raises(ScoreError, match=words):
        get_checker([name_of(function, "wrong")])(PLAIN, "2")


def test_weights_are_as_many_as_rewards() -> None:
    with pytest.raises(UserError, match=r"2 weights for 1 reward functions \(ours\)"):
        get_checker([name_of(ours)], weights=[1, 2])


def test_an_object_of_another_program_is_refused_with_what_to_do() -> None:
    with pytest.raises(UserError, match=r"task.options.checker = python:gone: .* start or resume"):
        get_checker("python:gone")
    assert live(name_of(ours), "x") is ours


def test_a_function_at_the_top_of_a_file_scores_in_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named by its file, it has the limits of workers."""
    text = "import os\ndef pid(completions, **columns):\n    return [float(os.getpid())]\n"
    (tmp_path / "rewards_of_mine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = pytest.importorskip("rewards_of_mine")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    name = name_of(module.pid)
    assert name == f"{tmp_path / 'rewards_of_mine.py'}:pid"
    with Scorer("dataset", tmp_path / "rows.jsonl", {"checker": name}, workers=1) as scorer:
        (scored,) = scorer.score([(PLAIN, "2")])
    assert scored.score.reward not in (0.0, float(module.os.getpid()))


FUNCTIONS = """
import asyncio, os, statistics

both = asyncio.Barrier(2)  # bound to the first loop that waits for it

def rank(completions, prompts, completion_ids, level, trainer_state, log_extra, log_metric):
    log_metric("together", len(completions))
    log_extra("noted", [f"{ids} {step}" for ids, step in zip(completion_ids, level)])
    log_extra("step", [trainer_state.global_step] * len(completions))
    rewards = []
    for prompt, said in zip(prompts, completions):
        group = [float(other or 0) for asked, other in zip(prompts, completions) if asked == prompt]
        rewards.append(float(said or 0) > statistics.median(group))
    return rewards

def some(completions, **columns):
    return [None if said == "1" else 1 for said in completions]

def none(completions, **columns):
    return [None] * len(completions)

async def first(completions, **columns):
    await both.wait()
    return [1.0] * len(completions)

async def second(completions, **columns):
    await both.wait()
    return [0.5] * len(completions)

def breaks(completions, **columns):
    return [1 / (said != "3") for said in completions]

async def breaks_too(completions, **columns):
    if "3" in completions:
        raise KeyError("judge")
    return [1.0] * len(completions)

def hangs(completions, **columns):
    while "3" in completions:
        pass
    return [1.0] * len(completions)

def leaves(completions, **columns):
    if "3" in completions:
        os._exit(0)
    return [1.0] * len(completions)

def alone(prompt, completion):
    return float(completion or 0)

def exits(prompt, completion):
    return os._exit(0) if completion == "3" else 1.0
"""


@pytest.fixture
def named(tmp_path: Path) -> Callable[..., list[str]]:
    """Return how settings name the functions above; the rows are next to them."""
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    rows = [{"prompt": f"question {n}", "answer": str(n), "level": n % 2} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return lambda *names: [f"{file}:{name}" for name in names]


def scored(scorer: Scorer, rows: Path, *texts: str) -> list[ScoredText]:
    """Score texts as a step does: two groups, of which each completion's first id is its place."""
    prompts = [*Dataset(str(rows), checker="zero").prompts("train")]
    answers = [Answer(prompts[2 * i // len(texts)], t, (i, 7)) for i, t in enumerate(texts)]
    scorer.begin_step()
    begun = [scorer.begin(answer.prompt, answer.completion) for answer in answers]
    calls = scorer.begin_calls(answers)
    return scorer.finish_calls(calls, scorer.finish(begun))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_function_of_trl_gets_whole_groups_in_one_call(
    named: Any, tmp_path: Path, workers: int
) -> None:
    rows = tmp_path / "rows.jsonl"
    options = {"checker": named("rank", "alone", "some"), "weights": [1.0, 0.1, 10.0]}
    with Scorer("dataset", rows, options, workers=workers, timeout_s=60, group=4) as scorer:
        scorer.state = TrainerState(global_step=3, max_steps=9)
        results = scored(scorer, rows, "1", "2", "3", "9", "5", "7")
    assert [result.failure for result in results] == [""] * 6
    # Above the median of its own group, then a tenth of the number, and 10 if `some` takes it.
    assert [result.score.parts["rank"] for result in results] == [0, 0, 1, 1, 0, 0]
    rewards = [result.score.reward for result in results]
    assert rewards == pytest.approx([0.1, 10.2, 11.3, 11.9, 10.5, 10.7])
    assert ["some" in result.score.parts for result in results] == [False] + [True] * 5
    assert [result.score.parts["together"] for result in results] == [6] * 6
    (level,) = {0, 1} & {int(results[1].extra["noted"][-1])}
    assert results[1].extra == {"noted": f"[1, 7] {level}", "step": 3}


@pytest.mark.parametrize("workers", [0, 1])
def test_async_functions_run_at_the_same_time_in_one_loop_that_lasts(
    named: Any, tmp_path: Path, workers: int
) -> None:
    rows, options = tmp_path / "rows.jsonl", {"checker": named("first", "alone", "second")}
    with Scorer("dataset", rows, options, workers=workers, timeout_s=60) as scorer:
        for _ in range(2):
            results = scored(scorer, rows, "1", "2")
            assert [result.score.reward for result in results] == [2.5, 3.5]


@pytest.mark.parametrize(
    "names, words",
    [
        (["breaks"], r"reward function breaks raised ZeroDiv.*functions.py, line \d+, in"),
        (["breaks_too", "second_"], "reward function breaks_too raised KeyError: 'judge'"),
        (["hangs"], "reward function hangs took longer than 1 s of processor time .*, in hangs"),
        (["leaves"], "reward function leaves ended its worker with exit code 0"),
    ],
)
def test_a_failure_counts_for_the_call_and_names_the_function(
    named: Any, tmp_path: Path, names: list[str], words: str
) -> None:
    text = FUNCTIONS.replace(
        "async def second",
        "async def second_(completions, **columns):\n"
        "    return [1.0] * len(completions)\n\nasync def second",
    )
    checkers = named("rank", *names, "alone")
    (tmp_path / "functions.py").write_text(text)
    rows = tmp_path / "rows.jsonl"
    with Scorer("dataset", rows, {"checker": checkers}, workers=2, timeout_s=1) as scorer:
        results = scored(scorer, rows, "1", "2", "3", "9")
        again = scored(scorer, rows, "1", "2")
    assert [result.score for result in results] == [Score(0.0)] * 4
    for result in results:
        assert re.search(f"{words}.* .one call for 4 completions", result.failure), result.failure
    assert [result.failure for result in again] == ["", ""]


def test_a_completion_that_all_functions_leave_out_has_no_reward(
    named: Any, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    with Scorer("dataset", rows, {"checker": named("some", "none")}, workers=1) as scorer:
        results = scored(scorer, rows, "1", "2")
    assert [result.score for result in results] == [Score(None), Score(1.0, {"some": 1.0})]
    assert {result.failure for result in results} == {""}


def test_functions_of_a_mix_get_the_completions_of_their_own_task(
    named: Any, tmp_path: Path
) -> None:
    rows, (rank, some) = str(tmp_path / "rows.jsonl"), named("rank", "some")
    own = {"name": "dataset", "path": rows}
    tasks = [{**own, "label": "a", "options": {"checker": rank}}]
    tasks += [{**own, "label": "b", "options": {"checker": [some, "exact"]}}]
    with Scorer("mix", None, {"tasks": tasks}, workers=2) as scorer:
        prompts = [*get_task("mix", tasks=tasks).prompts("train")]
        pairs = [(prompt, text) for prompt in (prompts[0], prompts[-1]) for text in "12"]
        results = scorer.score(pairs)
    assert [result.score.reward for result in results[:2]] == [0.0, 1.0]
    assert results[0].score.parts == {"together": 2}
    right = [float(prompts[-1].answer == text) for text in "12"]
    assert [result.score.reward for result in results[2:]] == [right[0], 1.0 + right[1]]


def test_turns_are_messages_of_the_completion() -> None:
    given: dict[str, Any] = {}
    check = get_checker(name_of(lambda **all: given.update(all) or [1.0], "turns"))
    turns = (Turn("call", {"role": "tool", "content": "4"}), Turn("four"))
    answer = Answer(CHAT, turns, (1,))
    check.call(check.calls[0], [answer], TrainerState())
    said = [("assistant", "call"), ("tool", "4"), ("assistant", "four")]
    assert given["completions"] == [[{"role": r, "content": c} for r, c in said]]


def test_os_exit_without_workers_is_a_failure_of_the_score(named: Any, tmp_path: Path) -> None:
    rows, (name,) = tmp_path / "rows.jsonl", named("exits")
    leave = os._exit
    with Scorer("dataset", rows, {"checker": name}, workers=0) as scorer:
        results = scored(scorer, rows, "1", "3")
    assert [result.score.reward for result in results] == [1.0, 0.0]
    assert "SystemExit: os._exit(0) with task.workers = 0 would end the run" in results[1].failure
    assert os._exit is leave


def test_another_thread_may_end_the_process_during_a_score(monkeypatch: Any) -> None:
    """The watchdog and the peers end a run whose score hangs."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with exits_raised():
        thread = threading.Thread(target=lambda: os._exit(5))
        thread.start()
        thread.join()
        with pytest.raises(SystemExit, match="would end the run"):
            os._exit(6)
    assert codes == [5]


def test_workers_are_bounded_and_started_as_they_are_needed(named: Any, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="less than or equal to 1024"):
        TaskSettings(workers=1025)
    rows, (name,) = tmp_path / "rows.jsonl", named("alone")
    with Scorer("dataset", rows, {"checker": name}, workers=1000) as scorer:
        assert sum(worker.running for worker in scorer._workers) == 1
        scored(scorer, rows, "1", "2", "3", "4")
        assert 1 < sum(worker.running for worker in scorer._workers) <= 4


class OwnScore(Dataset):
    def score(self, prompt, completion):
        return 2 * super().score(prompt, completion)


def test_an_own_score_next_to_a_function_of_trl_is_refused(named: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"OwnScore has a score of its own, .* function some needs"):
        OwnScore(str(tmp_path / "rows.jsonl"), checker=named("some")[0])


def last_number(data_source, solution_str, ground_truth, extra_info=None):
    words = solution_str.split()
    return float(words[-1:] != [] and words[-1].isdigit() and int(words[-1]) == ground_truth)


def names_one(data_source, solution_str, ground_truth, extra_info):
    return float(any(name in solution_str for name in ground_truth or extra_info.get("all")))


@pytest.mark.parametrize(
    "function, truth, said, options",
    [
        (last_number, {"reward_model": {"style": "rule", "ground_truth": 7}}, "it is 7", {}),
        (last_number, {"value": {"of": 7}, "answer": "8"}, "it is 7", {"answer": "value.of"}),
        (
            names_one,
            {"reward_model": {"style": "rule", "ground_truth": ["Wien", "Vienna"]}},
            "It is Wien",
            {"answer": ""},  # as the refusal of a list advises
        ),
    ],
)
def test_functions_of_verl_get_the_answer_as_the_row_has_it(
    tmp_path: Path, function: Callable, truth: Any, said: str, options: dict[str, Any]
) -> None:
    rows = [{"data_source": "x", "prompt": f"What is {n}?", **truth} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = Dataset(str(tmp_path / "rows.jsonl"), checker=name_of(function), **options)
    for split in ("train", "test"):
        assert {task.score(prompt, said) for prompt in task.prompts(split)} == {1.0}
        assert {task.score(prompt, "no") for prompt in task.prompts(split)} == {0.0}
