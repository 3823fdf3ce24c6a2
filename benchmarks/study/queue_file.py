"""A queue file (TOML): study files in the order in which they get places, and what of each is run.

    [[study]]
    file = "doses.toml"
    only = ["ground=program-512", "noise-0.3"]

    [[study]]
    file = "flows.toml"

A study may stand in it several times. Names of files are meant from the working folder.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from jetrl.errors import UserError
from jetrl.files import read_text
from jetrl.settings.section import Section


@dataclass(frozen=True)
class Entry:
    """An entry of a queue: a study file, and the runs of that study.

    Attributes:
        file: The study file, or the results file of a study.
        only: Names of arms, AXIS=VALUE and seed=NUMBER, as of `--only`; none: all runs.
        place: The queue file that it stands in, for messages; "": the command line.
    """

    file: Path
    only: Sequence[str]
    place: str = ""


class _StudyTable(Section):
    """A table `[[study]]` of a queue file."""

    file: str
    only: list[str] = Field(default_factory=list)


class _QueueFile(Section):
    """The tables of a queue file."""

    study: Annotated[list[_StudyTable], Field(min_length=1)]


def entries_of(files: Sequence[Path], only: Sequence[str]) -> list[Entry]:
    """Return the entries of study files and queue files, in their order.

    Args:
        files: Study files, results files and queue files.
        only: What `--only` names, which is run of each study file.

    Raises:
        UserError: A queue file is wrong, or stands beside an `only`.
    """
    entries: list[Entry] = []
    for file in files:
        tables = _tables_of(file)
        if tables is None:
            entries.append(Entry(file, only))
        elif only:
            raise UserError(f"{file} is a queue file, which says itself what is run: no --only")
        else:
            entries += [Entry(Path(table.file), table.only, str(file)) for table in tables]
    return entries


def _tables_of(file: Path) -> list[_StudyTable] | None:
    """Return the tables of a queue file; None for another file, whose reader finds what is wrong.

    Raises:
        UserError: It is a queue file with a key that is unknown, missing or wrong.
    """
    if file.suffix == ".json":
        return None
    try:
        tree = tomllib.loads(read_text(file))
    except (OSError, UserError, ValueError, RecursionError):
        return None
    if not isinstance(tree.get("study"), list):
        return None
    try:
        return _QueueFile.model_validate(tree, strict=True).study
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{file}: {key}: {first['msg']}; a [[study]] has file and only") from None
