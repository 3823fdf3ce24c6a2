r"""Extraction of answers from text, and comparison with the correct answer.

A completion's answer is the last one marked by `#### 18` or `\boxed{18}`, else (unless `strict`)
its last number. Reasoning is ignored (thoughts.py). A marked answer without a value is wrong.
`gold_answer` reads the correct answer by the same rules. Normalization never changes the value
(docs/tasks.md): a unit after a number is removed; a word before or between numbers, a function, a
constant or a second value is kept and makes the answer wrong.

math-verify compares numbers to 6 decimals and equations by their solutions, so it treats all tiny
numbers as equal, and all equations without a solution. Its "yes" is overruled if two numbers differ
by more than RELATIVE, or if the sides of two equations without a solution differ. Its time limits
are disabled: they use signals, which give wrong results in threads.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import re
import unicodedata
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from types import ModuleType
from typing import Any

from jetrl.tasks.thoughts import answer_part
from jetrl.types import Score

_DIGITS = r"(?:[0-9]{1,3}(?:(?:,[0-9]{2}){1,4},[0-9]{3}|(?:,[0-9]{3})+)(?![0-9])|[0-9]+)"
_TIMES_TEN = r"[ ]?(?:\\times|\\cdot|[\u00d7\u00b7*x])[ ]{0,2}10[ ]?\^[ ]?"
_POWER = (  # powers of ten, as in 1e6 and 1.6 \times 10^{-19}
    r"(?:[eE][-+]?[0-9]{1,2}(?![0-9A-Za-z])"
    rf"|{_TIMES_TEN}(?:[-+]?[0-9]{{1,2}}(?![0-9])|\{{[-+]?[0-9]{{1,2}}\}}|\([-+]?[0-9]{{1,2}}\)))"
)
SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SCALE_FOLLOWS = re.compile(rf"[ ]?({'|'.join(SCALES)})(?![A-Za-z])")
_DECIMAL = rf"(?:(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+){_POWER}?)"
_MIXED = r"[0-9]{1,9}[ ][0-9]{1,9}/[0-9]{1,9}(?![0-9/]|[.,][0-9])"  # 2 1/3
# A sign belongs to a number unless it is between two operands, as in 10-5 and x-5.
NUMBER = re.compile(
    rf"(?:(?<![\w).%])-[ ]?)?\$?[ ]?(?:(?<=\$)-)?(?:{_MIXED}|{_DECIMAL}(?:[ ]?/[ ]?{_DECIMAL})?)"
)
# Letters that are variables after a number: 18x, 3xy, 2ab. Other letters are units (18 m, 18 g, 18
# L), as is every longer word without its own value.
_VARIABLES = (
    r"(?:[xyz]{1,3}|x[a-z]|[a-z][xy]|ab|abc|bc|ac|[abceijnpqrtuvw\u03c0\u03b8])(?![A-Za-z])"
)
_VALUE_WORDS = (
    r"(?i:n?or|not|than|least|most|plus|minus|over|mod|squared|cubed|factorial|hal(?:f|ves)|"
    r"thirds?|fourths?|fifths?|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|"
    r"[a-z]+teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred)"
)
UNIT = (
    rf"(?!(?:(?:{_VARIABLES}|k\b)[ ]*)+(?:$|\^))(?!.*(?<![A-Za-z]){_VALUE_WORDS}(?![A-Za-z]))"
    r"[A-Za-z][A-Za-z ./]*"
)
_DEGREES = r"(?:\u00b0|\\degree|\^(?:\\circ|\{\\circ\}))[ ]?[CFK]?"
_ORDINAL = r"\^?\{?(?:st|nd|rd|th)\}?"
# Chinese, Japanese and Korean words; not those that make another number of it: 5\u4e07 is 50,000.
_EASTERN = (
    r"(?:(?![\u3007\u4e00\u4e8c\u4e24\u4e09\u56db\u4e94\u516d\u4e03\u516b\u4e5d\u5341\u767e\u5343"
    r"\u4e07\u842c\u4ebf\u5104\u5146\u534a\u500d\u5206\u4f59\u591a\u51e0\u6216\u548c\u81f3\u5230"
    r"\u4ee5\u4e0d\ub9cc\uc5b5\ucc9c\ubc31])[\u3400-\u9fff\uac00-\ud7af]){1,4}"
)
_UNITS = (
    rf"[ %]*(?:{_DEGREES}|{_ORDINAL}|{_EASTERN}"
    rf"|(?:{UNIT}|(?:[kcm]?m|ft|in)(?=\^))(?:\^(?:[0-9]|\{{-?[0-9]\}}))?)?"
)
_ONE_NUMBER = re.compile(rf"({NUMBER.pattern}){_UNITS}")
VARIABLE_FOLLOWS = re.compile(rf"{_VARIABLES}(?![\w\u00b7])")
# What follows a number that is only the start of an answer: `18\pi`, `2^5`, `9+9`, `5, 6`, `5 or
# six`.
MORE_FOLLOWS = re.compile(
    r"!|[ ]?(?:\^(?!\{?\\circ)|\\(?!(?:text|mathrm|mbox|degree)(?![a-z]))[a-zA-Z]|\.[0-9])"
    r"|[ ]*(?:[-+*/:;,\u00d7\u00f7]|and\b|to\b)[ ]*[($]*[-+]?\.?[0-9\\]|[ ]+[0-9]|.*\bn?or\b"
)
_PERCENT = r"(?:%|per[ ]?cent|pct)"
PERCENT_FOLLOWS = re.compile(rf"[ *]*{_PERCENT}(?![A-Za-z])")
_PERCENT_ENDS = re.compile(
    rf"[ ]*(?:{_PERCENT}|\\(?:text|mathrm|textbf|mbox)\s*\{{[ ]*{_PERCENT}[ ]*\}})[ .]*$"
)


def _read_number(text: str) -> str | None:
    """Return the normalized form if the text is one number, with or without unit; else None."""
    match = _ONE_NUMBER.fullmatch(text)
    return _plain_number(match.group(1)) if match else None


def _plain_number(number: str) -> str:
    """Return a number matched by `NUMBER` in plain digits: `-1200.5`, `7/3`, `0.0025`."""
    mixed = re.fullmatch(rf"(-?)({_MIXED})", number.replace("$", "").strip())
    if mixed:
        whole, above, below = re.split("[ /]", mixed[2])
        return f"{mixed[1]}{int(whole) * int(below) + int(above)}/{int(below)}"
    number = re.sub(_TIMES_TEN, "e", number)
    for character in "$, {}()":
        number = number.replace(character, "")
    if "e" in number.lower():  # written out, since `e` could be read as a factor
        number = "/".join(format(Decimal(part), "f") for part in number.split("/"))
    return number


def _without_percent(text: str) -> tuple[str, bool]:
    """Return a text without a trailing percent sign or word, and True if there was one."""
    match = _PERCENT_ENDS.search(text)
    return (text[: match.start()], True) if match else (text, False)


# Must be followed by a number, LaTeX or a tuple; `#### Step 2` and `#### (1) Add` are headings.
_MARKER = re.compile(r"####[ \t*_]*(?=[-+$.0-9]|\\(?!text)[a-zA-Z{]|[(\[][-+$.0-9\\][^\n]{0,99},)")
_BOX = re.compile(rf"\\(?:boxed|fbox)\s*(?:\{{|({NUMBER.pattern}|[A-Za-z](?!\w)))")
# Between two boxes of one answer: `$\boxed{1}$ or $x = \boxed{5}$`.
_JOINS = re.compile(
    r"[\s$]*(?:[,;]|,?\s*\b(?:or|and)\b|\\text\{\s*(?:or|and)\s*\})[\s$]*(?:[a-z]\s*=\s*)?"
)
# Placeholders for a missing answer.
_NOTHING = {
    *("nan", "NaN", "NAN", "-nan", "-NaN", "null", "NULL", "None", "NA", "N/A", "n/a", "#N/A"),
    *("#REF!", "#VALUE!", "#NAME?", "#NUM!", "#NULL!", "#DIV/0!", "TBD", "tbd", "TODO", "todo"),
}
_SAID = re.compile(r"(?i:\banswer)[*\s]*(?:is|:|=)[*:\s]*(.+)")
_PROSE = re.compile(r"\s*[A-Za-z]+[ ,]+[A-Za-z]{2,}[^0-9]*[0-9]")  # words before the first number

# Character normalization. U+2009 stands for every kind of space inside a number.
_CHARACTERS = {
    **{0xFF01 + n: 0x21 + n for n in range(94)},  # full-width ASCII
    **{0x1D7CE + n: 0x30 + n % 10 for n in range(50)},  # bold digits and the like
    **dict.fromkeys([*range(0x2000, 0x200A), 0xA0, 0x202F, 0x205F, 0x3000], "\u2009"),
    **dict.fromkeys([*range(0x200B, 0x2010), 0x2060, 0xFEFF]),  # zero-width characters
    **dict.fromkeys([*range(0x2010, 0x2014), 0x2212], "-"),
    **dict.fromkeys(map(ord, "\u20ac\u00a3\u00a5\u20b9\u20a9\uffe5"), "$"),
}
_NOISE = (
    ("\\$", "$"), ("\\%", "%"), ("{,}", ","), (",\\! ", ","), ("\\!", ""), ("\\,", "\u2009"),
    ("\\;", "\u2009"), ("~", " "),
)  # fmt: skip
_GROUPS = re.compile("(?<=[0-9])[_\u2009](?=[0-9]{3}(?![0-9]))")  # 1_000
_FRACTION = re.compile("([0-9]?)([\u00bc-\u00be\u2150-\u215e])")
_RAISED = re.compile("[\u207a\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_SPACE = re.compile(r"(?<!\\)\\ ")  # not the end of a matrix's row

_WORD_COMMAND = r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|it)|mbox|operatorname\*?|rm|bf)\s*"
_FUNCTION = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|lg|exp|sqrt"
_SYMBOLS = {
    "\u221e": "\\infty ", "\u2208": "\\in ", "\u00b7": "\\cdot ", "\u221a": "\\sqrt ",
    "\u00b0": "^\\circ", "\\varnothing": "\\emptyset ",
}  # fmt: skip
# Formatting, in order of replacement.
_DRESS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (_RAISED.pattern, lambda m: f"^{{{_compatible(m[0])}}}"),
    ("[\u221e\u2208\u00b7\u221a\u00b0]|\\\\varnothing", lambda m: _SYMBOLS[m[0]]),
    (r"\{\\(?:rm|bf|it)\s+([^{}]*)\}", r"\\text{\1}"),
    (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
    (r"\\(?:underline|mathbf|boldsymbol|bm|displaystyle)(?![a-z])|\\(?:bf|rm)(?![a-z{])", ""),
    (r"(?<!\\)\\[()\[\]]|\*\*|__", ""),
    (r"\\q?quad(?![a-z])", " "),
    (r"\\([dtc]?frac|[dt]?binom)\s*([0-9])\s*([0-9])", r"\\\1{\2}{\3}"),
    (rf"{_WORD_COMMAND}\{{\s*({_FUNCTION})\s*\}}", r"\\\1 "),
    (r"\\sqrt\s*(?:\(([^()]*)\)|([0-9.]+))", lambda m: rf"\sqrt{{{m[1] or m[2]}}}"),
    (r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*\{?([0-9]+)\}?", lambda m: _repeating(m)),
    (r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9,/])", lambda m: m[0].replace(" ", "")),
)
_WORDS = re.compile(rf"{_WORD_COMMAND}\{{([^{{}}]*)\}}")
_CONNECTIVES = re.compile(
    r",?\s*(?:\\text\{\s*(?:or|and)\s*\}|\b(?:or|and)\b|\\(?:lor|vee)(?![a-z]))\s*"
)
_SEPARATOR = r"(?:;|,(?![0-9]{3}(?![0-9])))"
# `#### 6 * 3 = 18`: nothing but numbers and operators before the last equals sign.
_EQUATION = re.compile(r"(?:[-+*/\u00d7\u00f7().,$0-9 =]|\\(?:times|cdot|div) )*=[ ]*(?=[-$.0-9])")
_NAMED = re.compile(r"\s*((?:[A-Za-z]|\\[a-z]+)(?:_(?:\w|\{\w+\}))?)\s*=([^=<>]+)")
_NAME_ENDS = re.compile(r"(?<![\w\\])([A-Za-z])\s*=[\s$]*$")
_EQUALS = re.compile(r"(?<![<>!])=")
_ORDER = re.compile(r"[<>\u2264\u2265]|\\(?:leq?|geq?|lt|gt|neq?|in|notin)(?![a-z])")
_UNIT_ENDS = re.compile(
    r"(?<=[\w)}])(?:\s*\\text\s*\{([^{}]*)\}(?:\^(?:[0-9]|\{-?[0-9]\}))?|"
    rf"\s+(?:[kcm]m|kg|ft|in|{UNIT}(?<=[a-z]{{4}})))(?=\s*(?:$|[,;)]|\\\}}))"
)
_OTHER_WORDS = re.compile(r"\\text|(?<![\\A-Za-z])[A-Za-z]{3,}")
# Dates and ranges, which are not differences or quotients: 2024-03-01, 3/14/2024, 10-12, 3 to 5.
_PART = r"\$?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?![0-9])%?"
_LITERAL = re.compile(
    rf"(?<![\w.,/^-])(?:{_PART}(?:[ ]*-{{1,3}}[ ]*{_PART})+|{_PART}[ ]+to[ ]+{_PART}"
    r"|[0-9]{1,4}(?:/[0-9]{1,4}){2})"
    r"(?![\w^/]|[.,][0-9]|-[0-9])"
)
_WORD = re.compile(r"(?=.*[A-Za-z]{4})(?!infinity)[A-Za-z][A-Za-z ]+")
# Numbers next to each other, which math-verify adds.
_GAP = re.compile(r"(?<![_^0-9.])[0-9.]+(?:\s+[0-9.]|\s*\\[lc]?dots)|[0-9]\.[0-9]+\.[0-9]")


@dataclass(frozen=True)
class Answer:
    """An extracted answer: a plain number such as `-1200.5` or `1/2`, or else LaTeX.

    `text` is "" if there is no value; `scaled` is the number times a following `million` etc.;
    `name` is the variable before its equals sign.
    """

    text: str
    marked: bool
    box: str = ""
    percent: bool = False
    scaled: str = ""
    name: str = ""


def final_answer(text: str, strict: bool = False) -> Answer | None:
    """Return the answer of a completion, ignoring reasoning; None if it gives none."""
    text = _clean(answer_part(text) or "")
    boxes = list(_BOX.finditer(text))
    markers = list(_MARKER.finditer(text))
    if markers and (not boxes or markers[-1].start() > boxes[-1].start()):
        return _of_line(text[markers[-1].end() :].split("\n", 1)[0])
    if boxes:
        return _of_box(_held(text, boxes))
    if strict:
        return None
    last = deque(NUMBER.finditer(text), maxlen=1)
    if not last:
        return None
    named = _NAME_ENDS.search(text, max(0, last[0].start() - 10), last[0].start())
    answer = _with_what_follows(text, last[0], marked=False)
    return replace(answer, name=named[1] if named else "")


def is_nothing(answer: str) -> bool:
    """Return True if a data set's answer is a placeholder: "", `nan`, `#N/A`, `?`."""
    bare = answer.strip()
    return not bare.strip("?\uff1f") or bare.rstrip(".").strip("()[]<>") in _NOTHING


