"""Data rows: objects with fields, from JSONL, JSON, CSV, Parquet or the `datasets` package.

Each row comes with its file and line, or its number, for error messages.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import importlib
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from jetrl.errors import UserError
from jetrl.files import MOST_TEXT
from jetrl.tasks.user_files import PREFIX, live
from jetrl.types.conversation import are_messages, without_nulls

Row = Mapping[str, Any]
SUFFIXES = (".jsonl", ".parquet", ".json", ".csv", ".tsv")
FORMS = (
    "give a folder with train.jsonl and test.jsonl (or .json, .csv, .parquet), one such file, a "
    "folder that `datasets` has saved, or the name of a data set such as openai/gsm8k"
)
# train-00000-of-00002.parquet, optionally with the hash added by older versions of `datasets`
_SHARD = re.compile(r"-(\d+)-of-(\d+)(?:-[0-9a-f]{16})?$")
_SAVED = ("dataset_dict.json", "state.json")  # save_to_disk output: several splits, or one


def check_path(path: str) -> None:
    """Raise UserError for a path that neither exists nor can be a hub name."""
    if path.startswith(PREFIX):
        return
    location = Path(path).expanduser()
    local = location.suffix in SUFFIXES or path.startswith((".", "/", "~"))
    local = local or ("/" in path and location.parent.is_dir())  # a mistyped data/NAME
    if not location.exists() and (local or path.count("/") > 1):
        raise UserError(f"task.path = {path}: no such file or folder; {FORMS}")


def splits_of(path: str) -> list[str] | None:
    """Return a folder's splits; None for a single file or saved set, [] for a hub name."""
    if path.startswith(PREFIX):
        return None
    location = Path(path).expanduser()
    if location.is_file() or (location / "state.json").is_file():
        return None
    if (location / "dataset_dict.json").is_file():
        contents = json.loads((location / "dataset_dict.json").read_text(encoding="utf-8"))
        return [str(split) for split in contents["splits"]]
    if location.is_dir():
        return sorted(split_files(location), key=lambda split: (split != "train", split))
    return []


def split_files(folder: Path, suffixes: Sequence[str] = SUFFIXES) -> dict[str, list[Path]]:
    """Return the files of each split, such as train.jsonl, in a folder and in its folder `data`."""
    splits: dict[str, list[Path]] = {}
    for place in (folder, folder / "data"):
        for suffix in suffixes:
            for file in sorted(place.glob(f"*{suffix}")):
                splits.setdefault(_SHARD.sub("", file.stem), []).append(file)
    return splits


def check_whole(path: str, split: str, files: list[Path]) -> None:
    """Raise UserError unless the files are a single file or all shards of one set."""
    shards = [_SHARD.search(file.stem) for file in files]
    if shards == [None]:
        return
    where = f"task.path = {path}: split {split!r}"
    numbers = [int(shard[1]) for shard in shards if shard]
    totals = {int(shard[2]) for shard in shards if shard}
    total, first = max(totals, default=0), 0 if 0 in numbers else 1  # some count shards from 1
    kinds = {(file.parent, file.suffix) for file in files}
    distinct = len({*numbers}) == len(files) and all(n - first < total for n in numbers)
    if len(totals) > 1 or len(kinds) > 1 or not distinct:
        names = ", ".join(str(file.relative_to(path)) for file in files[:4])
        names += f" and {len(files) - 4} more" if len(files) > 4 else ""
        what = f"{where} has the files of several sets: {names}"
        raise UserError(f"{what}; keep those of one, or name one file as task.path")
    if len(numbers) < total:
        missing = next(n for n in itertools.count(first) if n not in numbers)
        what = f"{where} is incomplete: {len(numbers)} of {total} shards are here"
        name = _SHARD.sub(f"-{missing:05}-of-{total:05}", files[0].stem)
        raise UserError(f"{what}, and {name}{files[0].suffix} is not; complete the download")


def read_rows(path: str, split: str, config: str | None = None) -> Iterator[tuple[Row, str]]:
    """Return the rows of a split or file, each with its location: `data/train.jsonl, line 7`."""
    if path.startswith(PREFIX):
        data = live(path, "task.path")
        is_arrow = hasattr(data, "features")  # a `datasets` object
        rows = map(_of_arrow, data) if is_arrow else data
        return ((row, f"data, row {n}") for n, row in enumerate(rows))
    location = Path(path).expanduser()
    if location.is_dir() and any((location / name).is_file() for name in _SAVED):
        return _saved_rows(location, split)
    if location.is_dir():
        files = split_files(location)
        if split not in files:
            needs = f"{split}.jsonl (or {', '.join(SUFFIXES[1:])})"
            has = ", ".join(files) or "none"
            raise UserError(f"task.path = {path}: the folder has no {needs}; its splits: {has}")
        check_whole(str(location), split, files[split])
        return itertools.chain.from_iterable(map(file_rows, files[split]))
    return file_rows(location) if location.is_file() else _named_rows(path, split, config)


