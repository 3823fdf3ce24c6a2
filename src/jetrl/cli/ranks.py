"""The process of a command that torchrun has started as one of several ranks.

Most of it is in the session (session/ranks.py, session/last_words.py), which is imported when it is
needed: it imports torch, and a command's help does not.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NoReturn

from jetrl.distributed.console import be_silent, exit_now
from jetrl.distributed.world import started_by_torchrun

if TYPE_CHECKING:
    from jetrl.settings.loading import Settings

__all__ = ["be_silent", "end", "exit_now", "goes_on", "joined", "joined_on"]


@contextlib.contextmanager
def joined(settings: Settings, resume: bool = False) -> Iterator[None]:
    """Join the processes that torchrun has started for a run, within the block.

    Raises:
        UserError: The ranks were started differently, or settings that need one process.
    """
    if not started_by_torchrun():
        yield
        return
    from jetrl.session import ranks

    with ranks.joined(settings, resume):
        yield


@contextlib.contextmanager
def joined_on(
    device: str,
    timeout_s: float | None = None,
    facts: Mapping[str, str] | None = None,
    problem: str = "",
) -> Iterator[None]:
    """Join the processes that torchrun has started for a command, within the block.

    Args:
        timeout_s: How long a rank waits for the others; None: the default of the settings.
        facts: What has to be the same on all ranks beside versions and command line, by name.
        problem: Why the command cannot run as several processes; empty where it can.

    Raises:
        UserError: The ranks were started differently, or there is a problem.
    """
    if not started_by_torchrun():
        yield
        return
    from jetrl.session import ranks

    with ranks.joined_on(device, timeout_s, facts, problem):
        yield


def goes_on(settings: Settings) -> bool:
    """Return whether torchrun starts the ranks again of a run that it has begun (--max-restarts).

    Raises:
        Terminated, TimeLimitReached: The run was not lost, but asked to stop: it does not go on.
    """
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0:
        return False
    from jetrl.session import ranks

    return ranks.goes_on(settings)


def end(
    words: str, code: int, error: BaseException | None = None, printed: bool = False
) -> NoReturn:
    """End this rank with an exit code, after an error of any kind; the other ranks end as well.

    Args:
        error: The error that ends it; None: one that is no other rank's.
        printed: Whether rank 0 has printed its message already.
    """
    from jetrl.session import last_words

    last_words.end(words, code, error, printed)
