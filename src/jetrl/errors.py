"""Errors that a user causes, and ends of a run.

The command line prints their message without a traceback. Bugs of jetrl stay AssertionError, with
a traceback.

Exit codes: 0 done; 1 a run that stopped itself for another reason than these, or a check that
failed; 2 bad input; 3 sampler and trainer differ; 4 numbers that are not finite; 5 a phase hung;
6 a file could not be written; 7 memory ran out and nothing can be made smaller; 75 run.max_hours
reached (go on with --resume); 130 Ctrl-C; 143 SIGTERM.
"""

from __future__ import annotations


class UserError(ValueError):
    """Bad input: the message names the key, file or line and says what to do."""


class RunStopped(RuntimeError):  # noqa: N818  (an outcome of a run, not only an error)
    """A run that ended itself; its message says why, and its last checkpoint is good."""

    exit_code = 1


class MismatchError(RunStopped):
    """The trainer's log-probs differ from the sampler's under a plan that promises they do not."""

    exit_code = 3


class NonFiniteError(RunStopped):
    """A loss, a gradient or a weight is NaN or infinite."""

    exit_code = 4


class StorageError(RunStopped):
    """A file of the run could not be written; what was written before is whole.

    The cause is a full disk, a quota, or a file system that went away.
    """

    exit_code = 6


class TimeLimitReached(RunStopped):
    """The time limit run.max_hours ended the run in its warm-up, which continues with resume."""

    exit_code = 75


class OutOfMemoryStop(RunStopped):
    """Memory ran out, and what was running cannot be made any smaller."""

    exit_code = 7


class RanksDiffer(RunStopped):
    """The processes of a run do not have the same values where they have to."""


EXIT_HANG = 5


class Terminated(BaseException):
    """SIGTERM arrived; no Exception, so that no handler on the way keeps it."""

    exit_code = 143
