"""Files that somebody else may have written: read within limits, and checked against a schema.

Run and model directories are copied from machine to machine. Whatever their files contain, a reader
gets values as jetrl writes them, or a `UserError` that names the file and the field. Each file has
one strict schema next to the code that writes it, with bounds for every size and count.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import shutil
import stat
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from jetrl.errors import UserError

T = TypeVar("T")

MOST_BYTES = 2**24
"""The default limit of a file of one JSON or TOML value, in bytes."""
MOST_TEXT = 2**25
"""The limit of a line of a data file in bytes, and of a text for a model in characters."""
MOST_SHOWN = 60  # characters of a wrong value or key in a message
MOST_STEPS = 10**12

Count = Annotated[int, Field(ge=0, lt=2**53)]  # A float holds it exactly.
Step = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
UnixTime = Annotated[float, Field(ge=-2_208_988_800, le=253_402_300_799, allow_inf_nan=False)]
"""A time in seconds since 1970, from 1900 (a clock may be wrong) to the year 9999."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Stored(BaseModel):
    """The base class of schemas: strict types; unknown keys are kept."""

    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, protected_namespaces=(), validate_default=False
    )


_SUBJECT = re.compile(r"^(Value error, |Input |String |List |Dictionary |Tuple )")  # of a message
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, MOST_SHOWN, MOST_SHOWN, 40


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a regular file for reading; raise FileNotFoundError if it is missing.

    A pipe (which would wait for a writer), a device or a folder is a UserError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path}: not a regular file (a pipe, a device or a folder)")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Return the contents of a regular file; raise UserError for more than `most` bytes."""
    with open_regular(path) as file:
        try:
            contents = file.read(min(most, os.fstat(file.fileno()).st_size) + 1)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from None
    if len(contents) > most:
        raise UserError(f"{path}: larger than {most / 2**20:g} MiB, the most that is read there")
    return contents


def read_text(path: str | Path) -> str:
    """Return the UTF-8 text of a file, as `read_bytes` reads it."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason})") from None


def read_json(path: str | Path, most: int = MOST_BYTES) -> Any:
    """Return the JSON value in a file, as `read_bytes` reads it."""
    try:
        return json.loads(read_bytes(path, most))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON: {error}") from None


def read_stored(path: str | Path, schema: TypeAdapter[T], most: int = MOST_BYTES) -> T:
    """Return the JSON value in a file of at most `most` bytes, as its schema has it.

    FileNotFoundError without the file; a UserError names the file and the wrong field.
    """
    return checked(schema, read_json(path, most), str(path))


def free_space(folder: Path) -> str:
    """Return the free space of a folder's disk, in words."""
    try:
        return f"{shutil.disk_usage(folder).free / 2**30:.2f} GiB free there"
    except OSError:
        return "the free space there cannot be read"


def checked(schema: TypeAdapter[T], value: Any, where: str) -> T:
    """Return a value as its schema has it; raise UserError with the first wrong field."""
    try:
        return schema.validate_python(value)
    except ValidationError as error:
        raise UserError(f"{where}: {problem_of(error)}") from None


def problem_of(error: ValidationError, key: str = "") -> str:
    """Return a schema's first problem in words, without control characters, below a key."""
    first = error.errors(include_url=False, include_context=False)[0]
    places = (key, *(str(place) for place in first["loc"] if place != "[key]"))
    field = ".".join(printable(place) for place in places if place)
    message = _SUBJECT.sub("", first["msg"])
    if first["type"] == "missing":
        return f"{field} is missing"
    if not field and isinstance(first["input"], dict):  # a rule about several fields
        return message
    shown = shown_value(first["input"])
    return f"{field} = {shown}: {message}" if field else f"{shown}: {message}"


def shown_value(value: Any) -> str:
    """Return a short text for a value of any size, without control characters."""
    return printable(_SHORT.repr(value))


def printable(text: str) -> str:
    """Return the beginning of a text in one line, unprintable characters as escapes."""
    short = text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."
    escaped = {c: c.encode("unicode_escape").decode("ascii") for c in short if not c.isprintable()}
    return "".join(escaped.get(c, c) for c in short)