def gold_answer(text: str) -> str:
    """Return the answer of a data set's text; "" if it cannot be read.

    The answer is the marked one, or the text after the last `answer is` or `Answer:`, or the whole
    text: a plain number, one with a percent sign, or LaTeX.
    """
    text = answer_part(text) or ""
    answer = final_answer(text, strict=True)
    if answer is None:
        said = _SAID.findall(text)
        content = _clean(said[-1] if said else text.rpartition("####")[2]).strip(" \n$")
        content = content.rstrip(" .$")
        if is_nothing(content) or not content.strip(" -_./*?\u2026"):
            return ""
        if NUMBER.fullmatch(content):
            return _plain_number(content)  # of any length
        answer = _of_box(content)
        answer = answer if "=" not in content else replace(answer, text=answer.box)
    if NUMBER.fullmatch(answer.text):
        return answer.text + "%" * answer.percent
    gold = answer.box
    if is_nothing(re.sub(r"\\text\{(.*)\}", r"\1", gold)):
        return ""
    if _PROSE.match(gold) or gold.count("{") != gold.count("}") or len(gold) > MAX_LENGTH:
        return ""
    return gold + "%" * answer.percent


def answer_key(completion: str, strict: bool = False) -> str | None:
    """Return a completion's answer in canonical form; None if it gives none."""
    answer = final_answer(completion, strict)
    if answer is None or not answer.text:
        return None
    if not NUMBER.fullmatch(answer.text):
        return re.sub(r"\s+", "", answer.text)
    value = _fraction(answer.text)
    return None if value is None else str(value)


