"""The task `arithmetic`: sums and differences of small integers, for the demo."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from jetrl.errors import UserError
from jetrl.settings.section import Positive, Share
from jetrl.tasks.base import HeldOutShare, Task
from jetrl.tasks.rows import file_rows
from jetrl.types import Prompt

OPERATORS = "+-"


def _only_these(prompts: Sequence[Prompt], file: Path, label: str) -> list[Prompt]:
    """Return the prompts whose `id` is in a file of JSON lines, in their own order."""
    chosen: set[str] = set()
    for row, where in file_rows(file):
        if not isinstance(row.get("id"), str):
            raise UserError(f'{where}: no object with an "id" that is a text')
        chosen.add(row["id"])
    if not chosen:
        raise UserError(f"{file}: no lines; each is an object with the id of a prompt")
    unknown = sorted(chosen.difference(prompt.id for prompt in prompts))
    if unknown:
        raise UserError(
            f"{file}: no training prompt {unknown[0]!r} ({len(unknown)} such); were these ids "
            f"drawn with other options of task {label}?"
        )
    return [prompt for prompt in prompts if prompt.id in chosen]


@dataclass(kw_only=True, eq=False)
class MadeUp(Task):
    """Seeded problems, with demonstrations that may contain deliberate mistakes.

    Args:
        mistakes: Fraction of demonstrations with one wrong digit, drawn anew per call, for
            reinforcement learning to correct.
        only: A file of JSON lines with an `id` each: train on only these prompts. Unset: all.
    """

    stop = ("\n",)
    seed: int = 0
    mistakes: Share = 0.0
    only: str | None = None

    def __post_init__(self) -> None:
        self._teacher = random.Random(self.seed)

    def made_up(self, split: str) -> list[Prompt]:
        """Return all prompts of a split."""
        raise NotImplementedError(f"{type(self).__name__} has no made_up(split)")

    def prompts(self, split: str) -> Iterable[Prompt]:
        self.check_split(split)
        prompts = self.made_up(split)
        if split == "train" and self.only is not None:
            return _only_these(prompts, Path(self.only), self.label)
        return prompts


@dataclass(kw_only=True, eq=False)
class Arithmetic(MadeUp):
    """Addition and subtraction (never below zero) of integers of up to `digits` digits: the demo.

    A prompt is `07+25=` and its answer `230`: operands padded with zeros to `digits`, and the
    result to `digits + 1`, lowest digit first, the order in which carries are known. A tiny model
    learns that in minutes; `padded=False` and `reverse=False` give `7+25=` and `32`. Each problem
    exists once, in a seeded order of which the first `test_share` are held out. The reward is 1 for
    exactly the right digits, apart from spaces around them, else 0.

    Args:
        digits: Digits of an operand; 3 makes a million sums.
        operators: Some of `+-`.
        max_operand: Default: the largest that has `digits` digits.
    """

    name = "arithmetic"
    digits: Annotated[int, Field(ge=1, le=3)] = 2
    operators: Annotated[str, Field(pattern="^[+-]+$")] = "+"
    max_operand: Positive | None = None
    padded: bool = True
    reverse: bool = True
    test_share: HeldOutShare = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        largest = 10**self.digits - 1
        self._top = top = self.max_operand or largest
        if top > largest:
            raise UserError(f"task.options.max_operand = {top}: give 1 to {largest}")
        self.operators = "".join(sign for sign in OPERATORS if sign in self.operators)
        self.alphabet = "0123456789" + self.operators + "="
        if self.reverse:
            prompt = self._prompt(min(20, top), "+" if "+" in self.operators else "-", min(5, top))
            answer = prompt.answer or ""
            self.reading = (
                f"answers are written backwards, lowest digit first: {prompt.text}{answer} is "
                f"right, since {answer} read from its end is {answer[::-1]}"
            )

    def made_up(self, split: str) -> list[Prompt]:
        """Return prompts such as `Prompt(id="7+25", text="07+25=", answer="230")`."""
        problems = [
            (left, sign, right)
            for sign in self.operators
            for left in range(self._top + 1)
            for right in range(self._top + 1 if sign == "+" else left + 1)
        ]
        random.Random(self.seed).shuffle(problems)
        num_test = min(max(1, round(len(problems) * self.test_share)), len(problems) - 1)
        chosen = problems[:num_test] if split == "test" else problems[num_test:]
        return list(itertools.starmap(self._prompt, chosen))

    def _prompt(self, left: int, sign: str, right: int) -> Prompt:
        result = str(left + right if sign == "+" else left - right)
        width = self.digits if self.padded else 0
        if self.padded:
            result = result.zfill(self.digits + 1)
        answer = result[::-1] if self.reverse else result
        return Prompt(
            id=f"{left}{sign}{right}",
            text=f"{left:0{width}d}{sign}{right:0{width}d}=",
            answer=answer,
        )

    def score(self, prompt: Prompt, completion: str) -> float:
        return float(completion.strip(" ") == prompt.answer)

    def readable(self, prompt: Prompt, completion: str) -> str:
        """Return `20 + 5 = 25` for `20+05=` and `520`."""
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
        """Return the answer, and one with a wrong digit, drawn again for each call."""
        answer = prompt.answer or ""
        return answer, self._wrong(answer)

    def _wrong(self, answer: str) -> str:
        index = self._teacher.randrange(len(answer))
        wrong = str((int(answer[index]) + self._teacher.randrange(1, 10)) % 10)
        return answer[:index] + wrong + answer[index + 1 :]

    def self_test(self) -> list[tuple[Prompt, str, float | None]]:
        prompt = self._prompt(1, self.operators[0], 1)
        return [(prompt, prompt.answer or "", 1.0), (prompt, "", 0.0), (prompt, "9" * 9, 0.0)]