def file_rows(file: Path) -> Iterator[tuple[Row, str]]:
    """Return the rows of a file, each with its file and line, or its number."""
    if file.suffix == ".parquet":
        return _parquet_rows(file)
    if file.suffix in (".csv", ".tsv"):
        return _csv_rows(file)
    stripped = (line.removeprefix(codecs.BOM_UTF8).strip() for line in _lines(file))
    is_array = next(filter(None, stripped), b"").startswith(b"[")
    return _array_rows(file) if is_array else _jsonl_rows(file)


class Span(NamedTuple):
    """A part of a file that is read at once: whole lines, or a row group of Parquet.

    Attributes:
        start: First byte, or the number of the row group.
        line: Number of the first line, or row.
        cut: True if it ended only because of its size.
    """

    file: Path
    start: int
    stop: int
    line: int
    cut: bool = False


def line_spans(file: Path, size: int, ends: Callable[[bytes], bool]) -> Iterator[Span]:
    """Yield the lines of a file in spans of about `size` bytes.

    A span ends after a line for which `ends` is true, or after any line if it has twice the size.
    """
    start = stop = 0
    first = number = 1
    for number, line in enumerate(_lines(file), start=1):
        _check_length(line, f"{file}, line {number}")
        stop += len(line)
        if (ended := stop - start >= size and ends(line)) or stop - start >= 2 * size:
            yield Span(file, start, stop, first, cut=not ended)
            start, first = stop, number + 1
    if stop > start:
        yield Span(file, start, stop, first)


def row_spans(file: Path, size: int) -> Iterator[Span]:
    """Yield the spans of a file with rows: of JSONL and Parquet several, of other files one."""
    if file.suffix == ".jsonl":
        yield from line_spans(file, size, lambda line: True)
    elif file.suffix == ".parquet":
        with _parquet(file) as opened:
            counts = [opened.metadata.row_group(n).num_rows for n in range(opened.num_row_groups)]
        for number, end in enumerate(itertools.accumulate(counts)):
            yield Span(file, number, number + 1, line=end - counts[number])
    else:
        try:
            size = file.stat().st_size
        except OSError as error:
            raise _unreadable(file, error) from None
        yield Span(file, 0, size, 1)


def span_rows(span: Span) -> Iterator[tuple[Row, str]]:
    """Return the rows of a span, each with its file and line, or its number."""
    if span.file.suffix == ".jsonl":
        return _jsonl_rows(span.file, span)
    return (
        _parquet_rows(span.file, span) if span.file.suffix == ".parquet" else file_rows(span.file)
    )


