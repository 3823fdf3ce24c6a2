r"""Which number a text gives for its answer, and whether it is the right one.

The answer of a completion is, in this order of precedence:

1. the last of its marked answers, be it `#### 18` or `\boxed{18}`;
2. where nothing is marked (and not `strict`), the last number of the text.

`####` marks an answer where a number follows on its line, `$` and bold aside; so a heading such as
`#### Step 2` is none. A marked answer that has no value is wrong; nothing else is tried for it.
Currency signs, thousands separators, percent signs and units are ignored: `$1,200.00 dollars` is
1200 and `50%` is 50. `1/2`, `-3`, `.5` and `2.50` are numbers. Of an equation in a box the right
hand side counts. A box with more than a number in it (`\frac{36}{2}`, `9+9`) is LaTeX for
math-verify.

Whether two answers are the same value is math-verify's decision. Its own time limits are switched
off: they use signals, which give wrong answers in threads; the scorer's processes have limits.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# It warns that its time limits are off, once a process; that is what the scorer is for.
logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_LENGTH = 200  # characters of an answer; a longer one is not an answer
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
# A sign belongs to a number unless it stands between two operands, as in 10-5 and x-5.
_NUMBER = re.compile(
    rf"(?:(?<![\w).%])-[ ]?)?\$?[ ]?(?:(?<=\$)-)?{_DECIMAL}(?:[ ]?/[ ]?{_DECIMAL})?"
)
_MARKER = re.compile(r"####[ \t*_]*(?=[-+$.0-9])")
_UNITS = re.compile(r"\\(?:text|mathrm|textbf|mbox|operatorname)\s*\{[^{}]*\}")
_NOISE = (
    ("\\$", "$"), ("\\%", "%"), ("{,}", ","), ("\\!", ""), ("\\,", ""), ("\\;", ""),
    ("\u2212", "-"), ("\u2013", "-"), ("\u20ac", "$"), ("\u00a3", "$"), ("\u00a0", " "),
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """An answer found in a text: a plain number such as `-1200.5` or `1/2`, or else LaTeX; and
    whether it was marked as the answer."""

    text: str
    marked: bool


def final_answer(text: str, strict: bool = False) -> Answer | None:
    """The answer that a completion gives; None where it gives none."""
    text = _clean(text)
    box = text.rfind("\\boxed{")
    markers = list(_MARKER.finditer(text))
    if markers and markers[-1].start() > box:
        line = text[markers[-1].end() :].split("\n", 1)[0]
        return Answer(_first_number(line) or "", marked=True)
    if box >= 0:
        return Answer(_boxed(text, box + len("\\boxed{")), marked=True)
    if strict:
        return None
    numbers = _NUMBER.findall(text)
    return Answer(_plain(numbers[-1]), marked=False) if numbers else None


def gold_answer(text: str) -> str:
    """The answer that a data set gives: what it marks, else the whole of it, as a plain number
    where it is one and as LaTeX where it is not."""
    marked = final_answer(text, strict=True)
    if marked is not None:
        return marked.text
    cleaned = _clean(text).strip(" .")
    return _plain(cleaned) if _NUMBER.fullmatch(cleaned) else cleaned.strip("$")


def find_number(text: str) -> str | None:
    """The first number of a text, as a plain number; None where it has none."""
    return _first_number(_clean(text))


def same_value(gold: str, answer: str) -> bool:
    """Whether two answers have the same value, by math-verify (to 6 decimals)."""
    if not gold or not answer or len(answer) > MAX_LENGTH:
        return False
    return bool(verify(_parse(gold), _parse(answer), timeout_seconds=None))


def _parse(answer: str) -> list[object]:
    if _NUMBER.fullmatch(answer):
        found = parse(answer, extraction_config=[ExprExtractionConfig()], parsing_timeout=None)
    else:
        found = parse(
            f"${answer}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None
        )
    return list(found)


def _clean(text: str) -> str:
    for written, meant in _NOISE:
        text = text.replace(written, meant)
    return text


def _first_number(text: str) -> str | None:
    match = _NUMBER.search(text)
    return None if match is None else _plain(match.group())


def _plain(number: str) -> str:
    for character in "$, ":
        number = number.replace(character, "")
    return number


def _boxed(text: str, start: int) -> str:
    """What stands between a box's braces, as a plain number where it is one."""
    depth = 1
    for end in range(start, min(len(text), start + 2 * MAX_LENGTH)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            break
    else:
        return ""
    content = _UNITS.sub("", text[start:end]).rpartition("=")[2].strip(" .%")
    number = re.fullmatch(rf"({_NUMBER.pattern})[ %]*[A-Za-z ]*", content)
    return _plain(number.group(1)) if number else content
