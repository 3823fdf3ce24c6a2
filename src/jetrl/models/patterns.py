"""Regular expressions from other people's files, matched in a process with limits.

A pattern of a few characters can backtrack for years.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from jetrl.errors import UserError
from jetrl.files import printable, shown_value
from jetrl.untrusted import LimitedProcess, LimitError

LIMIT_S = 2  # CPU seconds for all patterns of a call
_MEMORY_MIB = 512
_MOST_CHARACTERS = 10_000


def matching(
    patterns: Sequence[str], names: Sequence[str], key: str, whole: bool = True
) -> set[str]:
    """Return the names that one of some regular expressions matches.

    Args:
        whole: Match a name from its first to its last character, not only its beginning.
    """
    if not patterns:
        return set()
    wrong, found = _found(tuple(patterns), tuple(names), "fullmatch" if whole else "match")
    if wrong is not None:
        raise UserError(f"{key}: {shown_value(wrong)} is not a usable regular expression: {found}")
    return set(found)


@functools.lru_cache(maxsize=256)
def _found(
    patterns: tuple[str, ...], names: tuple[str, ...], how: str
) -> tuple[str | None, tuple[str, ...] | str]:
    """Return the wrong pattern, or None, and the matching names, or what is wrong."""
    if sum(map(len, patterns)) > _MOST_CHARACTERS:
        return patterns[0], f"with others it has more than {_MOST_CHARACTERS} characters"
    process = LimitedProcess("jetrl.models.patterns:match", LIMIT_S, _MEMORY_MIB)
    try:
        wrong, found = process.answer(json.dumps([how, patterns, names]).encode())
    except LimitError as error:
        return patterns[0], str(error)
    finally:
        process.close()
    return wrong, tuple(found) if wrong is None else printable(found)


def match(request: Any) -> tuple[str | None, Any]:
    """Match in the limited process: the wrong pattern and its error, or None and the names."""
    how, patterns, names = request
    found: set[str] = set()
    for pattern in patterns:
        try:
            matches = getattr(re.compile(pattern), how)
            found.update(name for name in names if matches(name))
        except Exception as error:  # re raises several kinds for a pattern
            return pattern, str(error) or type(error).__name__
    return None, list(found)
