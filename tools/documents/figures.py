"""Check the figures of a document against the files of benchmarks/results.

Where a figure stands says where it is from:

- in the text of a link to a results file: the JSON pointer behind `#` leads to its value;
- in the text of a link to a section of a document: the figure stands there too;
- in a row of a table whose last column is headed `from`: that column links its values. A link that
  is named as a column is for that column only. The first cell says what was measured, and is not
  read;
- in another table of a section that links results of studies: in their reports. A row belongs to
  one arm; the row, or else each column of the table, belongs to one grid point;
- elsewhere, if it has a decimal point, a sign or a `%`: in the output of a command of the section
  or, in prose, in a table of the section. In backticks stand settings and constants, which nobody
  measured.

A figure agrees with a value that rounds to it. `65%` is 0.65 or 65, and `1.40 times` a value or the
ratio of two values with one path in two places. What follows `=` is computed from what is before.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.study.analysis import common_accuracy, own_accuracy, point_name
from benchmarks.study.report import report_tables
from benchmarks.study.running import opened

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"!?\[((?:[^][]|\[[^][]*\])*)\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
FIGURE = re.compile(
    r"(?<![\w.])([+-]?)(\d[\d,]*\d|\d)(\.\d+)?(?:e(-?\d+))?(%| times)?(?!\w|\.\d|,\d)"
)
INTERVAL = re.compile(r"\[([+-]?[\d.]+), ([+-]?[\d.]+)\]")
EQUATION = re.compile(
    r"(?<![\w.])(\(?\d(?:[\d.,() +*/-]| x )*[-+*/x] (?:[\d.,() +*/-]| x )*\d\)?)"
    r" = (\d[\d,]*(?:\.\d+)?(?:%| times)?)"
)
CLAIM = re.compile(r"[.%]|^[+-]")
NO_CLAIM = re.compile(  # code, versions, settings, and sizes of models
    r"`[^`]*`(?: = -?[\d.]+)?|\b2\^-?\d+"
    r"|\b(?:torch|Triton|vLLM|CUDA|cuDNN|Python|Llama|Mistral|Apache-|[Nn]oise|arXiv|sec\.)[ -]?"
    r"[\d.]+(?:(?: to|,) [\d.]+)*"
    r"|[\d.]+ (?:and [\d.]+ )?[mb]illion|[\d.]+e9 parameters|95%(?= interval)"
)
COMMAND = re.compile(r"^    python -m (benchmarks\.study\.(?:.*\\\n)*.*)", re.MULTILINE)
Values = dict[tuple[str, ...], list[float]]


@dataclass(frozen=True)
class Figure:
    """A figure of a document; `step` is one unit of its last digit."""

    text: str
    value: float
    step: float
    unit: str

    def agrees(self, values: Iterable[float]) -> bool:
        half, signed = 0.500001 * self.step, self.text[0] in "+-"
        return any(
            abs(self.value - value) <= half or (not signed and abs(self.value + value) <= half)
            for value in values
        )


def figures_of(text: str) -> list[Figure]:
    """Return the figures of a text."""
    found = []
    for match in FIGURE.finditer(text):
        sign, digits, decimals, power, unit = (group or "" for group in match.groups())
        scale = 10.0 ** int(power or 0)
        value = float(sign + digits.replace(",", "") + decimals) * scale
        step = scale * 10.0 ** -max(len(decimals) - 1, 0)
        found.append(Figure(match.group(), value, step, unit))
    return found


# ---------------------------------------------------------------------------------------- results


@functools.cache
def content(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def listed(index: Path) -> dict[Path, list[str]]:
    """Return date, commit and command of each file in the table of a README of results."""
    table = index.read_text(encoding="utf-8").partition("| file | date | commit | command |")[2]
    rows = [row.strip("|").split(" | ") for row in table.strip().splitlines()[1:]]
    return {
        (index.parent / LINK.findall(file)[0][1]).resolve(): [cell.strip(" `") for cell in cells]
        for file, *cells in rows
    }


def commits_of(path: Path) -> str:
    """Return the commits that a results file says were measured."""
    if path.suffix == ".txt":
        return re.findall(r", commit (\w+)", path.read_text(encoding="utf-8"))[0]
    found = content(path)
    return ", ".join(filter(None, [*found.get("commits", []), found.get("commit")]))


def values_at(path: Path, pointer: str) -> Values:
    """Return the numbers below a JSON pointer by their paths, without the index of a list there."""
    node = content(path)
    for step in pointer.strip("/").split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        node = node[int(step)] if isinstance(node, list) else node[step]
    values: Values = {}
    below: list[tuple[tuple[str, ...], Any]] = [((), one) for one in as_list(node)]
    while below:
        place, one = below.pop()
        if isinstance(one, dict):
            below += [((*place, name), value) for name, value in one.items()]
        elif isinstance(one, list):
            below += [((*place, str(i)), value) for i, value in enumerate(one)]
        elif isinstance(one, int | float) and not isinstance(one, bool):
            values.setdefault(place, []).append(float(one))
    return values


def as_list(node: Any) -> list[Any]:
    return node if isinstance(node, list) else [node]


def is_of(figure: Figure, values: Values) -> bool:
    """Say whether a figure is one of the values of results, or a ratio of two."""
    found = list(itertools.chain.from_iterable(values.values()))
    if figure.unit == "%":
        found += [100 * value for value in found]
    if figure.unit == " times":
        pairs = itertools.chain(*(itertools.permutations(same, 2) for same in values.values()))
        found += [a / b for a, b in pairs if b]
    return figure.agrees(found)


def errors_at(document: Path, text: str, sources: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the figures of a text that are not at the places (file, JSON pointer) of results."""
    values: Values = {}
    for path, pointer in sources:
        try:
            found = values_at((document.parent / path).resolve(), pointer) if pointer else {}
        except (KeyError, IndexError, ValueError):
            yield f"{path} has nothing at {pointer}"
            continue
        for place, numbers in found.items():
            values.setdefault(place, []).extend(numbers)
    yield from wrong_sums(text)
    for figure in figures_of(EQUATION.sub(r"\1", text)) if values else []:
        if not is_of(figure, values):
            yield f"{figure.text} is not in {sources}"


