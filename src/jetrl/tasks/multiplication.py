"""Multiplication written out digit by digit, as a shift register does it.

All numbers are written lowest digit first, which is the order in which carries are known. The
prompt `21*43=` asks for 12 x 34. A step multiplies the whole first factor by one digit of the
second and adds what is left of the earlier sum:

    43,:208080104040;3,8:246001103040;,8040

A step has a register, a colon, and a column for each digit of the first factor. The register holds
the digits of the second factor that are still to come, a comma, and the digits of the product that
are known; each step takes one off its front and puts one on its end. A column is six digits: the
digit of the first factor; the digit of the earlier sum that is added; the low and the high digit of
the first factor's digit times the register's first; the low digit and the carry of all together. So
each digit follows from a few that stand a fixed number of characters before it. The answer is the
last register and the digits of the last sum above it: `,8040`, 408.

With n digits a worked answer has n(7n + 3) + 2n + 1 characters: 79 with 3, 489 with 8, 2,109 with
17.
"""

from __future__ import annotations

import random

from jetrl.tasks.written_out import Slip, WrittenOut, check_options, is_in

MOST_DIGITS = 40


class Multiplication(WrittenOut):
    """Products of two numbers of `digits` digits, worked out step by step.

    Args:
        digits: Digits of each factor, 2 to 40: the difficulty and the length of an answer.
        mistakes: The share of worked answers with one wrong digit.
        reward: "answer", or "steps" for the share of right steps.
        only: A file of JSON lines with the ids of the training prompts that are used.

    Raises:
        UserError: An option is out of its range.
    """

    name = "multiplication"
    alphabet = "0123456789*=,:;"

    def __init__(
        self,
        digits: int = 3,
        size: int = 10_000,
        test_size: int = 500,
        seed: int = 0,
        mistakes: float = 0.0,
        reward: str = "answer",
        only: str | None = None,
    ) -> None:
        check_options(
            [(is_in(digits, 2, MOST_DIGITS), f"digits = {digits!r}: give 2 to {MOST_DIGITS}")]
        )
        super().__init__(digits, 10 ** (2 * digits), size, test_size, seed, mistakes, reward, only)
        self.digits = digits
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
