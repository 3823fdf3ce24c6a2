"""Tests of tasks with the work written out: problems, checked steps, a careless teacher."""

import pytest

from jetrl.errors import UserError
from jetrl.models.tiny import character_tokenizer
from jetrl.tasks import get_task
from jetrl.types import Prompt

SMALL = {"size": 60, "test_size": 20}
TASKS = [("multiplication", {"digits": 3}), ("program", {"rounds": 2})]


def task_of(name, **options):
    return get_task(name, **SMALL, **options)


def prompt_of(text, answer):
    return Prompt(id=text, text=text, answer=answer)


@pytest.mark.parametrize("name, options", TASKS)
def test_problems_are_the_same_each_time_and_none_is_held_out_and_trained_on(name, options):
    task = task_of(name, **options)
    train, test = list(task.prompts("train")), list(task.prompts("test"))
    assert (len(train), len(test)) == (60, 20)
    assert len({prompt.id for prompt in train + test}) == 80
    assert train == list(task_of(name, **options).prompts("train"))
    assert train != list(task_of(name, seed=1, **options).prompts("train"))
    assert test == list(get_task(name, size=7, test_size=20, **options).prompts("test"))


def test_a_larger_task_begins_with_the_problems_of_a_smaller_one():
    few, more = (get_task("program", size=size, test_size=5).prompts("train") for size in (9, 30))
    assert list(few) == list(more)[:9]


@pytest.mark.parametrize("name, options", TASKS)
def test_worked_answers_get_the_full_reward_and_are_in_the_alphabet(name, options):
    task = task_of(name, **options)
    for prompt in task.prompts("train"):
        answer = task.demonstration(prompt)
        assert task.score(prompt, answer).reward == 1.0
        assert task.score(prompt, f" {answer} ").parts == {"answer": 1.0, "steps": 1.0}
        character_tokenizer(task.alphabet).encode(f"{prompt.text}{answer}")
        assert task.vote(prompt, answer) == prompt.answer


@pytest.mark.parametrize("digits", [2, 3, 8, 16])
def test_products_are_right_and_as_long_as_the_document_says(digits):
    task = task_of("multiplication", digits=digits)
    for prompt in task.prompts("test"):
        left, right = (int(factor[::-1]) for factor in prompt.text.rstrip("=").split("*"))
        assert int(prompt.answer.lstrip(",")[::-1]) == left * right
        assert len(task.demonstration(prompt)) == digits * (7 * digits + 3) + 2 * digits + 1


@pytest.mark.parametrize("rounds, variables", [(1, 2), (2, 3), (15, 3), (62, 3), (9, 6)])
def test_programs_are_traced_as_python_runs_them(rounds, variables):
    task = task_of("program", rounds=rounds, variables=variables)
    for prompt in task.prompts("test"):
        first, _, body = prompt.text.rstrip("=").partition("*")[2].partition(":")
        values = {first[at]: int(first[at + 1]) for at in range(0, len(first), 2)}
        for _ in range(rounds):
            for line in body.split(","):
                exec(f"{line[0]} {line[1]}= {line[2]}", {}, values)
        assert prompt.answer == "".join(str(value % 10) for value in values.values())
        assert len(task.demonstration(prompt)) == rounds * (10 * variables + 3) + (
            variables + rounds * variables - rounds * variables
        )


def test_how_work_is_written():
    task = task_of("multiplication", digits=2)
    (steps, program) = (task.solve("21*43="), task_of("program").solve("02*a3b7c1:a+b,b-c,c+5="))
    assert steps == ["43,:208080104040", "3,8:246001103040", ",8040"]
    assert ";".join(program) == (
        "02)a+b:3+7=0;b-c:7-1=6;c+5:1+5=6;01)a+b:0+6=6;b-c:6-6=0;c+5:6+5=1;601"
    )


@pytest.mark.parametrize("name, options", TASKS)
def test_a_careless_teacher_is_wrong_as_often_as_said_and_never_by_chance_right(name, options):
    task = task_of(name, mistakes=0.5, **options)
    prompts = list(task.prompts("train"))
    rewards = [task.score(prompt, task.demonstration(prompt)).reward for prompt in prompts * 10]
    # 600 draws with probability 0.5: four standard deviations are 0.08.
    assert abs(sum(rewards) / len(rewards) - 0.5) < 0.08
    always = task_of(name, mistakes=1.0, **options)
    answers = [always.demonstration(prompt) for prompt in prompts]
    assert {always.score(*pair).reward for pair in zip(prompts, answers, strict=True)} == {0.0}
    assert answers != [always.demonstration(prompt) for prompt in prompts]


@pytest.mark.parametrize(
    "completion, answer, steps",
    [
        ("02)a+b:3+7=0;b-c:7-1=6;c+5:1+5=6;01)a+b:0+6=6;b-c:6-6=0;c+5:6+5=1;601", 1, 1.0),
        ("02)a+b:3+7=1;b-c:7-1=6;c+5:1+5=6;01)a+b:0+6=6;b-c:6-6=0;c+5:6+5=1;601", 1, 6 / 7),
        ("02)a+b:3+7=0;601", 1, 2 / 7),
        ("601", 1, 1 / 7),
        ("02)a+b:3+7=0;b-c:7-1=6;", 0, 2 / 7),
        ("02)a+b:3+7=0", 0, 0.0),
        ("", 0, 0.0),
        (";;;;;;;;;;;;;;601", 1, 1 / 7),
        ("6 0 1\x00\ud800", 0, 0.0),
    ],
)
def test_reward_is_the_answer_and_by_choice_the_share_of_right_steps(completion, answer, steps):
    prompt = prompt_of("02*a3b7c1:a+b,b-c,c+5=", "601")
    score = task_of("program").score(prompt, completion)
    assert score.reward == score.parts["answer"] == answer
    assert score.parts["steps"] == pytest.approx(steps, abs=1e-12)  # a rounded quotient
    assert task_of("program", reward="steps").score(prompt, completion).reward == pytest.approx(
        steps, abs=1e-12
    )


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"id": "02*a"}\n', "no training prompt '02\\*a'"),
        ("nothing\n", "line 1: not JSON"),
        ('{"id": 3}\n', "line 1: no object with an"),
        ("", "no lines"),
        (None, "No such file"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_used(tmp_path, content, message):
    file = tmp_path / "ids.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=message):
        task_of("program", only=str(file)).prompts("train")


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("multiplication", {"digits": 1}, "digits = 1: give 2 to 40"),
        ("multiplication", {"digits": 2, "size": 9000}, "at most half of them"),
        ("program", {"rounds": 0}, "rounds = 0: give 1 to 99"),
        ("program", {"rounds": True}, "rounds = True"),
        ("program", {"variables": 7}, "variables = 7: give 2 to 6"),
        ("program", {"size": 0}, "size = 0"),
        ("program", {"test_size": 1.5}, "test_size = 1.5"),
        ("program", {"mistakes": 1.5}, "mistakes = 1.5"),
        ("program", {"reward": "both"}, "give one of answer, steps"),
        ("program", {"seed": "x"}, "seed = 'x'"),
        ("program", {"only": 3}, "only = 3"),
        ("program", {"rouns": 2}, "rouns"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(UserError, match=message):
        get_task(name, **options)