def _is_right(gold: str, answer: Answer) -> bool:
    """Return True if an answer has the value of `gold`, from `gold_answer`."""
    number, percent = _without_percent(gold)
    literal, name = _literal(number), _name(gold)
    if literal:
        return literal in (_literal(answer.box), _literal(answer.text))
    if name and answer.name and name.casefold() != answer.name.casefold():
        return same_value(gold, answer.box)  # two equations may still agree
    forms = [answer.text] if NUMBER.fullmatch(number) else [answer.box, answer.text]
    if any(same_value(number, form) for form in dict.fromkeys([*forms, answer.scaled])):
        return True
    if percent and not answer.percent:
        return same_value(_hundredth(number), answer.text)
    if answer.percent and not percent:
        return same_value(number, _hundredth(answer.text))
    return False


def check_math(gold: str, completion: str, strict: bool = False) -> Score:
    """Score a completion: 1 if its answer equals the correct one, else 0."""
    answer, right = final_answer(completion, strict=strict), gold_answer(gold)
    if answer is None:
        return Score(0.0, {"answered": 0.0})
    if not answer.marked and _literal(_without_percent(right)[0]):
        answer = replace(answer, text=_last_literal(completion))
    return Score(float(_is_right(right, answer)), {"answered": float(answer.marked)})


