"""JSON Lines files; a killed process loses at most the last line.

Each line is written by one call. An incomplete last line is ignored by readers and removed by the
next writer; a broken line anywhere else is reported with file and line.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter

from jetrl.errors import StorageError, UserError
from jetrl.files import checked, free_space, open_regular

Record = dict[str, Any]
MOST_LINE = 2**26  # maximum bytes per line; a sample of a million tokens takes half
_DAMAGED = "the file is damaged: repair or delete that line"


def read_jsonl(path: Path, schema: TypeAdapter[Any] | None = None) -> tuple[list[Record], str]:
    """Return the objects of a file in order, and a note about an ignored last line, or "".

    A missing file counts as empty. Raises UserError if a line is damaged or violates the schema.
    """
    records: list[Record] = []
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return records, ""
    with file:
        lines = iter(lambda: _line_of(file, path), b"")
        incomplete = ""
        for number, line in enumerate(lines, start=1):
            if incomplete:  # the line before was not the last
                raise UserError(f"{path}, {incomplete}; {_DAMAGED}")
            where = f"{path}, line {number}"
            if len(line) > MOST_LINE:
                raise UserError(f"{where}: longer than {MOST_LINE / 2**20:g} MiB; {_DAMAGED}")
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError("not an object")
            except (ValueError, RecursionError) as error:
                incomplete = f"line {number}: not a JSON object ({error})"
                continue
            if schema is not None:
                try:
                    checked(schema, record, where)
                except UserError as error:
                    raise UserError(f"{error}: jetrl does not write that; {_DAMAGED}") from None
            records.append(record)
    if incomplete:
        return records, f"{path}: line {number} is incomplete and was dropped"
    return records, ""


def _line_of(file: IO[bytes], path: Path) -> bytes:
    try:
        return file.readline(MOST_LINE + 1)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def repair_jsonl(path: Path, schema: TypeAdapter[Any] | None = None) -> tuple[list[Record], str]:
    """Like `read_jsonl`, and remove an incomplete last line."""
    records, note = read_jsonl(path, schema)
    if note or (records and not path.read_bytes().endswith(b"\n")):
        write_jsonl(path, records)
    return records, note


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    write_atomically(path, "".join(_line(record) for record in records))


def write_atomically(path: Path, contents: str | bytes) -> None:
    """Write a file, text in UTF-8; a crash or a full disk leaves the previous one in place."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            if isinstance(contents, str):
                contents = contents.encode("utf-8", "surrogatepass")
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class JsonlWriter:
    """Appends objects to a file, each with one unbuffered write."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append an object; raises OSError if the disk is full."""
        data = memoryview(_line(record).encode("utf-8", "surrogatepass"))
        while data:
            data = data[self._file.write(data) :]

    def close(self) -> None:
        self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(", ", ": ")) + "\n"


@contextlib.contextmanager
def storing(path: Path) -> Iterator[None]:
    """Convert an OSError while writing `path` into a StorageError with a remedy."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} could not be written: {error.strerror or error} ({free_space(path.parent)}). "
            "Earlier data is intact; free some space and continue with --resume"
        ) from None
