"""Every figure of README and docs that comes from benchmarks/results is the one in the file."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.documents.figures import (
    CLAIM,
    FIGURE,
    NO_CLAIM,
    ROOT,
    Section,
    commits_of,
    errors_of,
    figures_of,
    listed,
    results_linked,
    section_errors,
    sections_of,
)

RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIRST_WITH_COMMIT = "2026-11-27"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_figures_are_those_of_the_files(document: Path) -> None:
    for _, path, _ in results_linked(document.read_text(encoding="utf-8")):
        assert (document.parent / path).exists(), f"{document.name} names {path}"
    assert list(errors_of(document)) == []


def test_tables_name_their_files_and_files_are_listed_with_date_commit_and_command() -> None:
    lines = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()
    heads = [above for above, below in itertools.pairwise(lines) if below.startswith("| ---")]
    assert [head for head in heads if not head.endswith("| from |")] == []
    index = RESULTS / "README.md"
    rows = listed(index)
    assert sorted(rows) == sorted(f for f in RESULTS.rglob("*") if f.is_file() and f != index)
    for path, (date, commit, command) in rows.items():
        named, text = commits_of(path), path.read_text(encoding="utf-8")
        recorded = date < FIRST_WITH_COMMIT and re.fullmatch("in `[0-9a-f]{8}", commit)
        assert commit == named if named else recorded, f"{path.name}: {named or 'no commit'}"
        assert f"{date}" in text, f"{path.name} is not of {date}"
        assert json.dumps(command.removesuffix(" ..."))[1:-1] in text, f"{path.name}: {command}"


UNCHECKED = re.compile(  # first cells and links of tables, targets of links, pictures, code
    rf"^\|[^|]*\||^    .*|!\[[^]]*\]|\]\([^)]*\)|\| \[[^|]*\|$|<img.*?>|{NO_CLAIM.pattern}",
    re.MULTILINE,
)


def changed(section: Section) -> Iterator[Section]:
    """Yield the section with one of its figures 10% larger or smaller, in turn."""
    visible = UNCHECKED.sub(lambda match: " " * len(match.group()), section.text)
    for turn, match in enumerate(FIGURE.finditer(visible)):
        (figure,) = figures_of(match.group())
        decimals = len(match[3] or " ") - 1
        number = figure.value / (10.0 ** int(match[4] or 0)) * (1.1 if turn % 2 else 0.9)
        text = f"{number:{'+' if match[1] else ''},.{decimals}f}"
        text = (text if "," in match[2] else text.replace(",", "")) + match.group()[
            len(match[1]) :
        ][len(match[2]) + len(match[3] or "") :]
        if CLAIM.search(match.group()) and text != match.group():
            whole = section.text[: match.start()] + text + section.text[match.end() :]
            yield dataclasses.replace(section, text=whole)


def test_figures_that_are_wrong_by_a_tenth_are_refused() -> None:
    """At least 19 of 20; the others happen to be another figure of their row or their section."""
    mutants = [
        (document, mutant)
        for document in DOCUMENTS
        for section in sections_of(document, document.read_text(encoding="utf-8"))
        for mutant in changed(section)
    ]
    some = mutants[::5]
    accepted = [mutant for mutant in some if not any(section_errors(*mutant))]
    assert len(accepted) <= len(some) / 20
