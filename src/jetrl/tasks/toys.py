"""Synthetic tasks: sums, long multiplication, traced programs."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from jetrl.errors import UserError
from jetrl.settings.section import Positive, Share
from jetrl.tasks.base import HeldOutShare, Task
from jetrl.tasks.rows import file_rows
from jetrl.types import Prompt, Score

OPERATORS = "+-"
LETTERS = "abcdef"

Digits = Annotated[int, Field(ge=2, le=40)]
Rounds = Annotated[int, Field(ge=1, le=99)]
Variables = Annotated[int, Field(ge=2, le=len(LETTERS))]
NumPrompts = Annotated[int, Field(ge=1, le=10**7)]


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
        what = f"no training prompt {unknown[0]!r} ({len(unknown)} such)"
        raise UserError(f"{file}: {what}; were these ids drawn with other options of task {label}?")
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
            what = f"{prompt.text}{answer} is right"
            why = f"since {answer} read from its end is {answer[::-1]}"
            self.reading = f"answers are written backwards, lowest digit first: {what}, {why}"

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
        text = f"{left:0{width}d}{sign}{right:0{width}d}="
        answer = result[::-1] if self.reverse else result
        return Prompt(id=f"{left}{sign}{right}", text=text, answer=answer)

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


@dataclass(frozen=True)
class Slip:
    """A deliberate wrong digit, from which all later digits are computed.

    `choice`, in [0, 1), picks the digit of the step. `shift`, 1 to 9, is added to it modulo 10.
    """

    step: int
    choice: float
    shift: int


@dataclass(kw_only=True, eq=False)
class WrittenOut(MadeUp):
    """A task that asks for every step of the work and then the answer, `STEP;STEP;ANSWER`.

    A step needs only what is near, so a small model learns it from nothing in minutes; a completion
    is right only if all of hundreds of steps are. The reward is 1 for the right answer, or with
    `reward="steps"` the fraction of right steps, the answer being the last. Both are parts of the
    score. Problem i of a split follows from the seed, the split and i; the test split is drawn
    first, and training leaves its problems out.
    """

    size: NumPrompts = 10_000
    test_size: NumPrompts = 500
    reward: Literal["answer", "steps"] = "answer"

    def check_size(self, num_problems: int) -> None:
        """Raise `UserError` for more prompts than half of all problems of their kind."""
        if 2 * (self.size + self.test_size) > num_problems:
            asked = f"task.options.size = {self.size} and test_size = {self.test_size}"
            most = f"half of the {num_problems} problems of this kind"
            raise UserError(f"{asked} are more than {most}: take fewer, or larger problems")

    num_steps = 0  # steps per demonstration

    def draw(self, source: random.Random) -> str:
        """Draw the text of a prompt."""
        raise NotImplementedError(f"{type(self).__name__} has no draw(source)")

    def solve(self, text: str, slip: Slip | None = None) -> list[str]:
        """Return the steps of a prompt, the answer last."""
        raise NotImplementedError(f"{type(self).__name__} has no solve(text)")

    def made_up(self, split: str) -> list[Prompt]:
        drawn: set[str] = set()
        test = self._draw("test", self.test_size, drawn)
        texts = test if split == "test" else self._draw("train", self.size, drawn)
        return [Prompt(id=text, text=text, answer=self.solve(text)[-1]) for text in texts]

    def _draw(self, split: str, count: int, drawn: set[str]) -> list[str]:
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
        reward = answered if self.reward == "answer" else share
        return Score(reward, {"answer": answered, "steps": share})

    def demonstration(self, prompt: Prompt) -> str:
        slip, teacher = None, self._teacher
        if teacher.random() < self.mistakes:
            slip = Slip(
                teacher.randrange(self.num_steps), teacher.random(), teacher.randrange(1, 10)
            )
        return ";".join(self.solve(prompt.text or "", slip))

    def vote(self, prompt: Prompt, completion: str) -> str | None:
        return completion.strip(" ").rsplit(";", 1)[-1] or None

    def self_test(self) -> list[tuple[Prompt, str, float | None]]:
        text = self.draw(random.Random(f"{self.seed} self-test"))
        right_steps = self.solve(text)
        prompt = Prompt(id=text, text=text, answer=right_steps[-1])
        wrong = self.solve(text, Slip(0, 0.0, 1))
        right = ";".join(right_steps)
        return [(prompt, right, 1.0), (prompt, "", 0.0), (prompt, ";".join(wrong), None)]


@dataclass(kw_only=True, eq=False)
class Multiplication(WrittenOut):
    """Products of two numbers of `digits` digits, written out as a shift register does it.

    All numbers are written lowest digit first. The prompt `21*43=` asks for 12 x 34. A step
    multiplies the whole first factor by one digit of the second and adds what is left of the
    earlier sum:

        43,:208080104040;3,8:246001103040;,8040

    A step has a register, a colon, and six digits for each digit of the first factor. The register
    holds the digits of the second factor still to come, a comma, and the known digits of the
    product; each step takes one off its front and adds one to its end. The six digits: that digit
    of the first factor; the digit of the earlier sum to add; low and high digit of the product with
    the register's first digit; low digit and carry of the total. The answer is the last register
    and the digits of the last sum above it: `,8040`, 408. With n digits a worked answer has
    n(7n + 3) + 2n + 1 characters: 79 with 3, 489 with 8, 2,109 with 17.
    """

    name = "multiplication"
    alphabet = "0123456789*=,:;"
    digits: Digits = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_size(10 ** (2 * self.digits))
        self.num_steps = self.digits
        self.reading = (
            "numbers are written lowest digit first: 21*43= asks for 12 x 34, and its answer after "
            "the last ; is ,8040, which read from its end is 408"
        )

    def draw(self, source: random.Random) -> str:
        left, right = (f"{source.randrange(10**self.digits):0{self.digits}d}" for _ in range(2))
        return f"{left[::-1]}*{right[::-1]}="

    def solve(self, text: str, slip: Slip | None = None) -> list[str]:
        left, right = text.rstrip("=").split("*")
        sums = [0] * (len(left) + 1)  # digits of the sum so far, lowest first
        register, steps = f"{right},", []
        for step in range(len(right)):
            wrong_column = -1
            if slip is not None and slip.step == step:
                wrong_column = int(slip.choice * len(left))
            digit, carry, columns = int(register[0]), 0, []
            earlier, sums = sums[1:], []  # the lowest digit is in the register
            for column, (own, added) in enumerate(zip(left, earlier, strict=True)):
                high, low = divmod(int(own) * digit, 10)
                tens, ones = divmod(low + added + carry, 10)
                carry = high + tens
                if slip is not None and column == wrong_column:
                    ones = (ones + slip.shift) % 10
                columns.append(f"{own}{added}{low}{high}{ones}{carry}")
                sums.append(ones)
            sums.append(carry)
            steps.append(f"{register}:{''.join(columns)}")
            register = f"{register[1:]}{sums[0]}"
        return [*steps, register + "".join(map(str, sums[1:]))]


@dataclass(kw_only=True, eq=False)
class Program(WrittenOut):
    """Programs that change each variable once per round, traced to the last value, modulo 10.

    The prompt `02*a3b7c1:a+b,b-c,c+5=` gives the number of rounds, the first values, and one
    assignment per variable: `a+b` adds b to a. A step writes an assignment, its numbers and the new
    value; the first step of a round begins with the number of rounds left:

        02)a+b:3+7=0;b-c:7-1=6;c+5:1+5=6;01)a+b:0+6=6;b-c:6-6=0;c+5:6+5=1;601

    The answer is the last value of each variable. Assignments can be undone, so one wrong value
    makes the answer wrong. With three variables a worked answer has 33 characters per round and 3
    more: 69 with 2 rounds, 498 with 15, 2,049 with 62.
    """

    name = "program"
    rounds: Rounds = 2
    variables: Variables = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        # A first value, a sign, and another variable or a digit from 1 to 9, for each variable.
        self.check_size((10 * 2 * (self.variables - 1 + 9)) ** self.variables)
        self.num_steps = self.rounds * self.variables
        self.letters = LETTERS[: self.variables]
        self.alphabet = f"0123456789{self.letters}+-*:,;=)"
        self.reading = (
            "a+b adds b to a, modulo 10; the number before ) is that of the rounds left, and the "
            "answer after the last ; is the last value of each variable"
        )

    def draw(self, source: random.Random) -> str:
        first = "".join(f"{letter}{source.randrange(10)}" for letter in self.letters)
        # An assignment adds or subtracts never the variable itself, and never 0.
        others = {letter: self.letters.replace(letter, "") + "123456789" for letter in self.letters}
        terms = (f"{a}{source.choice('+-')}{source.choice(others[a])}" for a in self.letters)
        body = ",".join(terms)
        return f"{self.rounds:02d}*{first}:{body}="

    def solve(self, text: str, slip: Slip | None = None) -> list[str]:
        rounds, _, rest = text.rstrip("=").partition("*")
        first, _, body = rest.partition(":")
        values = {first[at]: int(first[at + 1]) for at in range(0, len(first), 2)}
        steps: list[str] = []
        for left in range(int(rounds), 0, -1):
            prefix = f"{left:02d})"
            for letter, sign, operand in map(tuple, body.split(",")):
                own = values[letter]
                other = values[operand] if operand in values else int(operand)
                value = (own + other if sign == "+" else own - other) % 10
                if slip is not None and slip.step == len(steps):
                    value = (value + slip.shift) % 10
                steps.append(f"{prefix}{letter}{sign}{operand}:{own}{sign}{other}={value}")
                values[letter], prefix = value, ""
        return [*steps, "".join(map(str, values.values()))]
