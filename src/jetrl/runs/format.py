"""Numbers, times and untrusted text, formatted for people."""

from __future__ import annotations

import json
import math
import re
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")
LONGEST = 1e19  # larger numbers get an exponent, to fit in a line


def number(value: float | None) -> str:
    """Return about three significant digits, if possible without an exponent: 0.531, 4,210."""
    if value is None:
        return "none"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if 1000 <= abs(value) < LONGEST:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def count(value: float) -> str:
    """Return a whole number with separators: 12,345."""
    if not math.isfinite(value):
        return str(value)
    return f"{round(value):,}" if abs(value) < LONGEST else f"{value:.3g}"


def percent(share: float) -> str:
    """Return a share as a percentage: 0.931 is 93.1%."""
    return f"{100 * share:.1f}%" if abs(share) < LONGEST else f"{share:.3g}"


def duration(seconds: float) -> str:
    """Return a time span in words: 85 ms, 4.1 s, 3m 12s, 2h 05m, 3d 04h."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds >= LONGEST:
        return f"{seconds:.3g} s"
    if seconds < 0.0995:
        return f"{1000 * max(seconds, 0.0):.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if hours == 0:
        return f"{minutes}m {whole % 60:02d}s"
    if days == 0:
        return f"{hours}h {minutes % 60:02d}m"
    return f"{days}d {hours % 24:02d}h"


def date(seconds: float | None) -> str:
    """Return a Unix time as local date and time, to the minute; "" for None."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def clip(text: str, width: int) -> str:
    """Return the text in at most `width` characters, with ... in place of its end."""
    return text if len(text) <= width else text[: width - 3] + "..."


def visible(text: str, newlines: bool = False) -> str:
    r"""Escape control and bidirectional characters, so that text cannot control a terminal.

    Line ends become \n, unless `newlines` keeps them.
    """

    def safe(character: str) -> str:
        if (newlines and character == "\n") or not _drives_terminal(character):
            return character
        return character.encode("unicode_escape").decode("ascii")

    return "".join(map(safe, text))


def json_text(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON whose control characters are escaped."""

    def safe(match: re.Match[str]) -> str:
        character = match[0]
        if not _drives_terminal(character):
            return character
        return "\\u007f" if character == "\x7f" else json.dumps(character)[1:-1]

    text = json.dumps(value, indent=indent, ensure_ascii=False, default=str)
    return re.sub(r"[^\n -~]", safe, text)


def _drives_terminal(character: str) -> bool:
    """Return True for a control, format or bidirectional character, or a lone surrogate."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def spread(items: Sequence[Item], num: int) -> list[Item]:
    """Return at most `num` items, evenly spaced from the first to the last."""
    if len(items) <= num:
        return list(items)
    return [items[round(k * (len(items) - 1) / max(num - 1, 1))] for k in range(num)]


def labels(paths: Sequence[str | Path]) -> list[str]:
    """Return names that tell runs apart: paths if two names are the same."""
    names = [Path(path).name for path in paths]
    named = zip(names, paths, strict=True)
    return [name if names.count(name) == 1 else str(path) for name, path in named]
