r"""Comparing the values of two answers by math-verify, with checks where it says yes too easily.

math-verify compares numbers by 6 decimals, and equations by the solutions that it finds. So it
takes any two tiny numbers for equal, and any two equations without a solution. Here its "yes" is
taken back where

- two numbers differ by more than a thousandth of the larger one: 1.6e-19 is not 9.1e-31;
- two equations differ in their sides and have no solution by which to compare them: `f(2) = 3` is
  not `f(2) = 4`.

Inequalities and intervals are compared as sets of numbers: `1 < x \le 2` is `(1, 2]`. math-verify's
own time limits are switched off: they use signals, which give wrong answers in threads; the
scorer's processes have limits. Its random tests of expressions begin at the same seed each time.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import re
from types import ModuleType
from typing import Any

from jetrl.tasks.number_text import NUMBER

# It warns that its time limits are off, once a process; that is what the scorer is for.
logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_LENGTH = 200  # characters of an answer; a longer one is not an answer
MAX_DEPTH = 8  # brackets in brackets of an answer that is read as it is
RELATIVE = 1e-3  # the most by which numbers that agree to 6 decimals may differ
_BASE = re.compile(r"^[0-9A-Fa-f.]+_\{?([0-9]+)\}?$")  # 2516_8
_CLOSING = {"(": ")", "{": "}"}
_DIGITS = 30  # of the numbers of an expression
# What sympy raises where it cannot do something.
_NOT_POSSIBLE = (TypeError, ValueError, AttributeError, NotImplementedError, ArithmeticError)


@functools.cache
def load_math_verify() -> ModuleType:
    """Import math-verify, which takes half a second, outside of the first score's limits."""
    return importlib.import_module("math_verify")


@functools.cache
def _sympy() -> ModuleType:
    return importlib.import_module("sympy")


@functools.cache
def _latex_config() -> Any:
    """Return the settings with which math-verify removes no unit: a variable may look like one."""
    config = load_math_verify().LatexExtractionConfig()
    normalization = dataclasses.replace(config.normalization_config, units=False)
    return dataclasses.replace(config, normalization_config=normalization)


def same_value(gold: str, answer: str) -> bool:
    """Return whether two answers have the same value."""
    if not gold or not answer or len(answer) > MAX_LENGTH:
        return False
    if len({base[1] for text in (gold, answer) if (base := _BASE.search(text))}) > 1:
        return False
    sympy = _sympy()
    sympy.core.random.seed(0)
    golds, answers = (
        _parse(without_doubled_brackets(gold)),
        _parse(without_doubled_brackets(answer)),
    )
    if not _verify(golds, answers):
        return bool(golds and answers) and _same_region(golds[0], answers[0])
    if gold == answer or not (len(golds) == len(answers) == 2):
        return True
    return not _differ(golds[0], answers[0])


def without_doubled_brackets(text: str) -> str:
    """Return a deeply nested answer with one bracket in place of brackets right around brackets.

    The time that LaTeX takes to be read grows several times over with each bracket in a bracket.
    Answers of up to MAX_DEPTH are returned as they are.
    """
    plain = text.replace(r"\left", "").replace(r"\right", "")
    closing_of: dict[int, int] = {}
    open_at: list[int] = []
    deepest = 0
    for position, character in enumerate(plain):
        if character in _CLOSING:
            open_at.append(position)
            deepest = max(deepest, len(open_at))
        elif open_at and character == _CLOSING[plain[open_at[-1]]]:
            closing_of[open_at.pop()] = position
    if deepest <= MAX_DEPTH:
        return text
    doubled = {
        position
        for start, end in closing_of.items()
        if plain[start + 1] == plain[start] and closing_of.get(start + 1) == end - 1
        for position in (start, end)
    }
    return "".join(c for position, c in enumerate(plain) if position not in doubled)


def _verify(golds: list[Any], answers: list[Any]) -> bool:
    verify = load_math_verify().verify
    return bool(verify(golds, answers, allow_set_relation_comp=True, timeout_seconds=None))


