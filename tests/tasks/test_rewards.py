"""Reward functions with the signatures of jetrl, TRL and verl, of a file and of a program."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jetrl.errors import UserError
from jetrl.tasks import ScoreError, Scorer
from jetrl.tasks.dataset import get_checker
from jetrl.tasks.live import live, name_of
from jetrl.types import Prompt, Score

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
        (of_trl, PLAIN, 1.0),
        (of_trl_without_columns, CHAT, 1.0),
        (of_verl, PLAIN, Score(1.0, {"acc": 1})),
        (of_trl_async, PLAIN, 0.25),
        (lambda prompt, completion: {"score": 2}, PLAIN, Score(2)),
        (lambda prompt, completion: 3, PLAIN, 3),
    ],
)
def test_signatures(function: Callable, prompt: Prompt, reward: Any) -> None:
    assert get_checker(name_of(function))(prompt, "2") == reward


def test_several_rewards_are_added_with_weights() -> None:
    names = [name_of(ours), name_of(of_trl), name_of(lambda completions: [None], "skipped")]
    check = get_checker([*names, "exact"], weights=[1, 2, 100, 0.5])
    assert check(PLAIN, "2") == Score(3.0, {"ours": 0.5, "of_trl": 1.0, "exact": 1.0})
    assert check(PLAIN, "3") == Score(0.5, {"ours": 0.5, "of_trl": 0.0, "exact": 0.0})


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda completions: 1.0, r"returned 1.0 \(float\); give a list with a number per"),
        (lambda completions: [1.0, 2.0], "give a list with a number per completion"),
        (lambda completions, solution: [1.0], "argument: 'solution'; there is: .*, data_source"),
        (of_trl_with_ids, r"too many positional .*; write it as f\(prompt, completion\), f\(co"),
        (lambda completions: ["a"], "which is not a number"),
        (lambda completion, answer: 1.0, "argument: 'answer'; there is: prompt, completion"),
        (lambda prompt, completion: {"reward": 1}, r"{'reward': 1} \(dict\), which is not a num"),
        (lambda completions: [math.nan], "no reward function gave a number"),
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