def _literal(text: str) -> tuple[object, ...] | None:
    """Return the separator and numbers of a date or range; None for other texts."""
    text = _WORDS.sub(r"\1", text).strip()
    if not _LITERAL.fullmatch(text):
        return None
    numbers = re.findall(r"[0-9.]+", text.replace(",", ""))
    return ("/" in text, *map(Decimal, numbers))


def _last_literal(completion: str) -> str:
    """Return the date or range that contains a completion's last number, else ""."""
    text = _clean(answer_part(completion) or "")
    last = deque(_LITERAL.finditer(text), maxlen=1)
    return last[0][0] if last and not NUMBER.search(text, last[0].end()) else ""


def _name(equation: str) -> str:
    r"""Return the variable before the only equals sign: x, x_1, \theta; else ""."""
    named = _NAMED.fullmatch(equation)
    return re.sub(r"[\s{}]", "", named[1]) if named else ""


def _fraction(number: str) -> Fraction | None:
    """Return a plain number's value; None if it divides by 0."""
    above, _, below = number.partition("/")
    divisor = Decimal(below or 1)
    return Fraction(Decimal(above)) / Fraction(divisor) if divisor else None


def _hundredth(number: str) -> str:
    if NUMBER.fullmatch(number) and "/" not in number:
        return format(Decimal(number) / 100, "f")
    return f"\\frac{{{number}}}{{100}}"


