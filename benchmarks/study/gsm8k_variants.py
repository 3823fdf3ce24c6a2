"""Variants of GSM8K's training questions with other numbers, for models that learn from little.

The worked answers name each calculation, `<<48/2=24>>`. A variant draws new numbers for those of
the question, does all calculations again, and writes the new values wherever the old ones stood, in
question and answer. It is dropped where a value would be negative, too large or broken where the
old one was whole, or where one old value would become two new ones. Numbers in words and usual
constants (2, 7, 12, 60, 100 ...) stay as they are. A question that names a number which its
answer uses in another sense gets a wrong variant now and then: this is for a warm-up, and
nothing is evaluated on it.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Mapping
from fractions import Fraction

NUMBER = re.compile(r"\d[\d,]*\.?\d*(?<![.,])|\.\d+")
CALCULATION = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
CONSTANTS = frozenset(map(Fraction, (0, 1, 2, 7, 12, 24, 30, 52, 60, 100, 365)))
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
LARGEST = 100_000
TRIES = 30

Row = dict[str, str]


def variant(row: Row, source: random.Random) -> Row | None:
    """Return a row of GSM8K with other numbers, or None where no draw fits.

    Args:
        row: A row with `question` and `answer`, as in GSM8K's files.
        source: The generator of the new numbers.
    """
    named = {value_of(text) for text in NUMBER.findall(row["question"])}
    free = sorted(value for value in named - CONSTANTS if value.denominator == 1)
    if not free or any(value > LARGEST for value in free):
        return None
    for _ in range(TRIES):
        values = {value: Fraction(_draw(int(value), source)) for value in free}
        worked = _worked_again(row["answer"], values)
        if worked is not None and any(values[value] != value for value in free):
            return {
                "question": _rewritten(row["question"], values),
                "answer": _rewritten(row["answer"], worked),
            }
    return None


def value_of(text: str) -> Fraction:
    """Return the value of a number as GSM8K writes it, such as `1,200` or `.5`."""
    return Fraction(text.replace(",", ""))


def _draw(value: int, source: random.Random) -> int:
    """Return a new number like an old one: near it, and a multiple of ten or five as it was."""
    for unit in (100, 50, 10, 5):
        if value >= 2 * unit and value % unit == 0:
            return unit * source.randint(1, 2 * value // unit)
    return source.randint(max(2, value // 2), max(9, 2 * value))


def _worked_again(
    answer: str, named: Mapping[Fraction, Fraction]
) -> dict[Fraction, Fraction] | None:
    """Return the new value of each old one after all calculations; None where there is none."""
    values = dict(named)
    try:
        calculations = [
            (expression, value_of(written.strip()))
            for expression, written in CALCULATION.findall(answer)
        ]
        for expression, old in calculations:
            new = calculated(expression, values)
            if calculated(expression, {}) != old or not _may_become(old, new, values):
                return None
            values[old] = new
        # A number is replaced wherever it stands, also before the calculation that gave it.
        if any(calculated(expression, values) != values[old] for expression, old in calculations):
            return None
    except (ValueError, SyntaxError, ZeroDivisionError):
        return None
    final = value_of(answer.rpartition("####")[2].strip())
    return values if final in values and values != dict(named) else None


def _may_become(old: Fraction, new: Fraction, values: Mapping[Fraction, Fraction]) -> bool:
    """Return whether a value can take another's place: the only one, in bounds, whole as it was."""
    hundredths = (100 * new).denominator == 1
    alike = (old.denominator == 1) == (new.denominator == 1)
    return values.get(old, new) == new and 0 <= new <= LARGEST and hundredths and alike


def calculated(expression: str, values: Mapping[Fraction, Fraction]) -> Fraction:
    """Return the value of a calculation, with some of its numbers replaced.

    Args:
        expression: Sums, products and quotients of numbers.
        values: The new value of each number that is replaced.

    Raises:
        ValueError, SyntaxError: The expression has something else in it.
        ZeroDivisionError: It divides by zero.
    """
    text = NUMBER.sub(lambda match: f"'{match.group()}'", expression.strip())
    return _evaluated(ast.parse(text, mode="eval").body, values)


def _evaluated(node: ast.expr, values: Mapping[Fraction, Fraction]) -> Fraction:
    """Return the value of a node of a parsed calculation."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        number = value_of(node.value)
        return values.get(number, number)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = (_evaluated(side, values) for side in (node.left, node.right))
        return Fraction(OPERATIONS[type(node.op)](left, right))
    raise ValueError("not a sum, product or quotient of numbers")


def _rewritten(text: str, values: Mapping[Fraction, Fraction]) -> str:
    """Return a text with new numbers in place of the old ones."""

    def new(match: re.Match[str]) -> str:
        old = value_of(match.group())
        return _shown(values[old]) if values.get(old, old) != old else match.group()

    return NUMBER.sub(new, text)


def _shown(value: Fraction) -> str:
    """Return a number as GSM8K writes it: whole, or with its hundredths."""
    return str(value) if value.denominator == 1 else f"{float(value):.2f}".rstrip("0")
