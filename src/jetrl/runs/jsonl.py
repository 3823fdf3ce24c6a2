"""Files of one JSON object a line, written so that a killed process costs at most the last line.

A line goes out in one write, newline included. What a kill in the middle of it leaves behind, an
incomplete last line, is dropped when the file is read and cut off when it is written again; a
broken line anywhere else is damage, and is refused by file and line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jetrl.errors import UserError

Record = dict[str, Any]


def read_jsonl(path: Path) -> tuple[list[Record], str]:
    """Return the objects of a file in order, and a note about a dropped last line, or "".

    A file that does not exist has no objects.

    Raises:
        UserError: A line other than the last is not a JSON object, or the file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    if lines[-1] == b"":
        lines.pop()
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return records, f"{path}: line {number} is incomplete and was dropped"
            raise UserError(
                f"{path}, line {number}: not a JSON object ({error}); the file is damaged: "
                "repair or delete that line"
            ) from None
        records.append(record)
    return records, ""


def check_fields(
    path: Path,
    records: Iterable[Record],
    types: Mapping[str, tuple[type, ...]],
    others: tuple[type, ...] = (object,),
) -> None:
    """Check that fields have the types that they are written with.

    A bool is no number, and a number fits a float.

    Args:
        path: The file, for the message.
        records: The file's objects.
        types: Types of fields, by name.
        others: Types of the fields that `types` does not name.

    Raises:
        UserError: A field has another type; the message names file and line.
    """
    for number, record in enumerate(records, start=1):
        for key, value in record.items():
            allowed = types.get(key, others)
            plain = not isinstance(value, bool) or bool in allowed or object in allowed
            fits = not isinstance(value, int) or abs(value) < 2**63 or object in allowed
            if not (isinstance(value, allowed) and plain and fits):
                raise UserError(
                    f"{path}, line {number}: {key[:60]!r} is {str(value)[:60]!r}, which is nothing "
                    "that jetrl writes there; the file is damaged: repair or delete that line"
                )


def repair_jsonl(path: Path) -> tuple[list[Record], str]:
    """Return `read_jsonl` of a file, and make the file end in a whole line to append to."""
    records, note = read_jsonl(path)
    if note or (records and not path.read_bytes().endswith(b"\n")):
        write_jsonl(path, records)
    return records, note


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write the whole file atomically: readers see the old one or the new one."""
    write_atomically(path, "".join(_line(record) for record in records))


def write_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 text file so that a crash or a full disk leaves the previous one in place."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(text.encode("utf-8", "surrogatepass"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class JsonlWriter:
    """A writer that appends objects to a file, each in one unbuffered write."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append an object; raise OSError when the disk is full.

        The next reader drops the incomplete line.
        """
        data = memoryview(_line(record).encode("utf-8", "surrogatepass"))
        while data:
            data = data[self._file.write(data) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(", ", ": ")) + "\n"
