r"""Numbers as people write them in answers, their units, and their plain form.

`-1,200.50`, `$18`, `1/2`, `2 1/3`, `.5`, `1e6` and `1.6 \times 10^{-19}` are numbers.
A unit or currency next to a number is not part of it (`18 dollars`, `18 km/h`, `90^\circ`). A
variable or a word with a value of its own is, so `18x`, `5 or six` and `5 squared` are not numbers.
"""

from __future__ import annotations

import re
from decimal import Decimal

_DIGITS = r"(?:[0-9]{1,3}(?:(?:,[0-9]{2}){1,4},[0-9]{3}|(?:,[0-9]{3})+)(?![0-9])|[0-9]+)"
_TIMES_TEN = r"[ ]?(?:\\times|\\cdot|[\u00d7\u00b7*x])[ ]{0,2}10[ ]?\^[ ]?"
_POWER = (  # of ten, as in 1e6 and 1.6 \times 10^{-19}
    r"(?:[eE][-+]?[0-9]{1,2}(?![0-9A-Za-z])"
    rf"|{_TIMES_TEN}(?:[-+]?[0-9]{{1,2}}(?![0-9])|\{{[-+]?[0-9]{{1,2}}\}}|\([-+]?[0-9]{{1,2}}\)))"
)
SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SCALE_FOLLOWS = re.compile(rf"[ ]?({'|'.join(SCALES)})(?![A-Za-z])")
_DECIMAL = rf"(?:(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+){_POWER}?)"
_MIXED = r"[0-9]{1,9}[ ][0-9]{1,9}/[0-9]{1,9}(?![0-9/]|[.,][0-9])"  # 2 1/3
# A sign belongs to a number unless it stands between two operands, as in 10-5 and x-5.
NUMBER = re.compile(
    rf"(?:(?<![\w).%])-[ ]?)?\$?[ ]?(?:(?<=\$)-)?(?:{_MIXED}|{_DECIMAL}(?:[ ]?/[ ]?{_DECIMAL})?)"
)
# Letters that stand for a variable where one follows a number: 18x, 3xy, 2ab. The others are units
# (18 m, 18 g, 18 L), and so is every longer word without a value of its own.
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
# Behind a number that is only the start of an answer: `18\pi`, `2^5`, `9+9`, `5, 6`, `5 or six`.
MORE_FOLLOWS = re.compile(
    r"!|[ ]?(?:\^(?!\{?\\circ)|\\(?!(?:text|mathrm|mbox|degree)(?![a-z]))[a-zA-Z]|\.[0-9])"
    r"|[ ]*(?:[-+*/:;,\u00d7\u00f7]|and\b|to\b)[ ]*[($]*[-+]?\.?[0-9\\]|[ ]+[0-9]|.*\bn?or\b"
)
_PERCENT = r"(?:%|per[ ]?cent|pct)"
PERCENT_FOLLOWS = re.compile(rf"[ *]*{_PERCENT}(?![A-Za-z])")
_PERCENT_ENDS = re.compile(
    rf"[ ]*(?:{_PERCENT}|\\(?:text|mathrm|textbf|mbox)\s*\{{[ ]*{_PERCENT}[ ]*\}})[ .]*$"
)


def read_number(text: str) -> str | None:
    """Return the plain form of a text that is one number, with or without a unit; else None."""
    match = _ONE_NUMBER.fullmatch(text)
    return plain_number(match.group(1)) if match else None


def plain_number(number: str) -> str:
    """Return a number that `NUMBER` matched as digits alone: `-1200.5`, `7/3`, `0.0025`."""
    mixed = re.fullmatch(rf"(-?)({_MIXED})", number.replace("$", "").strip())
    if mixed:
        whole, above, below = re.split("[ /]", mixed[2])
        return f"{mixed[1]}{int(whole) * int(below) + int(above)}/{int(below)}"
    number = re.sub(_TIMES_TEN, "e", number)
    for character in "$, {}()":
        number = number.replace(character, "")
    if "e" in number.lower():  # written out, for what reads a product with e into it
        number = "/".join(format(Decimal(part), "f") for part in number.split("/"))
    return number


def without_percent(text: str) -> tuple[str, bool]:
    """Return a text without the percent sign or word at its end, and whether there was one."""
    match = _PERCENT_ENDS.search(text)
    return (text[: match.start()], True) if match else (text, False)
