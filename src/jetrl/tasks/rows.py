"""Rows of data: objects with fields, from JSONL, Parquet or the package `datasets`.

Each row comes with its file and line, or its number, for messages.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jetrl.errors import UserError
from jetrl.files import MOST_TEXT

Row = Mapping[str, Any]
SUFFIXES = (".jsonl", ".parquet")
FORMS = (
    "give a folder with train.jsonl and test.jsonl (or .parquet), one such file, a folder that "
    "`datasets` has saved, or the name of a data set such as openai/gsm8k"
)
_SAVED = ("dataset_dict.json", "state.json")  # of save_to_disk: a dictionary of splits, or one


def check_path(path: str) -> None:
    """Raise `UserError` for a path that does not exist and cannot be a data set's name."""
    location = Path(path).expanduser()
    local = location.suffix in (".json", *SUFFIXES) or path.startswith((".", "/", "~"))
    local = local or ("/" in path and location.parent.is_dir())  # a mistyped data/NAME
    if not location.exists() and (local or path.count("/") > 1):
        raise UserError(f"task.path = {path}: no such file or folder; {FORMS}")


def splits_of(path: str) -> list[str] | None:
    """Return a folder's splits; None for one file or saved set, [] for a name to be loaded."""
    location = Path(path).expanduser()
    if location.is_file() or (location / "state.json").is_file():
        return None
    if (location / "dataset_dict.json").is_file():
        contents = json.loads((location / "dataset_dict.json").read_text(encoding="utf-8"))
        return [str(split) for split in contents["splits"]]
    if location.is_dir():
        return sorted({file.stem for file in location.iterdir() if file.suffix in SUFFIXES})
    return []


def read_rows(path: str, split: str, config: str | None = None) -> Iterator[tuple[Row, str]]:
    """Return the rows of a split, or of a single file, with their `data/train.jsonl, line 7`."""
    location = Path(path).expanduser()
    if location.is_dir() and any((location / name).is_file() for name in _SAVED):
        return _saved_rows(location, split)
    if location.is_dir():
        files = [location / f"{split}{suffix}" for suffix in SUFFIXES]
        existing = [file for file in files if file.is_file()]
        if not existing:
            raise UserError(f"task.path = {path}: the folder has no {split}.jsonl or .parquet")
        location = existing[0]
    if location.is_file():
        return _parquet_rows(location) if location.suffix == ".parquet" else read_jsonl(location)
    return _named_rows(path, split, config)


def read_jsonl(file: Path) -> Iterator[tuple[Row, str]]:
    """Yield the objects of a JSONL file, each with its file and line; skip blank lines."""
    for number, contents in enumerate(_lines(file), start=1):
        where = f"{file}, line {number}"
        if len(contents) > MOST_TEXT:
            raise UserError(f"{where}: longer than {MOST_TEXT / 2**20:g} MiB, too long for a row")
        try:
            line = contents.decode("utf-8-sig" if number == 1 else "utf-8")  # editors put a mark
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 text ({error.reason})") from None
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            hint = "; JSONL has one object a line" if line.lstrip().startswith("[") else ""
            problem = f"not JSON: {error.msg} (column {error.colno}){hint}"
            raise UserError(f"{where}: {problem}") from None
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 1,000 brackets
            raise UserError(f"{where}: not JSON that can be read: {error}") from None
        if not isinstance(row, dict):
            raise UserError(f"{where}: a JSON object is expected, not {line[:40]!r}")
        if "\\ud" in line.lower():
            try:
                json.dumps(row, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                half = error.object[error.start : error.end]
                raise UserError(f"{where}: {half!r} is half of a character") from None
        yield row, where


def _lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a file, cut at MOST_TEXT + 1 bytes."""
    try:
        with file.open("rb") as lines:
            yield from iter(lambda: lines.readline(MOST_TEXT + 1), b"")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from None


def _parquet_rows(file: Path) -> Iterator[tuple[Row, str]]:
    parquet = import_package("pyarrow.parquet", f"to read {file}")
    with _foreign_errors(f"{file}: not a Parquet file that can be read"):
        batches = parquet.ParquetFile(file).iter_batches()
        rows = [row for batch in batches for row in batch.to_pylist()]
    return ((row, f"{file}, row {number}") for number, row in enumerate(rows))


def _saved_rows(folder: Path, split: str) -> Iterator[tuple[Row, str]]:
    datasets = import_package("datasets", f"to read {folder}")
    with _foreign_errors(f"{folder}: `datasets` cannot load it"):
        data = datasets.load_from_disk(str(folder))
    if isinstance(data, dict):
        if split not in data:
            known = ", ".join(map(str, data))
            raise UserError(f"task.path = {folder}: no split {split!r}; it has {known}")
        data = data[split]
    return ((row, f"{folder}, {split} row {number}") for number, row in enumerate(data))


def _named_rows(name: str, split: str, config: str | None) -> Iterator[tuple[Row, str]]:
    where = f"task.path = {name}: not a file or folder here, and"
    datasets = import_package("datasets", f"{where} to load")
    with _foreign_errors(f"{where} `datasets` cannot load it (config {config!r}, split {split!r})"):
        rows = datasets.load_dataset(name, config, split=split)
    return ((row, f"{name}, {split} row {number}") for number, row in enumerate(rows))


@contextlib.contextmanager
def _foreign_errors(problem: str) -> Iterator[None]:
    """Make a `UserError` of any error of pyarrow or datasets."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{problem}: {type(error).__name__}: {error}") from error


def value_at(row: Row, path: str) -> Any:
    """Return a field of a row, or a part of one by a dotted path; None if it is missing."""
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def import_package(name: str, why: str, extra: str = "data") -> ModuleType:
    """Return an optional package; raise `UserError` with the extra of jetrl that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        needs = f"it needs {name.partition('.')[0]}: pip install 'jetrl[{extra}]' ({error})"
        raise UserError(f"{why}: {needs}") from error
