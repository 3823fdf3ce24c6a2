"""Errors that a user causes. The command line prints their message, without a traceback, and exits
with code 2 (1 for a run that stopped). Bugs of ours stay AssertionError and show a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input: the message names the key, file or line and says what to do."""


class RunStopped(RuntimeError):  # noqa: N818  (an outcome of a run, not only an error)
    """A run that ended itself: not exact under an exact plan, nothing left to learn from.
    The last checkpoint is good; the message says why and what to do."""


class MismatchError(RunStopped):
    """The trainer's log-probs differ from the sampler's under a plan that promises they do not."""
