r"""Reading the answer that a text gives, and comparing it with the right one.

The answer of a completion is, in this order of precedence:

1. the last of its marked answers, be it `#### 18` or `\boxed{18}`;
2. where nothing is marked (and not `strict`), the last number of the text.

`####` marks an answer where a number follows on its line, `$` and bold aside; so a heading such as
`#### Step 2` is none. A marked answer that has no value is wrong; nothing else is tried for it.
Currency signs, thousands separators and units are ignored: `$1,200.00 dollars` is 1200. A variable
is no unit: `18x` is not 18. `1/2`, `2 1/3`, `-3`, `.5`, `2.50` and `1.6 \times 10^{-19}` are
numbers (number_text.py). Of an equation in a box the right hand side counts, and of a line such as
`#### 6 * 3 = 18` what follows the last equals sign. A box with more than a number in it
(`\frac{36}{2}`, `9+9`) is LaTeX for math-verify. Where the right answer is no number but LaTeX
(`3x`, `\text{Evelyn}`), the box as it was written may be it as well.

A percentage is written in many ways: `50%`, `50 percent`, `50` and `0.5` are the same answer where
the right one is `50%`. Where the right one has no percent sign, `50%` is 50, or else 0.5.

Whether two answers are the same value is decided in equality.py.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from jetrl.tasks.equality import MAX_LENGTH, same_value
from jetrl.tasks.number_text import (
    NUMBER,
    is_expression,
    percent_follows,
    plain_number,
    read_number,
    term_end,
    without_percent,
)

_MARKER = re.compile(r"####[ \t*_]*(?=[-+$.0-9])")
_WORDS = re.compile(
    r"\\(?:text|mathrm|textbf|mbox|operatorname)\s*\{([^{}]*)\}(?:\^(?:[0-9]|\{-?[0-9]\}))?"
)
_SPACE = re.compile(r"(?<!\\)\\ ")  # not the end of a matrix's row
_NOISE = (
    ("\\$", "$"), ("\\%", "%"), ("{,}", ","), (",\\! ", ","), ("\\!", ""), ("\\,", ""),
    ("\\;", ""), ("~", " "), ("\u2212", "-"), ("\u2013", "-"), ("\u20ac", "$"), ("\u00a3", "$"),
    ("\u00a5", "$"), ("\u20b9", "$"), ("\u00a0", " "), ("\u00b0", ""),
)  # fmt: skip


_SUPERSCRIPTS = str.maketrans(
    "\u207b\u207a\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", "-+0123456789"
)
_TEN_TO = re.compile("10([\u207b\u207a]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+)")
# `#### 6 * 3 = 18`: nothing but numbers and operators before the last equals sign.
_EQUATION = re.compile(r"[-+*/\u00d7\u00f7().,$0-9 =]*=[ ]*(?=[-$.0-9])")
_EQUALS = re.compile(r"(?<![<>!])=")
_ORDER = re.compile(r"[<>\u2264\u2265]|\\(?:leq?|geq?|lt|gt|neq?|in|notin)(?![a-z])")


@dataclass(frozen=True)
class Answer:
    """The answer that a text gives.

    Attributes:
        text: A plain number such as `-1200.5` or `1/2`, or else LaTeX.
        marked: Whether the text marks it as the answer.
        box: The content of the box that marks it; "" where none does.
        percent: Whether a percent sign or word follows it.
    """

    text: str
    marked: bool
    box: str = ""
    percent: bool = False


def final_answer(text: str, strict: bool = False) -> Answer | None:
    """Return the answer that a completion gives; None where it gives none."""
    text = _clean(text)
    box = text.rfind("\\boxed{")
    markers = list(_MARKER.finditer(text))
    if markers and markers[-1].start() > box:
        return _of_line(text[markers[-1].end() :].split("\n", 1)[0])
    if box >= 0:
        held = _held(text, box + len("\\boxed{"))
        content, percent = without_percent(held)
        return Answer(_value(content), marked=True, box=held, percent=percent)
    if strict:
        return None
    last = deque(NUMBER.finditer(text), maxlen=1)
    return _with_what_follows(text, last[0], marked=False) if last else None


def gold_answer(text: str) -> str:
    """Return the answer that a data set's text gives: its marked answer, else the whole text.

    A number is given as a plain number, a percentage as one with a percent sign, anything else as
    LaTeX.
    """
    marked = final_answer(text, strict=True)
    if marked is not None:
        if NUMBER.fullmatch(marked.text):
            return f"{marked.text}%" if marked.percent else marked.text
        return marked.box or marked.text
    cleaned, percent = without_percent(_clean(text).strip().rstrip(" .").strip("$"))
    if not NUMBER.fullmatch(cleaned):
        return cleaned + "%" * percent
    return plain_number(cleaned) + "%" * percent


def answer_key(completion: str, strict: bool = False) -> str | None:
    """Return a completion's answer in one form for equal numbers; None where it gives none.

    Args:
        completion: The completion.
        strict: Whether only a marked answer counts.
    """
    answer = final_answer(completion, strict)
    if answer is None or not answer.text:
        return None
    if not NUMBER.fullmatch(answer.text):
        return re.sub(r"\s+", "", answer.text)
    above, _, below = answer.text.partition("/")
    value, divisor = Decimal(above), Decimal(below or 1)
    return str(Fraction(value) / Fraction(divisor)) if divisor else None


def is_right(gold: str, answer: Answer) -> bool:
    """Return whether an answer has the value of `gold`, which `gold_answer` made."""
    number, percent = without_percent(gold)
    if NUMBER.fullmatch(number):
        forms = [answer.text]
    else:
        forms = list(dict.fromkeys((answer.box, answer.text)))
    if any(same_value(number, form) for form in forms):
        return True
    if percent and not answer.percent:
        return same_value(_hundredth(number), answer.text)
    if answer.percent and not percent:
        return same_value(number, _hundredth(answer.text))
    return False


def _hundredth(number: str) -> str:
    """Return the hundredth of a number, as a plain number or LaTeX."""
    if NUMBER.fullmatch(number) and "/" not in number:
        return format(Decimal(number) / 100, "f")
    return f"\\frac{{{number}}}{{100}}"


def find_number(text: str) -> str | None:
    """Return the first number of a text, as a plain number; None where it has none."""
    match = NUMBER.search(_clean(text))
    return None if match is None else plain_number(match.group())


def _of_line(line: str) -> Answer:
    """Return the answer that a line behind `####` gives."""
    equation = _EQUATION.match(line)
    line = line[equation.end() :] if equation else line
    number = NUMBER.search(line)
    if number is None:
        return Answer("", marked=True)
    if number.start() == 0 and is_expression(line, number.end()):
        return Answer(line.strip(" $*._"), marked=True)
    return _with_what_follows(line, number, marked=True)


def _with_what_follows(text: str, number: re.Match[str], marked: bool) -> Answer:
    """Return the answer that a number in a text is, with the variable or percent sign behind it."""
    end = term_end(text, number.end())
    if end is not None:
        return Answer(text[number.start() : end].strip(" $"), marked)
    percent = percent_follows(text, number.end())
    return Answer(plain_number(number.group()), marked, percent=percent)


def _clean(text: str) -> str:
    for written, meant in _NOISE:
        text = text.replace(written, meant)
    text = _TEN_TO.sub(lambda m: f"10^{{{m[1].translate(_SUPERSCRIPTS)}}}", text)
    return _SPACE.sub(" ", text)


def _held(text: str, start: int) -> str:
    """Return the text between a box's braces; nothing where they do not close soon."""
    depth = 1
    for end in range(start, min(len(text), start + 2 * MAX_LENGTH)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end].strip()
    return ""


def _value(held: str) -> str:
    """Return a box's content without units, as a plain number where possible.

    Words with a number in them are no unit.
    """
    content = _WORDS.sub(lambda m: m[1] if re.search("[0-9]", m[1]) else "", held)
    if not _ORDER.search(content):
        content = _EQUALS.split(content)[-1]
    content = content.strip().rstrip(" .%")
    return read_number(content) or content
