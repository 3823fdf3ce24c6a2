"""Tests that everything that a document names exists: links, headings, files and modules."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "jetrl"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "LOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
HISTORY = ROOT / "LOG.md"  # names files as they were on the day of an entry

# Files that a reader is to write, not files of this repository; nor is a path with NAME in it.
READERS_FILES = {"file.py", "mine.py", "my_task.py", "my/task.py"}

FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", re.MULTILINE)
FOLDERS = "benchmarks|docs|examples|recipes|src|tests|tools"
FILE = re.compile(rf"(?<![\w./-])(?:(?:{FOLDERS})/[\w./-]*\w/?|[\w./-]*\w\.py\b)")
MODULE = re.compile(r"\bjetrl(?:\.\w+)+")


def text_of(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def without_fences(text: str) -> str:
    """The text without fenced blocks, whose lines are replaced by empty ones."""
    return FENCED.sub(lambda match: "\n" * match.group().count("\n"), text)


def anchors(document: Path) -> set[str]:
    text = without_fences(text_of(document))
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def anchor(heading: str) -> str:
    """The fragment by which GitHub links a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_links(document: Path) -> Iterator[str]:
    for inline, reference in LINK.findall(without_fences(text_of(document))):
        path, _, fragment = (inline or reference).partition("#")
        target = document.parent / path if path else document
        if "://" in path or path.startswith("mailto:"):
            continue
        if not target.exists():
            yield f"{path} does not exist"
        elif target.suffix == ".md" and fragment and fragment not in anchors(target):
            yield f"{target.name} has no heading #{fragment}"


def codes(document: Path) -> list[str]:
    return INLINE.findall(without_fences(text_of(document)))


def missing_files(document: Path) -> Iterator[str]:
    """Missing files among those named in inline code, or below a folder of the repository."""
    named = {match for code in codes(document) for match in FILE.findall(code)}
    anywhere = FILE.findall(text_of(document))
    named |= {match for match in anywhere if re.match(rf"(?:{FOLDERS})/", match)}
    for name in sorted(name for name in named - READERS_FILES if "NAME" not in name):
        if not any((folder / name).exists() for folder in (ROOT, SOURCE)):
            yield f"{name} exists neither in the repository nor in src/jetrl"


def missing_names(document: Path) -> Iterator[str]:
    """Names of jetrl in inline code and imports of Python blocks that cannot be imported."""
    names = {match for code in codes(document) for match in MODULE.findall(code)}
    for language, block in FENCED.findall(text_of(document)):
        if language == "python":
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("jetrl"):
                    names |= {f"{node.module}.{alias.name}" for alias in node.names}
    for name in sorted(names):
        if not exists(name):
            yield f"{name} cannot be imported"


def exists(name: str) -> bool:
    """Return whether a dotted name is a module of jetrl, or reached by attributes from one."""
    try:
        return pkgutil.resolve_name(name) is not None
    except (ImportError, AttributeError):
        return False


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_documents_name_exists(document: Path) -> None:
    missing = [] if document == HISTORY else [*missing_files(document), *missing_names(document)]
    assert [*broken_links(document), *missing] == []


def test_scripts_of_benchmarks_import_names_that_exist() -> None:
    for script in (ROOT / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jetrl"):
                for alias in node.names:
                    assert exists(f"{node.module}.{alias.name}"), f"{script}:{node.lineno}"


# Each message is the first cell of a row; `...` stands for inserted values.
MESSAGE = re.compile(r"^\| `(.+?)` \|", re.MULTILINE)
INSERTED = re.compile(r"%[.\d]*[a-z]|(?:\.\.\.)+")


def texts_of_sources() -> Iterator[str]:
    """Every text of jetrl's sources on one line, with `...` for inserted values."""
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            values = [part.value if isinstance(part, ast.Constant) else "..." for part in parts]
            yield INSERTED.sub("...", "".join(map(str, values)).replace("\n", " "))


def test_messages_of_the_troubleshooting_page_are_those_of_the_sources() -> None:
    page = text_of(ROOT / "docs" / "troubleshooting.md")
    messages = MESSAGE.findall(page)
    rows = len(re.findall(r"^\| (?!---|message)", page, re.MULTILINE))
    assert 50 < rows == len(messages)
    known = "\n".join(texts_of_sources())
    assert [text for text in messages if text.removesuffix("...") not in known] == []
