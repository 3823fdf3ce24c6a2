import json
import re

import pytest

from jetrl.errors import UserError
from jetrl.tasks import Scorer, get_task
from jetrl.tasks.toys import Arithmetic
from jetrl.types import Prompt


def prompts(split, **options):
    return list(get_task("arithmetic", **options).prompts(split))


def test_every_problem_exactly_once_and_no_training_problem_held_out():
    train, test = prompts("train"), prompts("test")
    assert (len(train), len(test)) == (9000, 1000)
    assert len({p.id for p in train + test}) == 10_000
    assert len({p.text for p in train + test}) == 10_000


def test_only_the_sums_of_a_file_are_trained_on(tmp_path):
    usual = prompts("train")
    file = tmp_path / "solved.jsonl"
    file.write_text("".join(json.dumps({"id": usual[at].id}) + "\n" for at in (7, 3, 5)))
    assert prompts("train", only=str(file)) == [usual[3], usual[5], usual[7]]
    assert prompts("test", only=str(file)) == prompts("test")
    held_out = prompts("test")[0].id
    file.write_text(json.dumps({"id": held_out}) + "\n")
    with pytest.raises(UserError, match=f"no training prompt '{re.escape(held_out)}'"):
        prompts("train", only=str(file))


@pytest.mark.parametrize(
    "options, text, answer",
    [
        ({}, "07+25=", "230"),
        ({"reverse": False}, "07+25=", "032"),
        ({"padded": False}, "7+25=", "23"),
        ({"padded": False, "reverse": False}, "7+25=", "32"),
        ({"digits": 3, "max_operand": 30}, "007+025=", "2300"),
        ({"max_operand": 30}, "07+25=", "230"),
    ],
)
def test_how_a_sum_is_written(options, text, answer):
    both = prompts("train", **options) + prompts("test", **options)
    (prompt,) = [p for p in both if p.id == "7+25"]
    assert (prompt.text, prompt.answer) == (text, answer)


@pytest.mark.parametrize("operators", ["+", "-", "+-", "-+"])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_answers_are_right_and_in_the_alphabet(operators, padded, reverse):
    task = get_task("arithmetic", operators=operators, padded=padded, reverse=reverse, digits=1)
    for prompt in [*task.prompts("train"), *task.prompts("test")]:
        answer = prompt.answer or ""
        assert int(answer[::-1] if reverse else answer) == eval(prompt.id)
        assert set(f"{prompt.text}{answer}") <= set(task.alphabet or "")
        assert task.demonstration(prompt) == answer
        assert task.score(prompt, answer) == 1.0


@pytest.mark.parametrize(
    "completion, reward",
    [
        ("230", 1),
        (" 230 ", 1),
        ("032", 0),
        ("23", 0),
        ("2300", 0),
        ("", 0),
        ("230=", 0),
        ("x\ud800", 0),
    ],
)
def test_only_exactly_the_right_digits_count(completion, reward):
    prompt = next(p for p in prompts("train") + prompts("test") if p.id == "7+25")
    assert get_task("arithmetic").score(prompt, completion) == reward


@pytest.mark.parametrize(
    "options, message",
    [
        ({"digits": 0}, "digits = 0: give 1, 2 or 3"),
        ({"digits": "2"}, "digits = '2'"),
        ({"operators": "*"}, "operators = .*give some of"),
        ({"operators": ""}, "operators = ''"),
        ({"max_operand": 100}, "max_operand = 100: give 1 to 99"),
        ({"test_share": 1.0}, "test_share"),
        ({"seed": "a"}, "seed"),
        ({"only": 3}, "only = 3"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=f"task.options.{message}"):
        get_task("arithmetic", **options)


@pytest.mark.parametrize(
    "completion, readable",
    [
        ("520", "20 + 5 = 25"),
        (" 041 ", "20 + 5 = 140"),
        ("000", "20 + 5 = 0"),
        ("", "20 + 5 = (no number)"),
        ("5+2", "20 + 5 = (no number)"),
        ("\u0665", "20 + 5 = (no number)"),
    ],
)
def test_a_reversed_answer_is_shown_as_people_write_it(completion, readable):
    prompt = Arithmetic()._prompt(20, "+", 5)
    assert Arithmetic().readable(prompt, completion) == readable
    assert Arithmetic(reverse=False).readable(prompt, completion) == ""
    assert Arithmetic(operators="-").readable(Prompt(id="x", text="?"), completion) == ""


@pytest.mark.parametrize("workers", [0, 1])
def test_what_people_read_comes_with_the_score(workers):
    prompt = Arithmetic()._prompt(20, "+", 5)
    with Scorer("arithmetic", workers=workers) as scorer:
        right, wrong = scorer.score([(prompt, "520"), (prompt, "1" * 5000)])
    assert (right.score.reward, right.readable) == (1.0, "20 + 5 = 25")
    assert (wrong.score.reward, len(wrong.readable)) == (0.0, 500)
    assert "1+1=2" in Arithmetic(max_operand=1, digits=1, padded=False).reading
    assert "05=" in Arithmetic(operators="-").reading