def _of_line(line: str) -> Answer:
    """Read a line after `####`: its first number, if it has only one."""
    line = _undressed(line[: 2 * MAX_LENGTH])
    equation = _EQUATION.match(line)
    number = NUMBER.match(line, equation.end() if equation else 0)
    if number is None or MORE_FOLLOWS.match(line, number.end()):
        return _of_box(line)
    if not _right_side(line[: number.end()]):
        return Answer("", marked=True)
    return _with_what_follows(line, number, marked=True)


def _of_box(content: str) -> Answer:
    content, percent = _without_percent(_undressed(content[: 2 * MAX_LENGTH]))
    plain = _WORDS.sub(r"\1", content)
    number, value = NUMBER.match(plain), _value(content)
    if number and NUMBER.fullmatch(value) and "=" not in content:
        return _with_what_follows(plain, number, marked=True, percent=percent)
    box = _latex(content)
    return Answer(value, marked=True, box=box, percent=percent, name=_name(box))


def _with_what_follows(
    text: str, number: re.Match[str], marked: bool, percent: bool = False
) -> Answer:
    """Return a number in a text as an answer, including a following word or percent sign."""
    variable = VARIABLE_FOLLOWS.match(text, number.end())
    if variable:
        return Answer(text[number.start() : variable.end()].strip(" $"), marked)
    value = _plain_number(number.group())
    percent = percent or PERCENT_FOLLOWS.match(text, number.end()) is not None
    scale = SCALE_FOLLOWS.match(text, number.end())
    scaled = str((_fraction(value) or 0) * SCALES[scale[1]]) if scale and len(value) < 99 else ""
    return Answer(value, marked, value * marked, percent, scaled)


