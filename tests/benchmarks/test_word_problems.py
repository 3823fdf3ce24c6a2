"""Every kind of word problem has a demonstration that the task scores 1."""

import sys

import pytest

from benchmarks import word_problems
from jetrl.tasks.dataset import Dataset


@pytest.mark.parametrize("words", ["", "--kind total", "--kind total --steps 80 100 --most 9"])
def test_demonstrations_are_right_and_no_test_prompt_is_trained(words, tmp_path, monkeypatch):
    sizes = ["--train", "60", "--test", "40"]
    monkeypatch.setattr(sys, "argv", ["word_problems", str(tmp_path), *sizes, *words.split()])
    word_problems.main()
    task = Dataset(str(tmp_path), demonstration="demonstration")
    train, test = (list(task.prompts(split)) for split in ("train", "test"))
    assert len({str(prompt.messages) for prompt in [*train, *test]}) == 100
    for prompt in [*train, *test]:
        worked = task.demonstration(prompt)
        assert task.score(prompt, worked).reward == 1
        assert task.score(prompt, worked.rpartition("####")[0] + "#### -1").reward == 0