def linked_errors(document: Path, text: str) -> Iterator[str]:
    """Yield the figures in links to results that are not at the place that the link names."""
    for linked, path, pointer in results_linked(text):
        yield from errors_at(document, linked, [(path, pointer)])
        if not pointer and figures_of(linked):
            yield f"{linked}: name the place in {path}"


def wrong_sums(text: str) -> Iterator[str]:
    """Yield each `terms = result` of a text that does not hold."""
    for terms, result in EQUATION.findall(text):
        value = float(eval(terms.replace(",", "").replace("x", "*")))
        if not is_of(figures_of(result)[0], {(): [value]}):
            yield f"{terms} is not {result}"


def unclaimed(text: str) -> str:
    """Return a text without links, pictures, results of sums, settings, constants and versions."""
    return NO_CLAIM.sub("", EQUATION.sub(r"\1", re.sub(r"<img.*?>", "", LINK.sub("", text))))


def results_linked(text: str) -> list[tuple[str, str, str]]:
    """Return text, file and pointer of each link to results."""
    return [
        link for link in LINK.findall(text) if re.search(r"benchmarks/results/.*\.json$", link[1])
    ]


# ---------------------------------------------------------------------------------------- studies


@dataclass
class Bucket:
    """Figures that belong together: those of an arm at a grid point, or of a section's tables."""

    values: set[float] = field(default_factory=set)
    intervals: set[tuple[float, float]] = field(default_factory=set)

    @classmethod
    def of(cls, *texts: str) -> Bucket:
        bucket = cls()
        for text in texts:
            bucket.add(text)
        return bucket

    def add(self, text: str) -> None:
        self.intervals |= {(float(low), float(high)) for low, high in INTERVAL.findall(text)}
        self.values |= {figure.value for figure in figures_of(INTERVAL.sub("", text))}

    def missing(self, text: str) -> list[str]:
        """Return the figures of a text that are not here; the ends of an interval are one."""
        intervals, figures = claims_of(text)
        wrong = [
            f"[{low.text}, {high.text}]"
            for low, high in intervals
            if not any(low.agrees([a]) and high.agrees([b]) for a, b in self.intervals)
        ]
        return wrong + [one.text for one in figures if not one.agrees(self.values)]


@functools.cache
def claims_of(text: str) -> tuple[list[list[Figure]], list[Figure]]:
    """Return the intervals of a text, and its other figures that are checked outside of links."""
    intervals = [[figures_of(end)[0] for end in ends] for ends in INTERVAL.findall(text)]
    rest = figures_of(INTERVAL.sub("", text))
    return intervals, [figure for figure in rest if CLAIM.search(figure.text)]


