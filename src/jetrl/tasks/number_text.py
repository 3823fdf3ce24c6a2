r"""Numbers as people write them in answers: what is one, its unit, and its plain form.

`-1,200.50`, `$18`, `1/2`, `2 1/3`, `.5`, `1e6` and `1.6 \times 10^{-19}` are numbers. A unit or
currency beside a number is no part of the number (`18 dollars`, `18 km/h`); a variable is, so that
`18x` is no number.
"""

from __future__ import annotations

import re
from decimal import Decimal

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_TIMES_TEN = r"[ ]?(?:\\times|\\cdot|[\u00d7\u00b7*x])[ ]?10[ ]?\^[ ]?"
_POWER = (  # of ten, as in 1e6 and 1.6 \times 10^{-19}
    r"(?:[eE][-+]?[0-9]{1,2}(?![0-9A-Za-z])"
    rf"|{_TIMES_TEN}(?:[-+]?[0-9]{{1,2}}(?![0-9])|\{{[-+]?[0-9]{{1,2}}\}}|\([-+]?[0-9]{{1,2}}\)))"
)
_DECIMAL = rf"(?:(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+){_POWER}?)"
_MIXED = r"[0-9]{1,9}[ ][0-9]{1,9}/[0-9]{1,9}(?![0-9/]|[.,][0-9])"  # 2 1/3
# A sign belongs to a number unless it stands between two operands, as in 10-5 and x-5.
NUMBER = re.compile(
    rf"(?:(?<![\w).%])-[ ]?)?\$?[ ]?(?:(?<=\$)-)?(?:{_MIXED}|{_DECIMAL}(?:[ ]?/[ ]?{_DECIMAL})?)"
)
# Letters that stand for a variable where one follows a number: 18x, 3xy, 2ab. The others are units
# (18 m, 18 g, 18 L), and so is every longer word.
_VARIABLES = r"(?:[xyz]{1,3}|ab|abc|bc|ac|[abcijnpqrtuvw\u03c0\u03b8])"
_UNITS = (
    rf"[ %]*(?:(?:[kcm]?m|ft|in)\^(?:[23]|\{{[23]\}})"
    rf"|(?:(?!{_VARIABLES}[ ]*$)[A-Za-z][A-Za-z ./\u00b2\u00b3]*)?)"
)
_ONE_NUMBER = re.compile(rf"({NUMBER.pattern}){_UNITS}")
_VARIABLE_FOLLOWS = re.compile(rf"{_VARIABLES}(?![\w\u00b7])")
_EXPRESSION_FOLLOWS = re.compile(
    r"[ ]?(?:\^|\\(?:pi|sqrt|d?frac|theta|alpha|beta|cdot|times|div|pm)(?![a-z]))"
)
_PERCENT = r"(?:%|per[ ]?cent|pct)"
_PERCENT_FOLLOWS = re.compile(rf"[ *]*{_PERCENT}(?![A-Za-z])")
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


def term_end(text: str, end: int) -> int | None:
    """Return where the variable behind a number ends (`18x`); None where none follows.

    Args:
        text: The text that holds the number.
        end: The position behind the number.
    """
    variable = _VARIABLE_FOLLOWS.match(text, end)
    return variable.end() if variable else None


def is_expression(text: str, end: int) -> bool:
    r"""Return whether the number that ends at `end` is the begin of more, as of `18\pi` or `2^5`.

    Args:
        text: The text that holds the number.
        end: The position behind the number.
    """
    return _EXPRESSION_FOLLOWS.match(text, end) is not None


def percent_follows(text: str, end: int) -> bool:
    """Return whether a percent sign or word follows the number that ends at `end`.

    Args:
        text: The text that holds the number.
        end: The position behind the number.
    """
    return _PERCENT_FOLLOWS.match(text, end) is not None


def without_percent(text: str) -> tuple[str, bool]:
    """Return a text without the percent sign or word at its end, and whether there was one."""
    match = _PERCENT_ENDS.search(text)
    return (text[: match.start()], True) if match else (text, False)
