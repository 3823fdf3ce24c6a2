"""Sums of small integers, made up as they are needed: the task of the demo.

A prompt is `07+25=` and its answer `230`: operands padded with zeros to `digits`, and the result to
`digits + 1`, lowest digit first, which is the order in which carries are known. Both make it a
matter of minutes for a tiny model; `padded=False` and `reverse=False` give `7+25=` and `32`.

Every problem of the chosen size exists exactly once. A seeded shuffle puts them in order, the first
`test_share` of them are the test split and the others the training split, so no training problem
is ever held out, and both splits are the same for the same options.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable
from pathlib import Path

from jetrl.errors import UserError
from jetrl.tasks.base import Task
from jetrl.tasks.chosen_prompts import only_these
from jetrl.types import Prompt

OPERATORS = "+-"


class Arithmetic(Task):
    """Addition and subtraction (never below zero) of integers of up to `digits` digits.

    The reward is 1 for exactly the right digits (spaces around them are ignored) and 0 otherwise.

    Args:
        digits: Digits of an operand, 1 to 3 (3 makes a million sums).
        operators: The operators to use, out of `+-`.
        max_operand: Largest operand; default: the largest that has so many digits.
        reverse: Whether the result is written lowest digit first (`07+25=` is `230`).
        seed: Seed of the choice of held-out problems and of the order of the rest.
        mistakes: Share of the worked answers (`demonstration`) with one wrong digit, drawn again
            for every call: a careless teacher, whose pupil learns to add and to err as often, which
            reinforcement then mends.
        only: A file of JSON lines with an `id` each: the training prompts of these ids are used
            alone, in their usual order. Unset: all.
    """

    name = "arithmetic"
    stop = ("\n",)

    def __init__(
        self,
        digits: int = 2,
        operators: str = "+",
        max_operand: int | None = None,
        padded: bool = True,
        reverse: bool = True,
        seed: int = 0,
        test_share: float = 0.1,
        mistakes: float = 0.0,
        only: str | None = None,
    ) -> None:
        largest = 10**digits - 1 if isinstance(digits, int) and 1 <= digits <= 3 else 0
        top = largest if max_operand is None else max_operand
        checks = [
            (largest > 0, f"digits = {digits!r}: give 1, 2 or 3"),
            (
                isinstance(operators, str) and operators and set(operators) <= set(OPERATORS),
                f"operators = {operators!r}: give some of {OPERATORS!r}",
            ),
            (
                isinstance(top, int) and 1 <= top <= largest,
                f"max_operand = {max_operand!r}: give 1 to {largest} (what {digits} digits hold)",
            ),
            (
                isinstance(test_share, float) and 0 < test_share < 1,
                f"test_share = {test_share!r}: give a number between 0 and 1",
            ),
            (
                isinstance(mistakes, float | int) and 0 <= mistakes <= 1,
                f"mistakes = {mistakes!r}: give a share, 0 to 1",
            ),
            (isinstance(seed, int), f"seed = {seed!r}: give an integer"),
            (only is None or isinstance(only, str), f"only = {only!r}: give the name of a file"),
        ]
        for holds, message in checks:
            if not holds:
                raise UserError(f"task.options.{message}")
        self.digits = digits
        self.operators = "".join(sign for sign in OPERATORS if sign in operators)
        self.max_operand = top
        self.padded = padded
        self.reverse = reverse
        self.seed = seed
        self.test_share = test_share
        self.mistakes = mistakes
        self.only = only
        self._teacher = random.Random(seed)
        self.alphabet = "0123456789" + self.operators + "="
        if reverse:
            prompt = self._prompt(min(20, top), "+" if "+" in self.operators else "-", min(5, top))
            answer = prompt.answer or ""
            self.reading = (
                f"answers are written backwards, lowest digit first: {prompt.text}{answer} is "
                f"right, since {answer} read from its end is {answer[::-1]}"
            )

    def prompts(self, split: str) -> Iterable[Prompt]:
        """Return `Prompt(id="7+25", text="07+25=", answer="230")` for each problem of the split.

        Raises:
            UserError: The file of `only` does not read, or names a prompt that is not there.
        """
        self.check_split(split)
        problems = [
            (left, sign, right)
            for sign in self.operators
            for left in range(self.max_operand + 1)
            for right in range(self.max_operand + 1 if sign == "+" else left + 1)
        ]
        random.Random(self.seed).shuffle(problems)
        num_test = min(max(1, round(len(problems) * self.test_share)), len(problems) - 1)
        chosen = problems[:num_test] if split == "test" else problems[num_test:]
        prompts = {prompt.id: prompt for prompt in itertools.starmap(self._prompt, chosen)}
        if split == "train" and self.only is not None:
            return [prompts[one] for one in only_these([*prompts], Path(self.only), self.label)]
        return list(prompts.values())

    def _prompt(self, left: int, sign: str, right: int) -> Prompt:
        result = str(left + right if sign == "+" else left - right)
        width = self.digits if self.padded else 0
        if self.padded:
            result = result.zfill(self.digits + 1)
        return Prompt(
            id=f"{left}{sign}{right}",
            text=f"{left:0{width}d}{sign}{right:0{width}d}=",
            answer=result[::-1] if self.reverse else result,
        )

    def score(self, prompt: Prompt, completion: str) -> float:
        return float(completion.strip(" ") == prompt.answer)

    def readable(self, prompt: Prompt, completion: str) -> str:
        """Return a sum with its reversed answer as `20 + 5 = 25`, for `20+05=` and `520`."""
        asked = re.fullmatch(r"(\d+)([-+])(\d+)=", prompt.text or "")
        if not self.reverse or asked is None:
            return ""
        answer = completion.strip(" ")
        is_number = answer.isascii() and answer.isdigit()
        result = answer[::-1].lstrip("0") or "0" if is_number else "(no number)"
        return f"{int(asked[1])} {asked[2]} {int(asked[3])} = {result}"

    def demonstration(self, prompt: Prompt) -> str | None:
        answer, teacher = prompt.answer or "", self._teacher
        return answer if teacher.random() >= self.mistakes else self._wrong(answer)

    def preference(self, prompt: Prompt) -> tuple[str, str]:
        """Return the answer, and one with a wrong digit that is drawn again for every call."""
        answer = prompt.answer or ""
        return answer, self._wrong(answer)

    def _wrong(self, answer: str) -> str:
        index = self._teacher.randrange(len(answer))
        wrong = str((int(answer[index]) + self._teacher.randrange(1, 10)) % 10)
        return answer[:index] + wrong + answer[index + 1 :]

    def self_test(self) -> list[tuple[Prompt, str, float | None]]:
        prompt = self._prompt(1, self.operators[0], 1)
        return [(prompt, prompt.answer or "", 1.0), (prompt, "", 0.0), (prompt, "9" * 9, 0.0)]
