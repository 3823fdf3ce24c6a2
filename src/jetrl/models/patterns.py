"""Regular expressions from other people's files, matched in a process with limits.

A pattern of a few characters can backtrack for years.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from contextlib import closing
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
    """Return the names that a pattern matches: the `whole` name, or only its beginning."""
    if not patterns:
        return set()
    try:
        return set(_found(tuple(patterns), tuple(names), "fullmatch" if whole else "match"))
    except LimitError as error:
        shown = shown_value(list(patterns))
        raise UserError(
            f"{key}: {shown} is not usable as regular expressions: {printable(str(error))}"
        ) from None


@functools.lru_cache(maxsize=256)
def _found(patterns: tuple[str, ...], names: tuple[str, ...], how: str) -> tuple[str, ...]:
    if sum(map(len, patterns)) > _MOST_CHARACTERS:
        raise LimitError(f"more than {_MOST_CHARACTERS} characters")
    with closing(LimitedProcess("jetrl.models.patterns:match", LIMIT_S, _MEMORY_MIB)) as process:
        return tuple(process.answer(json.dumps([how, patterns, names]).encode()))


def match(request: Any) -> list[str]:
    """Match in the limited process: return the names that a pattern matches."""
    how, patterns, names = request
    compiled = [getattr(re.compile(pattern), how) for pattern in patterns]
    return [name for name in names if any(matches(name) for matches in compiled)]
