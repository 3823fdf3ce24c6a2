"""Every kind of problem has demonstrations that the task scores 1."""

import sys

import pytest

from benchmarks import letter_counts, word_problems
from jetrl.tasks.dataset import Dataset


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (word_problems, ""),
        (word_problems, "--kind total"),
        (word_problems, "--kind total --steps 80 100 --most 9"),
        (letter_counts, "--steps 4 6"),
    ],
)
def test_demonstrations_are_right_and_no_test_prompt_is_trained(
    script, words, tmp_path, monkeypatch
):
    sizes = ["--train", "60", "--test", "40"]
    monkeypatch.setattr(sys, "argv", ["word_problems", str(tmp_path), *sizes, *words.split()])
    word_problems.main(script.KINDS)
    task = Dataset(str(tmp_path), demonstration="demonstration")
    train, test = (list(task.prompts(split)) for split in ("train", "test"))
    assert len({str(prompt.messages) for prompt in [*train, *test]}) == 100
    for prompt in [*train, *test]:
        worked = task.demonstration(prompt)
        assert task.score(prompt, worked).reward == 1
        assert task.score(prompt, worked.rpartition("####")[0] + "#### -1").reward == 0
