"""A program of assignments in a loop, to be traced line by line.

The prompt `02*a3b7c1:a+b,b-c,c+5=` gives the number of rounds, the first values of the variables,
and one assignment for each of them: `a+b` adds b to a, `b-c` takes c from b, `c+5` adds 5 to c. All
is modulo 10. A step writes an assignment, its numbers and the new value; the first step of a round
begins with the rounds that are left:

    02)a+b:3+7=0;b-c:7-1=6;c+5:1+5=6;01)a+b:0+6=6;b-c:6-6=0;c+5:6+5=1;601

The answer is the last value of each variable. Each assignment can be undone, so one wrong value
always makes the answer wrong, however much later it comes.

With three variables a worked answer has 33 characters a round and 3 more: 69 with 2 rounds, 498
with 15, 2,049 with 62.
"""

from __future__ import annotations

import random

from jetrl.tasks.written_out import Slip, WrittenOut, check_options, is_in

LETTERS = "abcdef"
MOST_ROUNDS = 99


class Program(WrittenOut):
    """Programs that change each variable once a round, traced to the last value.

    Args:
        rounds: Rounds of the loop, 1 to 99: the difficulty and the length of an answer.
        variables: The number of variables, and so of assignments a round, 2 to 6.
        mistakes: The share of worked answers with one wrong value.
        reward: "answer", or "steps" for the share of right steps.
        only: A file of JSON lines with the ids of the training prompts that are used.

    Raises:
        UserError: An option is out of its range.
    """

    name = "program"

    def __init__(
        self,
        rounds: int = 2,
        variables: int = 3,
        size: int = 10_000,
        test_size: int = 500,
        seed: int = 0,
        mistakes: float = 0.0,
        reward: str = "answer",
        only: str | None = None,
    ) -> None:
        most = len(LETTERS)
        check_options(
            [
                (is_in(rounds, 1, MOST_ROUNDS), f"rounds = {rounds!r}: give 1 to {MOST_ROUNDS}"),
                (is_in(variables, 2, most), f"variables = {variables!r}: give 2 to {most}"),
            ]
        )
        # A first value, a sign, and another variable or a digit from 1 to 9, for each variable.
        num_problems = (10 * 2 * (variables - 1 + 9)) ** variables
        super().__init__(
            rounds * variables, num_problems, size, test_size, seed, mistakes, reward, only
        )
        self.rounds = rounds
        self.letters = LETTERS[:variables]
        self.alphabet = f"0123456789{self.letters}+-*:,;=)"
        self.reading = (
            "a+b adds b to a, modulo 10; the number before ) is that of the rounds left, and the "
            "answer after the last ; is the last value of each variable"
        )

    def draw(self, source: random.Random) -> str:
        first = "".join(f"{letter}{source.randrange(10)}" for letter in self.letters)
        body = ",".join(
            f"{letter}{source.choice('+-')}{source.choice(self._operands(letter))}"
            for letter in self.letters
        )
        return f"{self.rounds:02d}*{first}:{body}="

    def _operands(self, letter: str) -> str:
        """Return what an assignment to a variable may add or take: never itself, never 0."""
        return self.letters.replace(letter, "") + "123456789"

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
