"""Raw text: the documents of text files and of a text column, read in spans.

A span holds whole documents, if they are not larger than it. It is read at once, and is the unit of
memory and of the shuffle: training takes the spans in random order, and the documents of each in
random order. A text file is one document, unless lines with the separator divide it. A document
that is larger than a span is read as several, and only the last one ends.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jetrl.errors import UserError
from jetrl.files import MOST_TEXT
from jetrl.randomness import derive_seed
from jetrl.tasks.base import HeldOutShare, Task
from jetrl.tasks.dataset import field_value, parts_of
from jetrl.tasks.rows import (
    SUFFIXES,
    Span,
    check_whole,
    decoded,
    line_spans,
    row_spans,
    span_lines,
    span_rows,
    split_files,
)
from jetrl.tasks.splits import content_key
from jetrl.types import Prompt

_TEXT_SUFFIXES = (".txt", ".md")
_READ = (*_TEXT_SUFFIXES, *SUFFIXES)
_FORMS = f"give a file of text, or a folder of such files: {', '.join(_READ)}"
_SPAN = 2**25  # bytes of documents that are shuffled together
_UNDIVIDED = 2**20  # half of the bytes at which a text file without separators is cut


class Document(NamedTuple):
    """A document, or a part of one that another part continues (`ends` is False)."""

    text: str
    where: str
    ends: bool = True


@dataclass(frozen=True)
class TextSplit:
    """The documents of a split, which were all read once.

    `spans` are those that have any. `digest` is of all texts and of where spans end, 16 hex digits.
    `read` returns the documents of a span, in data order.
    """

    spans: tuple[Span, ...]
    documents: int
    characters: int
    digest: str
    read: Callable[[Span], list[Document]]

    def __iter__(self) -> Iterator[Document]:
        for span in self.spans:
            yield from self.read(span)


class RawText(Task):
    """Raw text to continue pre-training on, with `jetrl sft`; it has no prompts.

    Args:
        path: A file (.txt, .md, .jsonl, .parquet, .json, .csv, .tsv), or a folder of them. In a
            folder with files of a split `train`, splits are named by files; in another one, all
            files, also those of inner folders, are one set.
        column: Field of a row with the text of a document, by name or dotted path.
        separator: The line between two documents of a text file, such as <|endoftext|>; by default
            a file is one document.
        test_share: Fraction of the documents in the `test` split, if the data has no splits.
        seed: Seed of the train-test split.
    """

    name = "text"

    def __init__(
        self,
        path: str,
        column: str = "text",
        separator: str | None = None,
        test_share: HeldOutShare = 0.1,
        seed: int = 0,
    ) -> None:
        self.path, self.column, self.separator = Path(path).expanduser(), column, separator
        self.test_share, self.seed = test_share, seed
        self._found_separator = False
        if not self.path.exists():
            raise UserError(f"task.path = {path}: no such file or folder; {_FORMS}")
        folder = self.path.is_dir()
        named = split_files(self.path, _READ) if folder else {}
        self._files = named if "train" in named else {}
        self.splits = tuple(self._files) or ("train", "test")

    def prompts(self, split: str) -> Iterable[Prompt]:
        raise UserError("task text has no prompts: train on its documents with `jetrl sft`")

    def split(self, name: str) -> TextSplit:
        """Return a split; raise UserError, with file and line, for what cannot be read as text."""
        self.check_split(name)
        if self._files:
            check_whole(str(self.path), name, self._files[name])
        files = self._files.get(name) or self._all_files()
        self._check_suffixes()
        self._found_separator = False

        inherited: dict[Span, bool] = {}  # spans that continue a document are in its split

        def found(span: Span) -> Iterator[tuple[Document, bool]]:
            belongs = inherited.get(span)
            for document in self._documents(span):
                if belongs is None:
                    belongs = bool(self._files) or self._split_of(document.text) == name
                yield document, belongs
                belongs = None

        def read(span: Span) -> list[Document]:
            return [document for document, belongs in found(span) if belongs]

        spans, documents, characters, digest = [], 0, 0, hashlib.blake2b(digest_size=8)
        for file in files:
            is_empty, last = True, False
            continues = False
            for span in self._spans(file):
                before = documents
                if continues:
                    inherited[span] = last
                for document, last in found(span):
                    is_empty = False
                    if last:
                        documents += 1
                        characters += len(document.text)
                        digest.update(hashlib.blake2b(document.text.encode()).digest())
                continues = span.cut and not is_empty
                if documents > before:
                    spans.append(span)
                    digest.update(b"span")  # a checkpoint's place counts them
            if is_empty:
                raise UserError(f"{file}: no text in it; remove it, or fill it")
        if self.separator is not None and not self._found_separator:
            raise UserError(
                f"task.options.separator = {self.separator!r}: no line of a text file says only "
                f"this (split {name!r}); correct it, leave it out, or end a document with it"
            )
        if not spans:
            other = "lower it" if name == "train" else "set eval.every = 0 to hold nothing out"
            raise UserError(
                f"task.path = {self.path}: no document in split {name!r} (task.options.test_share "
                f"= {self.test_share:g}); add documents, or a file for each split, or {other}"
            )
        return TextSplit(tuple(spans), documents, characters, digest.hexdigest(), read)

    def _all_files(self) -> list[Path]:
        if self.path.is_dir():
            files = sorted(file for file in self.path.rglob("*") if file.suffix in _READ)
        else:
            files = [self.path] if self.path.suffix in _READ and self.path.exists() else []
        if not files:
            self._check_suffixes()
            raise UserError(f"task.path = {self.path}: no file of text here; {_FORMS}")
        return files

    def _check_suffixes(self) -> None:
        """Raise UserError for a file such as a.TXT, which would not be read."""
        found: Iterable[Path] = [self.path]
        if self._files:
            found = itertools.chain(self.path.glob("*"), (self.path / "data").glob("*"))
        elif self.path.is_dir():
            found = self.path.rglob("*")
        for file in found:
            suffix = file.suffix.lower()
            if suffix != file.suffix and suffix in _READ:
                name = file.with_suffix(suffix).name
                raise UserError(f"{file}: not read; rename it to {name}, or remove it")

    def _split_of(self, text: str) -> str:
        """Return the split of a document by its text, so that equal ones are in the same."""
        drawn = derive_seed(self.seed, content_key(text).hex()) / 2**63
        return "test" if drawn < self.test_share else "train"

    def _spans(self, file: Path) -> Iterator[Span]:
        if file.suffix not in _TEXT_SUFFIXES:
            return row_spans(file, _SPAN)
        size = _UNDIVIDED if self.separator is None else _SPAN
        return line_spans(file, size, self._separates)

    def _separates(self, line: bytes) -> bool:
        return self.separator is not None and line.strip() == self.separator.strip().encode()

    def _documents(self, span: Span) -> Iterator[Document]:
        """Yield the documents of a span that are not empty."""
        found = self._texts(span) if span.file.suffix in _TEXT_SUFFIXES else self._rows(span)
        for document in found:
            if "\0" in document.text:
                raise UserError(f"{document.where}: a NUL character, so not text; remove it")
            if len(document.text) > MOST_TEXT:
                raise UserError(
                    f"{document.where}: a document of {len(document.text):,} characters, and at "
                    f"most {MOST_TEXT:,} are read; divide it"
                )
            if document.text.strip():
                yield document

    def _rows(self, span: Span) -> Iterator[Document]:
        why = "task.options.column names it"
        for row, where in span_rows(span):
            text = field_value(row, self.column, where, why)
            if not isinstance(text, str):
                raise UserError(
                    f"{where}: field {self.column!r} is {text!r:.60}, not a text; name the field "
                    f"with the text in task.options.column{parts_of(self.column, text)}"
                )
            yield Document(text, where)

    def _texts(self, span: Span) -> Iterator[Document]:
        lines: list[str] = []
        where = f"{span.file}, line {span.line}"
        for line, number in span_lines(span):
            text = decoded(line, f"{span.file}, line {number}", number == 1)
            if self._separates(line):
                self._found_separator = True
                yield Document("".join(lines), where)
                lines, where = [], f"{span.file}, line {number + 1}"
            else:
                lines.append(text)
        yield Document("".join(lines), where, ends=not span.cut)
