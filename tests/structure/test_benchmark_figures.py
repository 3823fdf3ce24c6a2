"""Every figure that a document takes from benchmarks/results is the one in the file that it names.

A document names the place of a figure by a link to the JSON file with a JSON pointer behind `#`:

- in a sentence, the link's text holds the figure: `[55.8 s](.../step_2048.json#/rows/1/step_s)`;
- in a table whose last column is headed `from`, that column links the place, and the figures of the
  row's other cells (but the first, which says what was measured) are among the values there.

A figure agrees with a value if rounding the value to the figure's decimals gives the figure. `65%`
is the value 0.65 or 65, and `1.40 times` a value or the ratio of two values that have one key.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]*benchmarks/results/[^)\s#]*)(?:#(/[^)\s]*))?\)")
FIGURE = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)(?:e(-?\d+))?(%| times)?")
Value = tuple[str, float]


@functools.cache
def content(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def values_at(path: Path, pointer: str) -> list[Value]:
    """The numbers at a JSON pointer and below it, each with the key that holds it."""
    node = content(path)
    key = ""
    for step in pointer.strip("/").split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        node = node[int(key)] if isinstance(node, list) else node[key]
    return list(numbers(key, node))


def numbers(key: str, node: Any) -> Iterator[Value]:
    if isinstance(node, dict):
        for name, below in node.items():
            yield from numbers(name, below)
    elif isinstance(node, list):
        for below in node:
            yield from numbers(key, below)
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield key, float(node)


def agrees(figure: re.Match[str], values: list[Value]) -> bool:
    digits, exponent, unit = figure.groups()
    scale = 10.0 ** int(exponent or 0)
    shown = float(digits.replace(",", "")) * scale
    half = 0.5000001 * scale * 10.0 ** -len(digits.partition(".")[2])
    candidates = [value for _, value in values]
    if unit == "%":
        candidates += [100 * value for value in candidates]
    if unit == " times":
        candidates += [
            a / b for (k, a), (j, b) in itertools.permutations(values, 2) if k == j and b
        ]
    return any(abs(value - shown) <= half for value in candidates)


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def errors_of(document: Path) -> Iterator[str]:
    """Return the errors in the figures of a document, each as `line: message`."""
    head: list[str] = []
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("|"):
            head = []
            texts = [(text, [(path, pointer)]) for text, path, pointer in LINK.findall(line)]
        elif not head:
            head = cells_of(line)
            continue
        elif head[-1] == "from":
            if set(line) <= set("|- "):
                continue
            cells = cells_of(line)
            sources = [(path, pointer) for _, path, pointer in LINK.findall(cells[-1])]
            texts = [(LINK.sub("", cell), sources) for cell in cells[1:-1]]
            if not sources:
                yield f"{number}: the row names no file"
        else:
            texts = [(text, [(path, pointer)]) for text, path, pointer in LINK.findall(line)]
        for text, sources in texts:
            values: list[Value] = []
            for path, pointer in sources:
                if not pointer:
                    continue
                try:
                    values += values_at((document.parent / path).resolve(), pointer)
                except (KeyError, IndexError, ValueError):
                    yield f"{number}: {path} has nothing at {pointer}"
            if values:
                for figure in FIGURE.finditer(text):
                    if not agrees(figure, values):
                        yield f"{number}: {figure.group()} is not in {sources}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_results_that_a_document_names_exist(document: Path) -> None:
    for _, path, _ in LINK.findall(document.read_text(encoding="utf-8")):
        assert (document.parent / path).exists(), f"{document.name} names {path}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_figures_are_those_of_the_file(document: Path) -> None:
    assert list(errors_of(document)) == []


def test_every_table_of_benchmarks_names_its_files() -> None:
    lines = BENCHMARKS.read_text(encoding="utf-8").splitlines()
    heads = [above for above, below in itertools.pairwise(lines) if below.startswith("| ---")]
    assert [head for head in heads if cells_of(head)[-1] != "from"] == [FILES_HEAD]


FILES_HEAD = "| file | date | command |"


def test_every_file_of_results_is_listed_with_its_date_and_command() -> None:
    lines = iter(BENCHMARKS.read_text(encoding="utf-8").splitlines())
    rows = list(itertools.takewhile(str.strip, itertools.dropwhile(FILES_HEAD.__ne__, lines)))[2:]
    listed = {}
    for file, date, command in map(cells_of, rows):
        found = LINK.search(file)
        assert found, file
        listed[(BENCHMARKS.parent / found.group(2)).resolve()] = (date, command.strip("`"))
    assert sorted(listed) == sorted(path for path in RESULTS.rglob("*") if path.is_file())
    for path, (date, command) in listed.items():
        text = path.read_text(encoding="utf-8")
        assert f"{date}" in text, f"{path.name} is not of {date}"
        assert json.dumps(command.removesuffix(" ..."))[1:-1] in text, f"{path.name}: {command}"


@pytest.mark.parametrize(
    ("figure", "values", "right"),
    [
        ("7.44", [("a", 7.444)], True),
        ("7.45", [("a", 7.444)], False),
        ("65%", [("a", 0.645)], True),
        ("63%", [("a", 0.645)], False),
        ("18,229", [("a", 18229.0)], True),
        ("4.1e-05", [("a", 4.13e-5)], True),
        ("1.40 times", [("s", 80.46), ("s", 57.38)], True),
        ("1.40 times", [("s", 80.46), ("t", 57.38)], False),
    ],
)
def test_what_agrees(figure: str, values: list[Value], right: bool) -> None:
    match = FIGURE.fullmatch(figure)
    assert match
    assert agrees(match, values) is right
