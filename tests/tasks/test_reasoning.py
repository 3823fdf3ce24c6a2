import pytest

from jetrl.errors import UserError
from jetrl.tasks import Scorer, get_task, read_prompts

pytest.importorskip("reasoning_gym")
NAME = "reasoning_gym:chain_sum"


def test_chain_sum_by_name_with_its_options_scored_by_its_own_scorer():
    options = {"size": 20, "max_terms": 3, "min_digits": 4, "seed": 5}
    task = get_task(NAME, **options)
    prompts = list(task.prompts("train"))
    assert len(prompts) == 20
    assert all(p.metadata["entry"]["metadata"]["num_terms"] <= 3 for p in prompts)
    assert prompts == list(get_task(NAME, **options).prompts("train"))
    prompt = prompts[0]
    with Scorer(NAME, options=options, workers=1) as scorer:
        right, wrong, bare = scorer.score(
            [
                (prompt, f"Well, <answer>17x</answer> no: <answer> {prompt.answer} </answer>"),
                (prompt, "<answer>no idea</answer>"),
                (prompt, str(prompt.answer)),
            ]
        )
    assert (right.score.reward, right.failure) == (1.0, "")
    assert wrong.score.reward < 1
    assert bare.score.reward < 1
    assert [s.score.parts["answered"] for s in (right, wrong, bare)] == [1.0, 1.0, 0.0]


def test_the_splits_share_no_question_although_neighbouring_seeds_do():
    questions = {
        (seed, split): {
            p.text
            for p in get_task(NAME, format="text", size=100, seed=seed, min_digits=4).prompts(split)
        }
        for seed in (0, 1)
        for split in ("train", "test")
    }
    assert len(questions[0, "train"] & questions[1, "train"]) >= 90  # why the seeds lie far apart
    assert not questions[0, "train"] & questions[0, "test"]


@pytest.mark.parametrize(
    "name, options, num_test",
    [
        ("prime_factorization", {}, 100),  # a tenth of 999 numbers
        ("coin_flip", {}, 26),
        ("aiw", {"size": 500, "format": "text"}, 500),  # few are shared: training loses those
    ],
)
def test_no_test_question_is_trained_on(name: str, options: dict, num_test: int) -> None:
    task = get_task(f"reasoning_gym:{name}", **options)
    train, test = (read_prompts(task, split) for split in ("train", "test"))
    asked = {prompt.asked for prompt in train}
    assert not any(prompt.asked in asked for prompt in test)
    assert train
    assert len(test) == num_test
    again = get_task(f"reasoning_gym:{name}", **options)
    assert (read_prompts(again, "test"), read_prompts(again, "train")) == (test, train)


def test_a_set_without_repeats_keeps_the_draws_of_earlier_versions() -> None:
    task = get_task(NAME, size=30, test_size=20, min_digits=4)
    for split, size in (("train", 30), ("test", 20)):
        prompts = read_prompts(task, split)
        assert [prompt.id for prompt in prompts] == [f"{split}-{n}" for n in range(size)]


def test_a_set_of_one_question_is_not_in_both_splits() -> None:
    one = {"size": 1, "min_value": 6, "max_value": 6}
    task = get_task("reasoning_gym:prime_factorization", **one, test_size=9)
    assert len(read_prompts(task, "train")) == 1
    with pytest.raises(UserError, match="every draw asks the same, nothing can be held out; set"):
        read_prompts(task, "test")
    task = get_task("reasoning_gym:prime_factorization", **one, test_size=1)
    with pytest.raises(UserError, match="every draw for training is a test question; raise"):
        read_prompts(task, "train")


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("prime_factorization", "no idea"),
        ("boxnet", "[1, 2]"),
        ("coin_flip", "1e400"),
        ("game_of_life", "{}"),
    ],
)
def test_a_scorer_that_raises_on_a_wrong_answer_gives_0(name: str, wrong: str) -> None:
    task = get_task(f"reasoning_gym:{name}", size=2, test_size=2)
    prompt = next(iter(task._draws("train")))
    with pytest.raises(Exception):  # noqa: B017
        task._data["train"].score_answer(wrong, prompt.metadata["entry"])
    assert task.score(prompt, f"<answer>{wrong}</answer>").reward == 0.0
    assert task.score(prompt, "").reward == 0.0


def test_a_scorer_that_raises_on_its_own_answer_too_is_no_verdict(monkeypatch) -> None:
    task = get_task(NAME, size=2, test_size=2)
    prompt = next(iter(task._draws("train")))

    def broken(answer: object, entry: object) -> float:
        raise ModuleNotFoundError("No module named 'scipy'")

    monkeypatch.setattr(task._data["train"], "score_answer", broken)
    for answer in ("no idea", prompt.answer):
        with pytest.raises(ModuleNotFoundError, match="scipy"):
            task.score(prompt, f"<answer>{answer}</answer>")


def test_the_prompt_asks_for_the_bare_answer_since_more_costs_reward() -> None:
    task = get_task(NAME, size=1, test_size=1)
    (prompt,) = read_prompts(task, "train")
    gold = prompt.answer
    rewards = [task.score(prompt, f"<answer>{t}</answer>").reward for t in (gold, f"${gold}$")]
    assert rewards[0] == 1 > rewards[1] > 0
    assert "only the bare final answer" in prompt.asked
    mix = get_task("mix", tasks=[{"name": NAME}, {"name": "arithmetic"}])
    assert (task.partial_credit, mix.partial_credit) == (True, True)
    assert not get_task("arithmetic").partial_credit