def span_lines(span: Span) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a span, each with its number."""
    position = span.start
    for number, contents in enumerate(_lines(span.file, span.start), start=span.line):
        if position >= span.stop:
            return
        position += len(contents)
        yield contents, number


def _check_length(line: bytes, where: str) -> None:
    if len(line) > MOST_TEXT:
        raise UserError(f"{where}: longer than {MOST_TEXT / 2**20:g} MiB, too long for a line")


def _jsonl_rows(file: Path, span: Span | None = None) -> Iterator[tuple[Row, str]]:
    for contents, number in span_lines(span or Span(file, 0, sys.maxsize, 1)):
        where = f"{file}, line {number}"
        _check_length(contents, where)
        text = decoded(contents, where, number == 1)
        if text.strip():
            yield _object(_loads(text, file, number), where), where


def _array_rows(file: Path) -> Iterator[tuple[Row, str]]:
    text = decoded(b"".join(_lines(file)), str(file), True)
    for number, row in enumerate(_loads(text, file)):
        where = f"{file}, row {number}"
        yield _object(row, where), where


def _csv_rows(file: Path) -> Iterator[tuple[Row, str]]:
    csv.field_size_limit(MOST_TEXT)
    text = decoded(b"".join(_lines(file)), str(file), True)
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    # Quotes after a space would be literal, and a comma inside would end the field.
    lines = io.StringIO(text, newline="")
    reader = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        header = reader.fieldnames or ()
        if twice := [name for name in header if name and header.count(name) > 1]:
            raise UserError(f"{file}, line 1: several columns are called {twice[0]!r}; rename them")
        for row in reader:
            where = f"{file}, line {reader.line_num}"
            if None in row or None in row.values():
                raise UserError(
                    f"{where}: not one value for each of the header's {len(header)} columns"
                )
            yield row, where
    except csv.Error as error:
        raise UserError(f"{file}, after line {reader.line_num}: not CSV: {error}") from None


def decoded(contents: bytes, where: str, is_start: bool) -> str:
    """Return the text of UTF-8 bytes, without the byte-order mark of a file's start."""
    try:
        return contents.decode("utf-8-sig" if is_start else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text ({error.reason}); save it as UTF-8") from None


def _loads(text: str, file: Path, line: int = 1) -> Any:
    """Parse a JSON text that begins at a given line of a file."""
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        raise UserError(f"{file}, line {line}: {half!r} is half of a character") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{file}, line {line + error.lineno - 1}: not JSON: {error.msg} (column "
            f"{error.colno}); write one object per line, or one array of objects"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 1,000 brackets
        raise UserError(f"{file}, line {line}: not JSON that can be read: {error}") from None


def _object(row: Any, where: str) -> Row:
    if isinstance(row, dict):
        return row
    raise UserError(f"{where}: a JSON object is expected, not {str(row)[:40]!r}")


def _lines(file: Path, start: int = 0) -> Iterator[bytes]:
    """Yield the lines of a file from a byte on, truncated at MOST_TEXT + 1 bytes."""
    try:
        with file.open("rb") as lines:
            lines.seek(start)
            yield from iter(lambda: lines.readline(MOST_TEXT + 1), b"")
    except OSError as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: OSError) -> UserError:
    """Return the error for a file that the system does not open, which names it."""
    if file.is_symlink() and not file.exists():
        return UserError(f"{file}: a link to a missing file; remove it, or restore the file")
    return UserError(f"{file}: {error.strerror or error}")


@contextlib.contextmanager
def _parquet(file: Path) -> Iterator[Any]:
    """Open a Parquet file; any error is a UserError that names it."""
    parquet = import_package("pyarrow.parquet", f"to read {file}")
    where = f"{file}: not a Parquet file that can be read"
    with _foreign_errors(where), parquet.ParquetFile(file) as opened:
        yield opened


def _parquet_rows(file: Path, span: Span | None = None) -> Iterator[tuple[Row, str]]:
    with _parquet(file) as opened:
        batches = opened.iter_batches(row_groups=None if span is None else [span.start])
        rows = [row for batch in batches for row in batch.to_pylist()]
    first = 0 if span is None else span.line
    return ((_of_arrow(row), f"{file}, row {number}") for number, row in enumerate(rows, first))


def _saved_rows(folder: Path, split: str) -> Iterator[tuple[Row, str]]:
    datasets = import_package("datasets", f"to read {folder}")
    with _foreign_errors(f"{folder}: `datasets` cannot load it"):
        data = datasets.load_from_disk(str(folder))
    if isinstance(data, dict):
        if split not in data:
            known = ", ".join(map(str, data))
            raise UserError(f"task.path = {folder}: no split {split!r}; it has {known}")
        data = data[split]
    return ((row, f"{folder}, {split} row {n}") for n, row in enumerate(_stored(data)))


def _named_rows(name: str, split: str, config: str | None) -> Iterator[tuple[Row, str]]:
    where = f"task.path = {name}: not a file or folder here, and"
    datasets = import_package("datasets", f"{where} to load")
    with _foreign_errors(f"{where} `datasets` cannot load it (config {config!r}, split {split!r})"):
        rows = datasets.load_dataset(name, config, split=split)
    return ((row, f"{name}, {split} row {number}") for number, row in enumerate(_stored(rows)))


def _stored(data: Any) -> Iterator[Row]:
    """Yield the rows of a `datasets` object with images as their files, which it would decode."""
    for batch in data.with_format("arrow").iter(batch_size=1000):
        yield from map(_of_arrow, batch.to_pylist())


def _of_arrow(row: Row) -> Row:
    """Return a row without the null keys that Arrow adds to messages and tools."""
    found = {**row}
    for key, value in row.items():
        if isinstance(value, list) and (key == "tools" or are_messages(value)):
            found[key] = without_nulls(value)
    return found


@contextlib.contextmanager
def _foreign_errors(problem: str) -> Iterator[None]:
    """Convert any error of pyarrow or datasets to UserError."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{problem}: {type(error).__name__}: {error}") from error


def value_at(row: Row, path: str) -> Any:
    """Return a field of a row by name or dotted path; None if missing."""
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def has_field(row: Row, path: str) -> bool:
    """Return True if a row has a field (by name or dotted path), even if null."""
    return path in row or value_at(row, path) is not None


def import_package(name: str, why: str, extra: str = "data") -> ModuleType:
    """Import an optional package, or raise UserError naming the jetrl extra that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{why}: it needs {name.partition('.')[0]}: pip install 'jetrl[{extra}]' ({error})"
        ) from error
