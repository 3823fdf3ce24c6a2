"""The gate that every Python file of a user passes before the file is imported.

A recipe may name Python files: a task, a checker, an algorithm. `jetrl train` and `jetrl sft` run
what their recipe names. Every other command may be pointed at a run, a checkpoint or a model that
came from elsewhere, whose settings nobody here wrote: there no file is imported that was not typed
on the command line or trusted with --trust-task. Each place that imports a user's file calls
`check_trusted` first. A program that uses jetrl as a library trusts every file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from jetrl.errors import UserError

USERS_ERRORS = (Exception, SystemExit)
"""What a user's code may raise: its `sys.exit()` would end a run without a word."""

_trusted: frozenset[Path] | None = None  # None: every file


@contextlib.contextmanager
def trust_only(files: Iterable[str | Path] = ()) -> Iterator[None]:
    """Let the commands inside the context import no users' files but these."""
    global _trusted
    before = _trusted
    _trusted = (before or frozenset()) | {Path(file).resolve() for file in files}
    try:
        yield
    finally:
        _trusted = before


def check_trusted(file: Path) -> None:
    """Check that a user's file may be imported; call it before the file is run.

    Raises:
        UserError: The file is named by settings that were read from a run, and the command was not
            told to trust it.
    """
    if _trusted is not None and file.resolve() not in _trusted:
        raise UserError(
            f"{file} is a Python file that the run's settings name, and this command runs no "
            "file that you did not name yourself: it may come with a run from elsewhere; read "
            "it, then add --trust-task to run it"
        )


def files_named(words: object) -> set[str]:
    """Return the Python files named as `file.py:Name` in a text, or in the texts of a container."""
    if isinstance(words, str):
        file, colon, _ = words.rpartition(":")
        return {file} if colon and file.endswith(".py") else set()
    if isinstance(words, dict):
        words = list(words.values())
    if isinstance(words, list | tuple):
        return set().union(*(files_named(word) for word in words))
    return set()