@functools.cache
def reports_of(path: Path) -> dict[str, dict[str, Bucket]]:
    """Return what the reports of a study say, by grid point and arm.

    There is a report for each arm with which a table of the documents compares the others.
    """
    definition, results = opened(path)
    found: dict[str, dict[str, Bucket]] = {}
    for run in results.runs.values():
        bucket = found.setdefault(point_name(run.point), {}).setdefault(run.arm, Bucket())
        accuracies = (own_accuracy(run), common_accuracy(run))
        bucket.values |= {100 * value for value in accuracies if value is not None}
    for reference in {definition.reference, "bf16", "unified", "keys-e4m3"} & set(definition.arms):
        definition, results = opened(path, reference)
        arms = {definition.label(arm): arm for arm in definition.arms}
        for table in report_tables(definition, results):
            title = table.title.partition(": ")[2].removesuffix(", in its own precision")
            for row in table.rows if "arm" in table.head else []:
                cells = dict(zip(table.head, row, strict=True))
                arm = arms[cells["arm"]]
                bucket = found.setdefault(cells.get("point", title), {}).setdefault(arm, Bucket())
                bucket.add("" if table.title.startswith("Seconds") else " | ".join(row))
    return found


def wrong_rows(
    rows: Sequence[Sequence[str]], paths: Iterable[Path], outputs: Sequence[str]
) -> Iterator[tuple[int, str]]:
    """Yield the number of each wrong row of a table of studies, and its figures."""
    spots = {(path, point): arms for path in paths for point, arms in reports_of(path).items()}
    spots |= {(ROOT, str(i)): {"": Bucket.of(output)} for i, output in enumerate(outputs)}
    fitting = [
        {
            column: {
                (spot, arm)
                for spot in spots
                for arm in spots[spot]
                if not spots[spot][arm].missing(cell)
            }
            for column, cell in enumerate(cells)
            if any(claims_of(cell))
        }
        for cells in rows
    ]
    spread = [bool(cells) and not set.intersection(*cells.values()) for cells in fitting]
    of_column = {column: set(spots) for cells in fitting for column in cells}
    for cells in fitting if any(spread) else []:
        arms = best_arms(cells.values())
        for column, cell in cells.items():
            of_column[column] &= {spot for spot, arm in cell if (spot[0], arm) in arms}
    for number, cells in enumerate(fitting):
        if spread[number] and not all(of_column[column] for column in cells):
            none = [rows[number][column] for column, cell in cells.items() if not cell]
            yield number, f"{none or list(rows[number])} are not of one arm in the reports"


def best_arms(cells: Iterable[set[tuple[tuple[Path, str], str]]]) -> set[tuple[Path, str]]:
    """Return the arms of each file in which most cells of a row are."""
    counts = Counter(arm for cell in cells for arm in {(spot[0], arm) for spot, arm in cell})
    most = {path: max(n for (other, _), n in counts.items() if other == path) for path, _ in counts}
    return {arm for arm, n in counts.items() if n == most[arm[0]]}