def _parse(answer: str) -> list[Any]:
    """Return what math-verify reads in an answer: [the expression, its text], or less."""
    math_verify = load_math_verify()
    config = math_verify.ExprExtractionConfig()
    if not NUMBER.fullmatch(answer):
        config, answer = _latex_config(), f"${answer}$"
    parsed = list(math_verify.parse(answer, extraction_config=[config], parsing_timeout=None))
    return [_named_functions(_as_numbers(parsed[0])), *parsed[1:]] if parsed else parsed


def _named_functions(expression: Any) -> Any:
    """Return an expression with a symbol for each value of an unknown function, such as f(2)."""
    sympy = _sympy()
    if not isinstance(expression, sympy.Basic):
        return expression
    unknown = sympy.core.function.AppliedUndef
    if not isinstance(expression, sympy.Eq) or not isinstance(expression.lhs, unknown):
        return expression
    if expression.lhs.free_symbols:  # f(x) = x + 1
        return expression
    return sympy.Eq(sympy.Symbol(str(expression.lhs)), expression.rhs, evaluate=False)


def _as_numbers(expression: Any) -> Any:
    r"""Return the set of numbers that a membership or several inequalities describe.

    `x \in [1, 2]` and `x < 1, x > 2` are such; every other expression is returned as it is.
    """
    sympy = _sympy()
    if isinstance(expression, sympy.Eq) and isinstance(expression.rhs, sympy.Set):
        return expression.rhs
    inequality = (sympy.StrictLessThan, sympy.LessThan, sympy.StrictGreaterThan, sympy.GreaterThan)
    parts = expression.args if isinstance(expression, sympy.Set) else ()
    if not parts or not all(isinstance(part, inequality) for part in parts):
        return expression
    try:
        return sympy.Union(*[part.as_set() for part in parts])
    except _NOT_POSSIBLE:
        return expression


def _same_region(gold: Any, answer: Any) -> bool:
    """Return whether two inequalities of one variable hold for the same numbers: 2 > x, x < 2."""
    sympy = _sympy()
    order = (sympy.StrictLessThan, sympy.LessThan, sympy.StrictGreaterThan, sympy.GreaterThan)
    relation = (sympy.And, *order)
    if not isinstance(gold, relation) or not isinstance(answer, relation):
        return False
    if gold.free_symbols != answer.free_symbols or len(gold.free_symbols) != 1:
        return False
    try:
        return bool(gold.as_set() == answer.as_set())
    except _NOT_POSSIBLE:
        return False


def _differ(gold: Any, answer: Any) -> bool:
    """Return whether two expressions differ that math-verify takes for equal."""
    sympy = _sympy()
    ordered = (sympy.Tuple, sympy.MatrixBase, sympy.FiniteSet)
    if isinstance(gold, ordered) and isinstance(answer, ordered):
        pairs = zip(_parts(gold), _parts(answer), strict=False)
        return any(_differ(one, other) for one, other in pairs)
    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq):
        return _equations_differ(gold, answer)
    one, other = _number(gold), _number(answer)
    if one is None or other is None:
        return False
    return bool(abs(one - other) > RELATIVE * max(abs(one), abs(other)))


def _parts(collection: Any) -> list[Any]:
    """Return the members of a tuple, a matrix or a finite set; those of a set by their value."""
    sympy = _sympy()
    if isinstance(collection, sympy.MatrixBase):
        return list(collection.flat())
    if isinstance(collection, sympy.Tuple):
        return list(collection.args)
    numbers = [(_number(part), part) for part in collection.args]
    if any(number is None or not number.is_real for number, _ in numbers):
        return []
    return [part for _, part in sorted(numbers, key=lambda pair: pair[0])]


def _number(expression: Any) -> Any:
    """Return the value of an expression without variables; None where it has none."""
    sympy = _sympy()
    if isinstance(expression, sympy.Eq):
        expression = expression.rhs
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return None
    try:
        value = expression.doit().evalf(_DIGITS)
    except _NOT_POSSIBLE:
        return None
    return value if value.is_number and value.is_finite and value.is_comparable else None


def _equations_differ(gold: Any, answer: Any) -> bool:
    """Return whether two equations differ, where no solution tells them apart."""
    sympy = _sympy()
    try:
        solved = sympy.solve(gold, *gold.free_symbols) if gold.free_symbols else []
        if solved:
            return False
        ratio = sympy.simplify((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs))
        return not (ratio.is_number and ratio.is_nonzero)
    except _NOT_POSSIBLE:
        return False
