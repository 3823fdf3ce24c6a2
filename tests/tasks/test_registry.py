"""Finding tasks by name, and what is said about names, options and files that are wrong."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.tasks.test_toys import MULTIPLICATION, PROGRAM

from jetrl.errors import UserError
from jetrl.tasks import ScoreError, Scorer, Task, get_task, read_prompts, to_score
from jetrl.types import Score

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "reverse_words.py")
AWKWARD = str(Path(__file__).with_name("awkward_task.py"))


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("arithmetik", {}, "unknown task 'arithmetik'; did you mean arithmetic?"),
        ("zzz", {}, "there is: arithmetic, .*, mix, math500.*reasoning_gym:NAME, file.py:Class"),
        ("arithmetic", {"digit": 2}, "task.options.digit: .* did you mean digits?"),
        ("arithmetic", {"path": "x"}, "task.path: task arithmetic has no such option"),
        ("dataset", {}, "task dataset needs task.path"),
        ("reasoning_gym:chain_summ", {}, "did you mean chain_sum?"),
        ("no_such_file.py:Mine", {}, "task file no_such_file.py: No such file"),
        ("mine.py", {}, "add the class, as in mine.py:MyTask"),
        (f"{EXAMPLE}:ReverseWord", {}, "no class 'ReverseWord'; did you mean ReverseWords?"),
        (f"{EXAMPLE}:ReverseWords", {"leters": 3}, "did you mean letters?"),
        (f"{AWKWARD}:NotATask", {}, "awkward_task.py: NotATask is not a Task; write"),
        ("arithmetic", {"digits": 0}, "digits = 0: should be greater"),
        ("arithmetic", {"operators": "*"}, "operators = .*should match pattern"),
        ("arithmetic", {"max_operand": 100}, "max_operand = 100: give 1 to 99"),
        ("arithmetic", {"test_share": 1.0}, "test_share"),
        ("arithmetic", {"seed": "a"}, "seed"),
        (MULTIPLICATION, {"digits": 1}, "digits = 1: should be greater than or equal to 2"),
        (MULTIPLICATION, {"digits": 2, "size": 9000}, "more than half of the"),
        (PROGRAM, {"rounds": True}, "rounds = True"),
        (PROGRAM, {"variables": 7}, "variables = 7: should be less than or equal to 6"),
        (PROGRAM, {"size": 0}, "size = 0"),
        (PROGRAM, {"test_size": 1.5}, "test_size = 1.5"),
        (PROGRAM, {"mistakes": 1.5}, "mistakes = 1.5"),
        (PROGRAM, {"reward": "both"}, "should be 'answer' or 'steps'"),
        (PROGRAM, {"only": 3}, "only = 3"),
        (PROGRAM, {"rouns": 2}, "rouns"),
    ],
)
def test_bad_names_and_options(name, options, message):
    with pytest.raises(UserError, match=message):
        get_task(name, **options)


@pytest.mark.parametrize(
    "source, message",
    [
        ("x = 1\nclass Mine(Task:\n    pass\n", "line 2: SyntaxError"),
        ("def f():\n    return 1 / 0\nf()\n", "line 2: does not import: ZeroDivisionError"),
        ("import sys\nsys.exit(0)\n", "line 2: does not import: SystemExit"),
    ],
)
def test_a_file_that_does_not_import_names_file_and_line(tmp_path, source, message):
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(UserError, match=f"{re.escape(str(file))}, {message}"):
        get_task(f"{file}:Mine")


def test_the_documented_example():
    options = {"letters": 3, "size": 50}
    task = get_task(f"{EXAMPLE}:ReverseWords", **options)
    train, test = list(task.prompts("train")), list(task.prompts("test"))
    assert len(train) == 50
    assert not {p.id for p in train} & {p.id for p in test}
    with pytest.raises(UserError, match="no split 'tset'"):
        task.prompts("tset")
    prompt = train[0]
    assert set(f"{prompt.text}{prompt.answer}") <= set(task.alphabet or "")
    with Scorer(f"{EXAMPLE}:ReverseWords", options=options, workers=1) as scorer:
        right, wrong, none = scorer.score(
            [(prompt, task.demonstration(prompt) or ""), (prompt, "??????"), (prompt, "")]
        )
    assert (right.score.reward, dict(right.score.parts)) == (1.0, {"exact": 1.0, "letters": 1.0})
    assert (wrong.score.reward, none.score.reward) == (0.0, 0.0)


@pytest.mark.parametrize(
    "value",
    [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), Score(1), Score(np.float64(1))],
)
def test_numbers_become_scores_of_python_floats(value):
    score = to_score(value, "t", "p")
    assert score == Score(1.0)
    assert type(score.reward) is float


@pytest.mark.parametrize(
    "value",
    [
        *(None, "1", [1.0], 1j, float("nan"), float("inf"), 10**400, np.ones(2)),
        *(Score(float("nan")), 1e308, -1.1e15),
    ],
)
def test_anything_else_is_an_error_that_names_task_and_prompt(value):
    with pytest.raises(ScoreError, match="task t, prompt 'p': score returned"):
        to_score(value, "t", "p")


class Odd(Task):
    name = "odd"

    def prompts(self, split):
        if split == "bad":
            raise UserError("its own words")
        if split == "left":
            sys.exit(0)
        if split == "forgotten":
            return None
        return [1 / 0] if split == "train" else ["a text"]


@pytest.mark.parametrize(
    "split, message",
    [
        ("train", r"prompts\('train'\) raised ZeroDivisionError.*test_registry\.py, line"),
        ("test", r"task odd: item 0 of prompts\('test'\) is no Prompt but 'a text'"),
        ("bad", "^its own words$"),
        ("left", r"prompts\('left'\) raised SystemExit: 0 \(.*test_registry\.py, line"),
        ("forgotten", r"task odd: prompts\('forgotten'\) returned nothing: add the return"),
    ],
)
def test_prompts_that_raise_or_are_none_are_named(split, message):
    with pytest.raises(UserError, match=message):
        read_prompts(Odd(), split)
