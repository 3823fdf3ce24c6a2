"""Tasks that make up their own problems: sums, written-out products, traced programs."""

import json
import re
from pathlib import Path

import pytest

from jetrl.errors import UserError
from jetrl.models.tiny import character_tokenizer
from jetrl.tasks import Scorer, get_task
from jetrl.types import Prompt

SMALL = {"size": 60, "test_size": 20}
FILE = Path(__file__).parents[2] / "examples/long_answers.py"
MULTIPLICATION, PROGRAM = f"{FILE}:Multiplication", f"{FILE}:Program"
TASKS = [(MULTIPLICATION, {"digits": 3}), (PROGRAM, {"rounds": 2})]


def prompts(split, name="arithmetic", **options):
    return list(get_task(name, **options).prompts(split))


def sum_of(text, **options):
    both = prompts("train", **options) + prompts("test", **options)
    return next(prompt for prompt in both if prompt.id == text)


def task_of(name, **options):
    return get_task(name, **SMALL, **options)


def test_every_sum_exactly_once_and_none_held_out_and_trained_on():
    train, test = prompts("train"), prompts("test")
    assert (len(train), len(test)) == (9000, 1000)
    assert len({p.id for p in train + test}) == len({p.text for p in train + test}) == 10_000


def test_only_the_sums_of_a_file_are_trained_on(tmp_path):
    usual = prompts("train")
    file = tmp_path / "solved.jsonl"
    file.write_text("".join(json.dumps({"id": usual[at].id}) + "\n" for at in (7, 3, 5)))
    assert prompts("train", only=str(file)) == [usual[3], usual[5], usual[7]]
    assert prompts("test", only=str(file)) == prompts("test")
    held_out = prompts("test")[0].id
    for content, message in (
        (json.dumps({"id": held_out}), f"no training prompt '{re.escape(held_out)}'"),
        ("nothing\n", "line 1: not JSON"),
        ('{"id": 3}\n', "line 1: no object with an"),
        ("", "no lines"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=message):
            prompts("train", only=str(file))


@pytest.mark.parametrize("operators", ["+", "-", "-+"])
@pytest.mark.parametrize("written", [True, False])
def test_answers_are_right_and_in_the_alphabet(operators, written):
    task = get_task("arithmetic", operators=operators, padded=written, reverse=written, digits=1)
    for prompt in [*task.prompts("train"), *task.prompts("test")]:
        answer = prompt.answer or ""
        assert int(answer[::-1] if written else answer) == eval(prompt.id)
        assert set(f"{prompt.text}{answer}") <= set(task.alphabet or "")
        assert task.demonstration(prompt) == answer
        assert task.score(prompt, answer) == 1.0


def test_only_exactly_the_right_digits_count():
    task, prompt = get_task("arithmetic"), sum_of("7+25")
    assert [task.score(prompt, text) for text in ("230", " 230 ")] == [1, 1]
    for completion in ("032", "23", "2300", "", "230=", "x\ud800"):
        assert task.score(prompt, completion) == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reversed_answer_comes_with_its_score_as_people_write_it(workers):
    answers = ("520", " 041 ", "000", "5+2", "\u0665", "1" * 5000)
    with Scorer("arithmetic", workers=workers) as scorer:
        scored = scorer.score([(sum_of("20+5"), answer) for answer in answers])
    assert [one.score.reward for one in scored] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert [one.readable for one in scored[:3]] == ["20 + 5 = 25", "20 + 5 = 140", "20 + 5 = 0"]
    assert [one.readable for one in scored[3:5]] == ["20 + 5 = (no number)"] * 2
    assert len(scored[5].readable) == 500
    assert get_task("arithmetic", reverse=False).readable(sum_of("20+5"), "520") == ""


@pytest.mark.parametrize("name, options", TASKS)
def test_problems_are_the_same_each_time_and_none_is_held_out_and_trained_on(name, options):
    task = task_of(name, **options)
    train, test = list(task.prompts("train")), list(task.prompts("test"))
    assert (len(train), len(test)) == (60, 20)
    assert len({prompt.id for prompt in train + test}) == 80
    assert train == prompts("train", name, **SMALL, **options)
    assert train != prompts("train", name, seed=1, **SMALL, **options)
    assert test == prompts("test", name, size=7, test_size=20, **options)
    assert train[:7] == prompts("train", name, size=7, test_size=20, **options)


@pytest.mark.parametrize("name, options", TASKS)
def test_worked_answers_get_the_full_reward_and_are_in_the_alphabet(name, options):
    task = task_of(name, **options)
    for prompt in task.prompts("train"):
        answer = task.demonstration(prompt)
        assert task.score(prompt, f" {answer} ").parts == {"answer": 1.0, "steps": 1.0}
        character_tokenizer(task.alphabet).encode(f"{prompt.text}{answer}")
        assert task.vote(prompt, answer) == prompt.answer


@pytest.mark.parametrize("digits", [2, 8])
def test_products_are_right_and_as_long_as_the_document_says(digits):
    task = task_of(MULTIPLICATION, digits=digits)
    for prompt in task.prompts("test"):
        left, right = (int(factor[::-1]) for factor in prompt.text.rstrip("=").split("*"))
        assert int(prompt.answer.lstrip(",")[::-1]) == left * right
        assert len(task.demonstration(prompt)) == digits * (7 * digits + 3) + 2 * digits + 1


@pytest.mark.parametrize("rounds, variables", [(1, 2), (15, 3), (9, 6)])
def test_programs_are_traced_as_python_runs_them(rounds, variables):
    task = task_of(PROGRAM, rounds=rounds, variables=variables)
    for prompt in task.prompts("test"):
        first, _, body = prompt.text.rstrip("=").partition("*")[2].partition(":")
        values = {first[at]: int(first[at + 1]) for at in range(0, len(first), 2)}
        for _ in range(rounds):
            for line in body.split(","):
                exec(f"{line[0]} {line[1]}= {line[2]}", {}, values)
        assert prompt.answer == "".join(str(value % 10) for value in values.values())
        assert len(task.demonstration(prompt)) == rounds * (10 * variables + 3) + variables


def test_how_work_is_written():
    task = task_of(MULTIPLICATION, digits=2)
    assert task.solve("21*43=") == ["43,:208080104040", "3,8:246001103040", ",8040"]
    program = task_of(PROGRAM).solve("02*a3b7c1:a+b,b-c,c+5=")
    assert ";".join(program) == (
        "02)a+b:3+7=0;b-c:7-1=6;c+5:1+5=6;01)a+b:0+6=6;b-c:6-6=0;c+5:6+5=1;601"
    )


@pytest.mark.parametrize("name, options", TASKS)
def test_a_careless_teacher_is_wrong_as_often_as_said_and_never_by_chance_right(name, options):
    task = task_of(name, mistakes=0.5, **options)
    train = list(task.prompts("train"))
    rewards = [task.score(prompt, task.demonstration(prompt)).reward for prompt in train * 10]
    # 600 draws with probability 0.5: four standard deviations are 0.08.
    assert abs(sum(rewards) / len(rewards) - 0.5) < 0.08
    always = task_of(name, mistakes=1.0, **options)
    answers = [always.demonstration(prompt) for prompt in train]
    assert {always.score(*pair).reward for pair in zip(train, answers, strict=True)} == {0.0}
    assert answers != [always.demonstration(prompt) for prompt in train]


@pytest.mark.parametrize(
    "completion, answer, steps",
    [
        ("02)a+b:3+7=0;b-c:7-1=6;c+5:1+5=6;01)a+b:0+6=6;b-c:6-6=0;c+5:6+5=1;601", 1, 1.0),
        ("02)a+b:3+7=1;b-c:7-1=6;c+5:1+5=6;01)a+b:0+6=6;b-c:6-6=0;c+5:6+5=1;601", 1, 6 / 7),
        ("02)a+b:3+7=0;601", 1, 2 / 7),
        ("02)a+b:3+7=0;b-c:7-1=6;", 0, 2 / 7),
        ("", 0, 0.0),
        (";;;;;;;;;;;;;;601", 1, 1 / 7),
        ("6 0 1\x00\ud800", 0, 0.0),
    ],
)
def test_reward_is_the_answer_and_by_choice_the_share_of_right_steps(completion, answer, steps):
    text = "02*a3b7c1:a+b,b-c,c+5="
    prompt = Prompt(id=text, text=text, answer="601")
    score = task_of(PROGRAM).score(prompt, completion)
    assert score.reward == score.parts["answer"] == answer
    steps = pytest.approx(steps, abs=1e-12)  # a rounded quotient
    assert score.parts["steps"] == steps
    assert task_of(PROGRAM, reward="steps").score(prompt, completion).reward == steps
