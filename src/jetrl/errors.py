"""Errors that a user causes, and ends of a run.

The command line prints their message without a traceback; bugs of jetrl keep theirs.

Exit codes: 0 done; 1 another stop, or a failed check; 2 bad input; 3 sampler and trainer differ;
4 numbers that are not finite; 5 a hang, or a dead rank; 6 a file could not be written; 7 memory ran
out; 75 run.max_hours reached (continue with --resume); 130 Ctrl-C; 143 SIGTERM.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import traceback
from collections.abc import Iterable, Iterator

_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)


class UserError(ValueError):
    """Bad input: the message names the key, file or line and says what to do."""


@contextlib.contextmanager
def named(key: str) -> Iterator[None]:
    """Name the setting of a file in errors about the file, also if its path is too long."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise UserError(f"{key} = {error.filename!s:.60}...: {error.strerror}") from None


class RunStopped(RuntimeError):  # noqa: N818  (an outcome of a run, not only an error)
    """A run that ended itself; the message says why, and the last checkpoint is good."""

    exit_code = 1


class MismatchError(RunStopped):
    """The trainer's log-probs differ from the sampler's under an exact plan."""

    exit_code = 3


class NonFiniteError(RunStopped):
    """A loss, a gradient or a weight is NaN or infinite."""

    exit_code = 4


class StorageError(RunStopped):
    """A file could not be written (disk, quota, lost file system); earlier files are whole."""

    exit_code = 6


class TimeLimitReached(RunStopped):
    """The time limit run.max_hours ended the run in its warm-up, which continues with resume."""

    exit_code = 75


class OutOfMemoryStop(RunStopped):
    """Memory ran out, and the work cannot be made smaller."""

    exit_code = 7


class RanksDiffer(RunStopped):
    """The ranks of a run have different values of something that must be equal."""


EXIT_HANG = 5


class RankLost(RunStopped):
    """Another rank is gone, has failed (the run takes its exit code), or hangs."""

    def __init__(self, message: str, exit_code: int = EXIT_HANG) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Terminated(BaseException):
    """SIGTERM arrived; no Exception, so that no handler on the way keeps it."""

    exit_code = 143


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or `; there is: ` and the known names."""
    names = list(known)
    if near := difflib.get_close_matches(name, names, n=1, cutoff=0.5):
        return f"; did you mean {near[0]}?"
    return f"; there is: {', '.join(names[:30]) or 'none'}"


def is_of_disk(error: BaseException) -> bool:
    """Return whether an error says that a disk is full, read-only or failing."""
    if not isinstance(error, OSError):
        return False
    return error.errno in _OF_DISKS or "No usable temporary directory" in str(error)  # tempfile's


def ending(error: BaseException) -> tuple[str, int]:
    """Return the command line's message for an error that ends it, and the exit code."""
    if isinstance(error, UserError):
        return f"error: {error}", 2
    if isinstance(error, RunStopped):
        return f"stopped: {error}", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, Terminated):
        return "terminated", Terminated.exit_code
    if isinstance(error, OSError) and is_of_disk(error):
        where = f"{error.filename}: " if error.filename else ""
        words = f"stopped: {where}{error.strerror}. Earlier data is intact; free some space"
        return f"{words} and start the command again", StorageError.exit_code
    return "".join(traceback.format_exception(error)).rstrip(), 1
