#!/usr/bin/env python3
"""Check that docstrings stand on their own and say more than names and types.

    python tools/docstrings.py                   src/jetrl, tests, tools
    python tools/docstrings.py src/jetrl/rollout
    python tools/docstrings.py --repeats         also the rule `repeats`

Nothing needs a docstring. These rules hold for the ones there are:

    fragment   The first line does not open with a word of `FRAGMENT`, such as What or Whether.
    pronoun    The first line holds no phrase of `PRONOUN`, such as "of it" or "likewise".
    unknown    An Args block names parameters that exist.
    repeats    An Args or Attributes entry says more than its name: shape, unit, range, meaning of
               None. `tools/house.py` holds the number of those left.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

FRAGMENT = re.compile(
    r"(What|Of|As|All of|Whether|Nothing|How|Where|Which|Likewise|That|Those|One|Its|It"
    r"|Who|Whom|Whose|Why|Not|None)\b"
)
PRONOUN = re.compile(
    r"\b(of it|of these|of them|of what|likewise|as it is|that there is|goes on|anew)\b"
    r"|^(\S+ ){0,4}of its\b(?! own)",  # so early that no noun can stand before "its"
    re.IGNORECASE,
)
ENTRY = re.compile(r" {4}\*{0,2}`?(?P<name>\w+)`?(?: \([^)]*\))?: ?(?P<text>.*)")
SAYS = re.compile(r"\d|\[|`|\"|None|True|False|[A-Z]{2}")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


def entries(lines: list[str]) -> Iterator[tuple[int, str, str, str]]:
    """Yield (index, block, name, description) of each Args and Attributes entry."""
    block = name = text = ""
    start = 0
    for index, line in enumerate([*lines, "end"]):
        entry = ENTRY.match(line) if block else None
        if name and (entry or (line and not line.startswith(" " * 8))):
            yield start, block, name, text
            name = ""
        if entry:
            start, name, text = index, entry["name"], entry["text"]
        elif name:
            text += " " + line.strip()
        if line and not line.startswith(" "):
            block = line[:-1] if line in ("Args:", "Attributes:") else ""


def parameters(node: Function) -> set[str]:
    a = node.args
    stars = [item for item in (a.vararg, a.kwarg) if item]
    return {item.arg for item in (*a.posonlyargs, *a.args, *a.kwonlyargs, *stars)}


def violations(text: str, in_source: bool) -> Iterator[tuple[int, str, str]]:
    """Yield (line, rule, offending words) of a Python file."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, Documented) or not (raw := ast.get_docstring(node, clean=False)):
            continue
        line, lines = node.body[0].lineno, inspect.cleandoc(raw).splitlines()
        for rule, pattern in (("fragment", FRAGMENT.match), ("pronoun", PRONOUN.search)):
            if pattern(lines[0]):
                yield line, rule, lines[0]
        if not in_source:
            continue
        for index, block, name, words in entries(lines):
            if isinstance(node, Function) and block == "Args" and name not in parameters(node):
                yield line + index, "unknown", name
            if len(words.split()) <= 4 and not SAYS.search(words):
                yield line + index, "repeats", f"{name}: {words}"


def main() -> int:
    names = [name for name in sys.argv[1:] if name != "--repeats"]
    paths = [Path(name) for name in names] or [ROOT / n for n in ("src", "tests", "tools")]
    found = 0
    for path in (f for p in paths for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])):
        in_source = path.resolve().is_relative_to(ROOT / "src")
        for line, rule, words in violations(path.read_text(encoding="utf-8"), in_source):
            if rule != "repeats" or "--repeats" in sys.argv:
                print(f"{path}:{line}: [{rule}] {words}")
                found += 1
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
