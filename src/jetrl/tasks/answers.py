r"""Reading the answer that a text gives, and comparing it with the right one.

The answer of a completion is, in this order of precedence:

1. the last of its marked answers, be it `#### 18` or `\boxed{18}`;
2. where nothing is marked (and not `strict`), the last number of the text.

`####` marks an answer where a number follows on its line, `$` and bold aside; so a heading such as
`#### Step 2` is none. A marked answer that has no value is wrong; nothing else is tried for it.
Currency signs, thousands separators, percent signs and units are ignored: `$1,200.00 dollars` is
1200 and `50%` is 50. `1/2`, `2 1/3`, `-3`, `.5` and `2.50` are numbers. Of an equation in a box the
right hand side counts. A box with more than a number in it (`\frac{36}{2}`, `9+9`) is LaTeX for
math-verify. Where the right answer is no number but LaTeX (`3x`, `\text{Evelyn}`), the box as it
was written may be it as well.

Whether two answers are the same value is math-verify's decision. Its own time limits are switched
off: they use signals, which give wrong answers in threads; the scorer's processes have limits.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
from dataclasses import dataclass
from decimal import Decimal
from types import ModuleType

# It warns that its time limits are off, once a process; that is what the scorer is for.
logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_LENGTH = 200  # characters of an answer; a longer one is not an answer
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_POWER = r"(?:[eE][-+]?[0-9]{1,2}(?![0-9A-Za-z]))"  # of ten, as in 1e6
_DECIMAL = rf"(?:(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+){_POWER}?)"
_MIXED = r"[0-9]{1,9}[ ][0-9]{1,9}/[0-9]{1,9}(?![0-9/]|[.,][0-9])"  # 2 1/3
# A sign belongs to a number unless it stands between two operands, as in 10-5 and x-5.
_NUMBER = re.compile(
    rf"(?:(?<![\w).%])-[ ]?)?\$?[ ]?(?:(?<=\$)-)?(?:{_MIXED}|{_DECIMAL}(?:[ ]?/[ ]?{_DECIMAL})?)"
)
_MARKER = re.compile(r"####[ \t*_]*(?=[-+$.0-9])")
_WORDS = re.compile(
    r"\\(?:text|mathrm|textbf|mbox|operatorname)\s*\{([^{}]*)\}(?:\^(?:[0-9]|\{-?[0-9]\}))?"
)
_UNITS = r"[ %]*(?:(?:[kcm]?m|ft|in)\^(?:[23]|\{[23]\})|(?:[A-Za-z][A-Za-z ./\u00b2\u00b3]*)?)"
_ONE_NUMBER = re.compile(rf"({_NUMBER.pattern}){_UNITS}")
_TERM = re.compile(rf"{_NUMBER.pattern}[A-Za-z]")  # 3x
_SPACE = re.compile(r"(?<!\\)\\ ")  # not the end of a matrix's row
_NOISE = (
    ("\\$", "$"), ("\\%", "%"), ("{,}", ","), (",\\! ", ","), ("\\!", ""), ("\\,", ""),
    ("\\;", ""), ("~", " "), ("\u2212", "-"), ("\u2013", "-"), ("\u20ac", "$"), ("\u00a3", "$"),
    ("\u00a5", "$"), ("\u20b9", "$"), ("\u00a0", " "), ("\u00b0", ""),
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """The answer that a text gives.

    Attributes:
        text: A plain number such as `-1200.5` or `1/2`, or else LaTeX.
        marked: Whether the text marks it as the answer.
        box: The content of the box that marks it; "" where none does.
    """

    text: str
    marked: bool
    box: str = ""


@functools.cache
def load_math_verify() -> ModuleType:
    """Import math-verify, which takes half a second, outside of the first score's limits."""
    return importlib.import_module("math_verify")


def final_answer(text: str, strict: bool = False) -> Answer | None:
    """Return the answer that a completion gives; None where it gives none."""
    text = _clean(text)
    box = text.rfind("\\boxed{")
    markers = list(_MARKER.finditer(text))
    if markers and markers[-1].start() > box:
        line = text[markers[-1].end() :].split("\n", 1)[0]
        return Answer(_first_number(line) or "", marked=True)
    if box >= 0:
        held = _held(text, box + len("\\boxed{"))
        return Answer(_value(held), marked=True, box=held)
    if strict:
        return None
    numbers = _NUMBER.findall(text)
    return Answer(_plain(numbers[-1]), marked=False) if numbers else None


def gold_answer(text: str) -> str:
    """Return the answer that a data set's text gives: its marked answer, else the whole text.

    A number is given as a plain number, anything else as LaTeX.
    """
    marked = final_answer(text, strict=True)
    if marked is not None:
        latex = not _NUMBER.fullmatch(marked.text) or _TERM.fullmatch(marked.box)
        return (latex and marked.box) or marked.text
    cleaned = _clean(text).strip().rstrip(" .")
    return _plain(cleaned) if _NUMBER.fullmatch(cleaned) else cleaned.strip("$")


def is_right(gold: str, answer: Answer) -> bool:
    """Return whether an answer has the value of `gold`, which `gold_answer` made."""
    forms = [answer.text] if _NUMBER.fullmatch(gold) else dict.fromkeys((answer.box, answer.text))
    return any(same_value(gold, form) for form in forms)


def find_number(text: str) -> str | None:
    """Return the first number of a text, as a plain number; None where it has none."""
    return _first_number(_clean(text))


def same_value(gold: str, answer: str) -> bool:
    """Return whether math-verify finds the same value in two answers (to 6 decimals)."""
    math_verify = load_math_verify()
    if not gold or not answer or len(answer) > MAX_LENGTH:
        return False
    return bool(math_verify.verify(_parse(gold), _parse(answer), timeout_seconds=None))


def _parse(answer: str) -> list[object]:
    math_verify = load_math_verify()
    config = math_verify.ExprExtractionConfig()
    if not _NUMBER.fullmatch(answer):
        config, answer = math_verify.LatexExtractionConfig(), f"${answer}$"
    return list(math_verify.parse(answer, extraction_config=[config], parsing_timeout=None))


def _clean(text: str) -> str:
    for written, meant in _NOISE:
        text = text.replace(written, meant)
    return _SPACE.sub(" ", text)


def _first_number(text: str) -> str | None:
    match = _NUMBER.search(text)
    return None if match is None else _plain(match.group())


def _plain(number: str) -> str:
    mixed = re.fullmatch(rf"(-?)({_MIXED})", number.replace("$", "").strip())
    if mixed:
        whole, above, below = re.split("[ /]", mixed[2])
        return f"{mixed[1]}{int(whole) * int(below) + int(above)}/{int(below)}"
    for character in "$, ":
        number = number.replace(character, "")
    if "e" in number.lower():  # written out, for what reads a product with e into it
        number = "/".join(format(Decimal(part), "f") for part in number.split("/"))
    return number


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
    content = content.rpartition("=")[2].strip().rstrip(" .%")
    number = _ONE_NUMBER.fullmatch(content)
    return _plain(number.group(1)) if number else content