def _clean(text: str) -> str:
    """Return a text with equivalent characters unified and spaces inside numbers removed."""
    text = text.translate(_CHARACTERS)
    for written, meant in _NOISE:
        text = text.replace(written, meant)
    text = _GROUPS.sub("", text).replace("\u2009", " ")
    text = _FRACTION.sub(lambda m: f"{m[1]} {_compatible(m[2])}".lstrip(), text)
    text = re.sub(f"10({_RAISED.pattern})", lambda m: f"10^{{{_compatible(m[1])}}}", text)
    return _SPACE.sub(" ", text)


def _compatible(text: str) -> str:
    """Return single-character fractions and superscript digits as ASCII."""
    return unicodedata.normalize("NFKC", text).replace("\u2044", "/").replace("\u2212", "-")


def _held(text: str, boxes: list[re.Match[str]]) -> str:
    """Return the content of the last box, joined with boxes of the same answer."""
    held: list[str] = []
    next_start = 0
    for box in reversed(boxes):
        content, end = (box[1], box.end()) if box[1] else _braced(text, box.end())
        if held and not _JOINS.fullmatch(text, end, next_start):
            break
        held.append(content)
        next_start = box.start()
    return " , ".join(dict.fromkeys(reversed(held)))


def _braced(text: str, start: int) -> tuple[str, int]:
    """Return the text up to the closing brace and its end; "" if it does not close soon."""
    depth = 1
    for end in range(start, min(len(text), start + 2 * MAX_LENGTH)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end].strip(), end + 1
    return "", start


def _undressed(content: str) -> str:
    """Remove colors, fonts and spacing."""
    for pattern, meant in _DRESS:
        content = re.sub(pattern, meant, content)
    content = content.strip(" \n\t$*")
    while braced := re.fullmatch(r"\{([^{}]*)\}", content):
        content = braced[1].strip()
    return content.rstrip(" .,;$*")


def _repeating(decimal: re.Match[str]) -> str:
    r"""Return a repeating decimal, such as `0.1\overline{6}`, as a fraction."""
    fixed, period = f"{decimal[1] or 0}{decimal[2]}", decimal[3]
    below = 10 ** len(decimal[2]) * (10 ** len(period) - 1)
    return rf"\frac{{{int(fixed + period) - int(fixed)}}}{{{below}}}"


def _value(content: str) -> str:
    """Return an answer as a plain number if possible, else as LaTeX; "" if there is no value."""
    right = _right_side(_CONNECTIVES.sub(" , ", content))
    for form in (content, right):
        number = _read_number(_WORDS.sub(r"\1", form).strip().rstrip(" .%"))
        if number:
            return number
    return _latex(right)


