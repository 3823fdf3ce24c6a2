"""The other ranks of a run, as far as a rank asks after them: whether they are well, and where.

`peers()` returns them. In a run of one process there are none, and every method does nothing. This
module imports no torch; `peer_watch.py` has the ranks of several processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from jetrl.distributed.board import Trouble
from jetrl.errors import RankLost


class Peers:
    """The other ranks of a run; this class is a run that has none."""

    def here(self, phase: str, step: int, limit_s: float | None) -> None:
        """Say where this rank is, which the others name should it be lost.

        Args:
            phase: The phase of the run; empty between phases.
            limit_s: The silence that is a hang, in seconds; None: no limit.
        """

    @contextlib.contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """Take part in a collective in the body of the `with`."""
        yield

    def lost(self, what: str, reason: str) -> RankLost:
        """Return the error of a collective that broke, which names the rank that is lost."""
        return RankLost(f"another rank is gone or did not answer ({what}): {reason}")

    def waits_for_others(self) -> bool:
        """Return whether this rank is only silent because it waits for others that are behind."""
        return False

    def is_well(self, rank: int) -> bool:
        """Return whether a rank is known to run, and to watch the others."""
        return False

    def trouble(self) -> Trouble | None:
        """Return what ends the run, if some rank has met trouble; look once more for it."""
        return None

    def failed(self, words: str, code: int, hangs: bool = False) -> None:
        """Tell the others that this rank ends, so that they end as well."""

    def leaving(self) -> None:
        """Tell the others that this rank ends in an orderly way, as they do themselves."""

    def interrupted(self) -> bool:
        """Return whether a signal is to be ignored, since this rank is ending already.

        Signal handlers call this method first.

        Raises:
            RankLost: Another rank has met trouble, which is why the signal came.
        """
        return False

    def close(self) -> None:
        """End the watch over the others."""

    def records_in(self, folder: Path) -> None:
        """Name the folder that gets a record of trouble.

        Args:
            folder: The folder, which exists by then.
        """

    def before_leaving(self, work: Callable[[Trouble], None]) -> None:
        """Do more work when this rank is made to leave while its main thread cannot."""

    def on_hang(self, work: Callable[[str], None]) -> None:
        """Do work when another rank hangs, while this one still waits for it."""


NOBODY = Peers()
_peers: Peers = NOBODY


def peers() -> Peers:
    """Return the other ranks of the run that this process belongs to."""
    return _peers


def set_peers(new: Peers) -> None:
    """Make `new` the other ranks of this process."""
    global _peers
    _peers = new
