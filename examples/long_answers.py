"""Two tasks with long answers of which each step can be checked: products, and traced programs.

    jetrl train demo model.config=benchmarks/study/models/5m.json \
      task=examples/long_answers.py:Program task.options.rounds=15 task.options.mistakes=0.6 \
      sft.until=0.34 rollout.max_tokens=520 run.name=program

You choose the length of an answer: tens to thousands of characters, each one token of
`model.tokenizer=characters`. A step needs only nearby digits, so a model of a few layers learns it
from random weights in hundreds of supervised updates; an answer is right only if all of its steps
are. Prompts are generated as needed, the same every time, and no test prompt is trained on.

Lengths in characters of `Multiplication` with `digits`, and of `Program` with `rounds`:

    about 64             about 512             about 2,048
    79: digits = 3       489: digits = 8       2,109: digits = 17
    69: rounds = 2       498: rounds = 15      2,049: rounds = 62

`rollout.max_tokens` needs room for one token more, the end of the sequence. With `mistakes`, a
model that has learned all steps is still right only as often as its demonstrations, so you choose
the accuracy at which supervised training ends.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from pydantic import Field

from jetrl.errors import UserError
from jetrl.settings.section import Share  # noqa: F401  (annotates `MadeUp.mistakes`)
from jetrl.tasks.base import check_values
from jetrl.tasks.toys import MadeUp
from jetrl.types import Prompt, Score

LETTERS = "abcdef"

Digits = Annotated[int, Field(ge=2, le=40)]
Rounds = Annotated[int, Field(ge=1, le=99)]
Variables = Annotated[int, Field(ge=2, le=len(LETTERS))]
NumPrompts = Annotated[int, Field(ge=1, le=10**7)]


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

    def __post_init__(self) -> None:
        check_values(type(self), {field.name: getattr(self, field.name) for field in fields(self)})
        super().__post_init__()

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
    and the digits of the last sum above it: `,8040`, 408. With n digits a demonstration has
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
    makes the answer wrong. With three variables a demonstration has 33 characters per round and 3
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