def _right_side(content: str) -> str:
    """Return the last side of an equation; "" if its sides are different numbers."""
    name, equals, rest = _EQUALS.sub("\0", content).partition("\0")
    in_no_bracket = re.sub(r"\([^()]*\)", "", name)
    if not equals or _ORDER.search(content) or re.search(_SEPARATOR, in_no_bracket):
        return content
    again = rf"({_SEPARATOR}\s*){re.escape(name.strip())}\s*\0"
    sides = [name, *re.sub(again, r"\1", rest).split("\0")]
    if len(sides) > 2 and re.search(_SEPARATOR, rest):
        return content
    numbers = [
        _fraction(number) or Fraction() for side in sides if (number := _read_number(side.strip()))
    ]
    if any(abs(number - numbers[-1]) > abs(numbers[-1]) / 100 for number in numbers):
        return ""
    return sides[-1].strip()


def _latex(content: str) -> str:
    """Return an answer as LaTeX for math-verify; "" if numbers are adjacent."""
    content = _WORDS.sub(_upright, _CONNECTIVES.sub(" , ", content))
    bare = _UNIT_ENDS.sub(
        lambda m: m[0] if m[1] and not re.fullmatch(rf"\s*{UNIT}", m[1]) else " ", content
    )
    content = content if _OTHER_WORDS.search(bare) else bare.strip()
    if _WORD.fullmatch(content):
        content = rf"\text{{{content}}}"  # not a product of letters
    content = re.sub(r"(?<![\w^}])([0-9.]+)\s*\((?=[0-9])", r"\1\\cdot (", content)
    return "" if _GAP.search(content) else content


def _upright(words: re.Match[str]) -> str:
    r"""Return the letter, number or words of `\mathrm{...}` and the like."""
    word = words[1].strip()
    return word if len(word) == 1 or re.search("[0-9]", word) else rf"\text{{{words[1]}}}"


# Silence its warning about disabled time limits: the scorer enforces them.
logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_LENGTH = 200  # maximum characters; longer texts are not answers
MAX_DEPTH = 8  # maximum consecutive brackets that are parsed
RELATIVE = 1e-3  # maximum relative difference of numbers equal to 6 decimals
_BASE = re.compile(r"^[0-9A-Fa-f.]+_\{?([0-9]+)\}?$")  # 2516_8
_DEEP = re.compile(rf"[({{]{{{MAX_DEPTH + 1}}}")
_DOUBLED = re.compile(r"\((\([^(){}]*\))\)|\{(\{[^(){}]*\})\}")
_PRECISION = 30  # decimal digits when evaluating an expression
# Errors raised by sympy for unsupported operations.
_NOT_POSSIBLE = (TypeError, ValueError, AttributeError, NotImplementedError, ArithmeticError)


@functools.cache
def load_math_verify() -> ModuleType:
    """Import math-verify (half a second) before the first score's time limit starts."""
    return importlib.import_module("math_verify")


@functools.cache
def _sympy() -> ModuleType:
    return importlib.import_module("sympy")


@functools.cache
def _latex_config() -> Any:
    """Return math-verify settings that keep units, which may look like variables."""
    config = load_math_verify().LatexExtractionConfig()
    normalization = dataclasses.replace(config.normalization_config, units=False)
    return dataclasses.replace(config, normalization_config=normalization)


def same_value(gold: str, answer: str) -> bool:
    """Return True if two answers have the same value."""
    if not gold or not answer or len(answer) > MAX_LENGTH:
        return False
    if len({base[1] for text in (gold, answer) if (base := _BASE.search(text))}) > 1:
        return False
    sympy = _sympy()
    sympy.core.random.seed(0)
    golds, answers = (_parse(_without_doubled_brackets(text)) for text in (gold, answer))
    verify = load_math_verify().verify
    if not verify(golds, answers, allow_set_relation_comp=True, timeout_seconds=None):
        return bool(golds and answers) and (
            _same_region(golds[0], answers[0]) or _same_with_i(golds[0], answers[0])
        )
    if gold == answer or not (len(golds) == len(answers) == 2):
        return True
    return not _differ(golds[0], answers[0])


