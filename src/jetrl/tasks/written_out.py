"""Tasks whose answers are long because every step of the work is written out, and can be checked.

A completion is a row of steps, each ended by a semicolon, and then the answer: `STEP;STEP;ANSWER`.
The right steps follow from the prompt alone, so they are computed again for each score and for each
worked answer. `multiplication.py` and `program.py` say what a step is. Their steps need only what
is near, so that a small model learns them from nothing in minutes; a completion is right only where
all of hundreds of them are.

Problem i of a split is drawn from a generator that the seed, the split and i fix. A problem that
was drawn before is left out, and the test split is drawn first, so no training problem is ever
held out.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jetrl.errors import UserError
from jetrl.tasks.base import Task
from jetrl.tasks.chosen_prompts import only_these
from jetrl.types import Prompt, Score

REWARDS = ("answer", "steps")


@dataclass(frozen=True)
class Slip:
    """A wrong digit that a careless teacher writes, and that all later digits are computed from.

    Attributes:
        choice: A random number from 0 up to 1, which says what in the step is wrong.
        shift: A number from 1 to 9 that is added to the right digit, modulo 10.
    """

    step: int
    choice: float
    shift: int


class WrittenOut(Task):
    """A task that asks for every step of the work and then the answer, `STEP;STEP;ANSWER`.

    A subclass has `draw`, which makes a prompt, and `solve`, which writes its steps. The reward is
    1 for the right answer, whatever the steps, or with `reward="steps"` the share of steps that are
    right, the answer being the last of them. Both are named parts of the score, `answer` and
    `steps`. A step is right where it is the worked answer's step at that place.

    Args:
        num_problems: The number of different problems that `draw` can make.
        mistakes: The share of worked answers with one wrong digit, drawn again for every call: a
            careless teacher, whose pupil learns the work and to err as often, which reinforcement
            then mends.
        reward: "answer", or "steps" for the share of right steps.
        only: A file of JSON lines with an `id` each: the training prompts of these ids are used
            alone, in their usual order. Unset: all.

    Raises:
        UserError: An option is out of its range.
    """

    stop = ("\n",)

    def __init__(
        self,
        num_steps: int,
        num_problems: int,
        size: int,
        test_size: int,
        seed: int,
        mistakes: float,
        reward: str,
        only: str | None,
    ) -> None:
        check_options(
            [
                (_is_count(size), f"size = {size!r}: give a number of prompts, from 1"),
                (_is_count(test_size), f"test_size = {test_size!r}: give a number of prompts"),
                (type(seed) is int, f"seed = {seed!r}: give an integer"),
                (
                    isinstance(mistakes, float | int) and 0 <= mistakes <= 1,
                    f"mistakes = {mistakes!r}: give a share, 0 to 1",
                ),
                (reward in REWARDS, f"reward = {reward!r}: give one of {', '.join(REWARDS)}"),
                (
                    only is None or isinstance(only, str),
                    f"only = {only!r}: give the name of a file",
                ),
            ]
        )
        if 2 * (size + test_size) > num_problems:
            raise UserError(
                f"task.options.size = {size} and test_size = {test_size}: there are {num_problems} "
                "problems of this kind, and at most half of them are drawn; take fewer, or make "
                "the problems larger"
            )
        self.num_steps = num_steps
        self.size = size
        self.test_size = test_size
        self.seed = seed
        self.mistakes = mistakes
        self.reward = reward
        self.only = only
        self._teacher = random.Random(seed)

    def draw(self, source: random.Random) -> str:
        """Return the text of a prompt, drawn from a generator."""
        raise NotImplementedError(f"{type(self).__name__} has no draw(source)")

    def solve(self, text: str, slip: Slip | None = None) -> list[str]:
        """Return the steps of a prompt without their semicolons, and last the answer.

        Args:
            slip: The digit that is written wrongly; None for the right work.
        """
        raise NotImplementedError(f"{type(self).__name__} has no solve(text)")

    def prompts(self, split: str) -> Iterable[Prompt]:
        """Return the prompts of a split, whose ids are their texts.

        Raises:
            UserError: The file of `only` does not read, or names a prompt that is not there.
        """
        self.check_split(split)
        drawn: set[str] = set()
        test = self._draw("test", self.test_size, drawn)
        texts = test if split == "test" else self._draw("train", self.size, drawn)
        if split == "train" and self.only is not None:
            texts = only_these(texts, Path(self.only), self.label)
        return [Prompt(id=text, text=text, answer=self.solve(text)[-1]) for text in texts]

    def _draw(self, split: str, count: int, drawn: set[str]) -> list[str]:
        """Return the texts of a split's prompts, and add them to those already drawn."""
        texts: list[str] = []
        number = 0
        while len(texts) < count:
            text = self.draw(random.Random(f"{self.seed} {split} {number}"))
            number += 1
            if text not in drawn:
                drawn.add(text)
                texts.append(text)
        return texts

    def score(self, prompt: Prompt, completion: str) -> Score:
        right_steps = self.solve(prompt.text or "")
        *steps, answer = completion.strip(" ").split(";")
        num_right = sum(map(str.__eq__, steps, right_steps[:-1]))  # up to the shorter of both
        answered = float(answer == prompt.answer)
        share = (num_right + answered) / len(right_steps)
        return Score(
            answered if self.reward == "answer" else share, {"answer": answered, "steps": share}
        )

    def demonstration(self, prompt: Prompt) -> str:
        slip, teacher = None, self._teacher
        if teacher.random() < self.mistakes:
            slip = Slip(
                teacher.randrange(self.num_steps), teacher.random(), teacher.randrange(1, 10)
            )
        return ";".join(self.solve(prompt.text or "", slip))

    def vote(self, prompt: Prompt, completion: str) -> str | None:
        """Return the answer of a completion, for the majority of several."""
        return completion.strip(" ").rsplit(";", 1)[-1] or None

    def self_test(self) -> list[tuple[Prompt, str, float | None]]:
        text = self.draw(random.Random(f"{self.seed} self-test"))
        right_steps = self.solve(text)
        prompt = Prompt(id=text, text=text, answer=right_steps[-1])
        wrong = self.solve(text, Slip(0, 0.0, 1))
        right = ";".join(right_steps)
        return [(prompt, right, 1.0), (prompt, "", 0.0), (prompt, ";".join(wrong), None)]


def check_options(checks: Sequence[tuple[object, str]]) -> None:
    """Raise `UserError` with the message of the first condition that does not hold.

    Args:
        checks: Pairs of a condition and what is wrong with the option where it does not hold.
    """
    for holds, message in checks:
        if not holds:
            raise UserError(f"task.options.{message}")


def is_in(value: object, low: int, high: int) -> bool:
    """Return whether a value is an integer within bounds."""
    return type(value) is int and low <= value <= high


def _is_count(value: object) -> bool:
    return is_in(value, 1, 10**7)
