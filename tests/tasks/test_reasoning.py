import pytest

from jetrl.tasks import Scorer, get_task

pytest.importorskip("reasoning_gym")
NAME = "reasoning_gym:chain_sum"


def test_chain_sum_by_name_with_its_options_scored_by_its_own_scorer():
    options = {"size": 20, "max_terms": 3, "seed": 5}
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
