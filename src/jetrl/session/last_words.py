"""The end of a process that is one of several ranks, by an error of its own or of another rank.

An error that all ranks end with is printed once, by rank 0; a rank that fails alone is named.
"""

from __future__ import annotations

import contextlib
from typing import NoReturn

from jetrl.distributed.console import exit_now, tell_once
from jetrl.distributed.meeting import NoMeeting, meet
from jetrl.distributed.peers import Trouble, peers
from jetrl.distributed.world import launched_rank
from jetrl.errors import RankLost, RunStopped, Terminated, UserError
from jetrl.runs.format import visible


def end(
    words: str, code: int, error: BaseException | None = None, printed: bool = False
) -> NoReturn:
    """End this rank with an exit code, after an error of any kind; the other ranks end as well.

    Args:
        error: The error that ends it; None: one that is no other rank's.
        printed: Whether rank 0 has printed its message already.
    """
    trouble = peers().trouble() if _may_follow(error) else None
    if trouble is not None and trouble.rank != launched_rank():
        leave(trouble)
    peers().failed(words, code)
    first = launched_rank() == 0
    try:
        meeting = meet()
        if not meeting.compared:  # the others may still be about to begin
            try:
                problem = words.removeprefix("error: ") or "its command line is wrong"
                meeting.compare({}, problem=problem)
            except UserError as common:
                words = words and f"error: {common}"
        # Where this rank was the first to fail, the others follow without words of their own.
        trouble = peers().trouble() if first else None
        heard = peers().is_well(0) or (trouble is not None and trouble.rank == 0)
        to_print = meeting.end(words, heard)
        if first and not printed:
            tell_once(to_print or words)
        elif to_print is not None:
            tell_once(to_print)
        if first:
            meeting.told()
    except (NoMeeting, RuntimeError) as lost:  # there is no store, or no longer
        reason = f" ({lost})" if isinstance(lost, NoMeeting) and str(lost) not in words else ""
        tell_once(words + reason if first else f"rank {launched_rank()}: {words}{reason}")
    exit_now(code)


def leave(trouble: Trouble) -> NoReturn:
    """End this rank because of another's trouble, which one rank prints."""
    rank = launched_rank()
    if rank == trouble.printed_by:
        tell_once(visible(trouble.message, newlines=True))
    if trouble.rank < 0:  # the store, or who knows which rank
        exit_now(trouble.code)
    with contextlib.suppress(NoMeeting, RuntimeError):
        meeting = meet().again()  # the main thread may be waiting on its connection
        meeting.end("", heard=True)
        if rank == 0:
            meeting.told()
    exit_now(trouble.code)


def _may_follow(error: BaseException | None) -> bool:
    """Return whether an error may be nothing but the consequence of another rank's end."""
    if isinstance(error, UserError | RunStopped):
        return isinstance(error, RankLost)
    return isinstance(error, Exception | Terminated)
