"""A task of your own: spell a word backwards.

    jetrl train demo task=examples/reverse_words.py:ReverseWords run.name=words

A task is a class with `prompts` (what is asked) and `score` (what an answer is worth); the rest is
optional. docs/tasks.md goes through this file line by line.
"""

import random
from collections.abc import Iterable

from jetrl.tasks import Task
from jetrl.types import Prompt, Score

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class ReverseWords(Task):
    """Words of random letters: `word>` is to be answered with `drow`.

    letters: length of a word. size: words in the training split; the test split has a tenth.
    seed: which words.
    """

    name = "reverse-words"
    stop = ("\n",)  # a completion ends here; the model's end-of-sequence token ends it too
    alphabet = LETTERS + ">"  # lets `model.tokenizer=characters` build its vocabulary

    def __init__(self, letters: int = 4, size: int = 2000, seed: int = 0) -> None:
        self.letters, self.size, self.seed = letters, size, seed

    def prompts(self, split: str) -> Iterable[Prompt]:
        self.check_split(split)  # a clear error for anything but "train" and "test"
        draw = random.Random(self.seed)
        words = [
            "".join(draw.choices(LETTERS, k=self.letters)) for _ in range(self.size * 11 // 10)
        ]
        words = list(dict.fromkeys(words))  # no word in both splits
        chosen = words[self.size :] if split == "test" else words[: self.size]
        return [Prompt(id=word, text=f"{word}>", answer=word[::-1]) for word in chosen]

    def score(self, prompt: Prompt, completion: str) -> Score:
        answer = prompt.answer or ""
        right = sum(a == b for a, b in zip(completion, answer, strict=False))
        share = right / max(len(answer), len(completion))
        exact = float(completion == answer)
        # The reward is trained on; the parts are averaged into the logs.
        return Score(reward=0.5 * exact + 0.5 * share, parts={"exact": exact, "letters": share})

    def demonstration(self, prompt: Prompt) -> str | None:
        return prompt.answer  # what `jetrl sft` imitates