@functools.cache
def printed(command: str) -> str:
    """Return what a script prints; `command` is a shell's, in which $R is the studies' folder."""
    shell = f"R=benchmarks/results/study; printf '%s\\n' {command}"
    expanded = subprocess.run(
        ["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, check=True
    )
    script, *words = expanded.stdout.splitlines()
    module = importlib.import_module(script)
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(io.StringIO()) as output:
        module.main(words)
    return output.getvalue()


# -------------------------------------------------------------------------------------- documents


@dataclass
class Section:
    """A part of a document below one heading; a part of a part has its parent's files as well."""

    first: int
    text: str
    files: list[Path]

    def tables(self) -> Iterator[tuple[int, list[list[str]]]]:
        """Yield the number of the first line of each table, and its cells."""
        for match in re.finditer(r"(?:^\|.*\n?)+", self.text, re.MULTILINE):
            lines = match.group().splitlines()
            number = self.first + self.text.count("\n", 0, match.start())
            yield (
                number,
                [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines],
            )


def sections_of(document: Path, text: str) -> Iterator[Section]:
    """Yield the sections of a document, without fenced code."""
    text = re.sub(
        r"^```.*?^```", lambda code: "\n" * code.group().count("\n"), text, flags=re.M | re.S
    )
    first, parents = 1, []
    for part in re.split(r"^(?=##+ )", text, flags=re.MULTILINE):
        linked = [(document.parent / path).resolve() for _, path, _ in results_linked(part)]
        files = [path for path in dict.fromkeys(linked) if "definition" in content(path)]
        if not part.startswith("###"):
            parents = files
        yield Section(first, part, files or parents)
        first += part.count("\n")


def table_errors(
    document: Path, rows: list[list[str]], files: list[Path], outputs: Sequence[str]
) -> Iterator[tuple[int, str]]:
    """Yield the number of each wrong row of a table, and the error."""
    rest = [[unclaimed(cell) for cell in cells[1:]] for cells in rows[2:]]
    if rows[0][-1] == "from":
        for number, cells in enumerate(rows[2:], 2):
            links = results_linked(cells[-1])
            whole = [(document.parent / path).resolve() for _, path, place in links if not place]
            if not links or any("definition" not in content(path) for path in whole):
                yield number, "the row names no place in a file"
            elif whole:
                wrong = wrong_rows([rest[number - 2]], whole, [])
                yield from ((number, error) for _, error in wrong)
            for head, cell in zip(rows[0][1:-1], cells[1:-1], strict=True):
                own = [link for link in links if link[0] == head.strip("`")] or links
                sources = [(path, pointer) for _, path, pointer in own]
                for error in errors_at(document, LINK.sub("", cell), sources):
                    yield number, error
        return
    if "default" in rows[0]:  # a table of settings
        return
    for number, cells in enumerate(rows):
        yield from ((number, error) for cell in cells for error in wrong_sums(cell))
        yield from ((number, error) for error in linked_errors(document, " | ".join(cells)))
    if files or outputs:
        yield from ((number + 2, error) for number, error in wrong_rows(rest, files, outputs))
        return
    for number, cells in enumerate(rest, 2):
        yield from ((number, f"{one} has no file") for one in Bucket().missing(" | ".join(cells)))


def repeated_errors(document: Path, line: str) -> Iterator[str]:
    """Yield the figures in links to a section of a document that the section does not have."""
    for text, path, anchor in LINK.findall(line):
        target = document.parent / path if path else document
        if target.suffix != ".md" or not anchor:
            continue
        there = Bucket()
        for section in sections_of(target, target.read_text(encoding="utf-8")):
            heading = section.text.partition("\n")[0].strip("# ").lower()
            if re.sub(r"[^\w -]", "", heading).replace(" ", "-") == anchor:
                there.add(LINK.sub(r"\1", section.text))
        yield from (f"{one} is not in {path}#{anchor}" for one in there.missing(text))


def errors_of(document: Path) -> Iterator[str]:
    """Yield what is wrong with the figures of a document, each as `line: error`."""
    for section in sections_of(document, document.read_text(encoding="utf-8")):
        yield from section_errors(document, section)


def section_errors(document: Path, section: Section) -> Iterator[str]:
    """Yield what is wrong with the figures of a section, each as `line: error`."""
    outputs = [printed(command) for command in COMMAND.findall(section.text)]
    shown = Bucket.of(*outputs)
    for first, rows in section.tables():
        for row, error in table_errors(document, rows, section.files, outputs):
            yield f"{first + row}: {error}"
        for row, cells in enumerate(rows, first):
            shown.add(LINK.sub("", " | ".join(cells)))
            yield from (f"{row}: {e}" for e in repeated_errors(document, " | ".join(cells)))
    prose = re.sub(r"^(?:\||    ).*", "", section.text, flags=re.MULTILINE)
    for match in re.finditer(r"(?:^.+\n?)+", prose, re.MULTILINE):
        number = section.first + prose.count("\n", 0, match.start())
        for error in prose_errors(document, match.group().replace("\n", " "), shown):
            yield f"{number}: {error}"


def prose_errors(document: Path, text: str, shown: Bucket) -> Iterator[str]:
    """Yield what is wrong with the figures of a paragraph, which its section may show in tables."""
    yield from linked_errors(document, text)
    yield from repeated_errors(document, text)
    yield from wrong_sums(text)
    missing = shown.missing(unclaimed(text))
    yield from (f"{one} is in no table of the section" for one in missing)