def _without_doubled_brackets(text: str) -> str:
    """Remove doubled brackets, each of which slows down LaTeX parsing severalfold."""
    plain = text.replace(r"\left", "").replace(r"\right", "")
    if not _DEEP.search(plain):
        return text
    while (fewer := _DOUBLED.sub(r"\1\2", plain)) != plain:
        plain = fewer
    return plain


def _parse(answer: str) -> list[Any]:
    """Return math-verify's parse: [expression, text], or fewer."""
    math_verify = load_math_verify()
    config = math_verify.ExprExtractionConfig()
    if not NUMBER.fullmatch(answer):
        config, answer = _latex_config(), f"${answer}$"
    parsed = list(math_verify.parse(answer, extraction_config=[config], parsing_timeout=None))
    return [_named_functions(_as_numbers(parsed[0])), *parsed[1:]] if parsed else parsed


def _named_functions(expression: Any) -> Any:
    """Return `f(2) = 3` as an equation in a symbol; other expressions unchanged."""
    sympy = _sympy()
    unknown = sympy.core.function.AppliedUndef
    if not isinstance(expression, sympy.Eq) or not isinstance(expression.lhs, unknown):
        return expression
    if expression.lhs.free_symbols:  # f(x) = x + 1
        return expression
    return sympy.Eq(sympy.Symbol(str(expression.lhs)), expression.rhs, evaluate=False)


def _as_numbers(expression: Any) -> Any:
    """Return a membership or several inequalities as the set they describe."""
    sympy = _sympy()
    if isinstance(expression, sympy.Eq) and isinstance(expression.rhs, sympy.Set):
        return expression.rhs
    parts = expression.args if isinstance(expression, sympy.Set) else ()
    if not parts or not all(isinstance(part, _inequalities()) for part in parts):
        return expression
    try:
        return sympy.Union(*[part.as_set() for part in parts])
    except _NOT_POSSIBLE:
        return expression


def _inequalities() -> tuple[Any, ...]:
    sympy = _sympy()
    return (sympy.StrictLessThan, sympy.LessThan, sympy.StrictGreaterThan, sympy.GreaterThan)


def _same_region(gold: Any, answer: Any) -> bool:
    """Return True if two inequalities in one variable agree, such as 2 > x and x < 2."""
    relation = (_sympy().And, *_inequalities())
    if not isinstance(gold, relation) or not isinstance(answer, relation):
        return False
    if gold.free_symbols != answer.free_symbols or len(gold.free_symbols) != 1:
        return False
    try:
        return bool(gold.as_set() == answer.as_set())
    except _NOT_POSSIBLE:
        return False


def _same_with_i(gold: Any, answer: Any) -> bool:
    """Return True if two answers agree with i (a variable to math-verify) as sqrt(-1)."""
    sympy = _sympy()
    symbols = {s for one in (gold, answer) for s in getattr(one, "free_symbols", ())}
    units = {symbol: sympy.I for symbol in symbols if symbol.name == "i"}  # real or imaginary
    if not units:
        return False
    try:
        gold, answer = gold.subs(units).doit(), answer.subs(units).doit()
    except _NOT_POSSIBLE:
        return False
    agree = load_math_verify().verify([gold], [answer], timeout_seconds=None)
    return bool(agree) and not _differ(gold, answer)


def _differ(gold: Any, answer: Any) -> bool:
    """Return True if two expressions that math-verify considers equal differ."""
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
    """Return the members of a tuple, a matrix or a finite set (sorted by value)."""
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
    """Return an expression's value; None if it contains variables or has no value."""
    sympy = _sympy()
    if isinstance(expression, sympy.Eq):
        expression = expression.rhs
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return None
    try:
        value = expression.doit().evalf(_PRECISION)
    except _NOT_POSSIBLE:
        return None
    return value if value.is_number and value.is_finite and value.is_comparable else None


def _equations_differ(gold: Any, answer: Any) -> bool:
    """Return True if gold is unsolvable and not proportional to answer."""
    sympy = _sympy()
    try:
        solved = sympy.solve(gold, *gold.free_symbols) if gold.free_symbols else []
        if solved:
            return False
        ratio = sympy.simplify((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs))
        return not (ratio.is_number and ratio.is_nonzero)
    except _NOT_POSSIBLE:
        return False
