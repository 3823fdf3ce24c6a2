"""The board of a multi-process run: each rank's status, and the failure that ends the run.

It is kept in the run's key-value store. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from jetrl.errors import EXIT_HANG

if TYPE_CHECKING:
    from torch.distributed import Store

UNKNOWN = -1  # placeholder for an unknown lost rank
_TROUBLE = "trouble"


@dataclass(frozen=True)
class RankStatus:
    """Status of a rank.

    `number` counts the collectives it has started; `awaits` names the one it is waiting in. `left`
    is True once it exits by itself. `phase` is empty between phases.
    """

    rank: int
    node: str = ""
    pid: int = 0
    phase: str = ""
    step: int = 0
    number: int = 0
    awaits: str = ""
    left: bool = False

    @property
    def place(self) -> str:
        """Phase and step as text, with what the rank waits for."""
        phase = f"in {self.phase}" if self.phase else "between phases"
        where = f"{phase} of step {self.step}" if self.phase or self.step else "before step 1"
        return where + (f", waiting for the others ({self.awaits})" if self.awaits else "")


@dataclass(frozen=True)
class Trouble:
    """The failure of a rank that ends the run.

    Kinds: "lost" if the rank cannot report itself, "failed" if it raised an error, "hang" if its
    watchdog ended it. `reporter` prints the message if the lost rank is unknown.
    """

    rank: int
    kind: Literal["lost", "failed", "hang"]
    text: str
    code: int = EXIT_HANG
    reporter: int = 0

    @property
    def printed_by(self) -> int:
        """The rank that prints the message and saves the statuses."""
        if self.rank == UNKNOWN:
            return self.reporter
        return int(self.rank == 0 and self.kind == "lost")

    @property
    def message(self) -> str:
        return f"{'stopped' if self.kind == 'lost' else f'rank {self.rank}'}: {self.text}"

    @property
    def reason(self) -> str:
        """Reason for the end of the run, in one line."""
        if self.kind == "lost":
            return self.text
        return f"rank {self.rank}: {self.text.strip().splitlines()[-1]}"


class Board:
    """Statuses and the first trouble, in a store whose connection nobody else waits on.

    `own` is the status of this rank. Methods raise RuntimeError if the store does not respond,
    unless they say otherwise.
    """

    def __init__(self, store: Store, own: RankStatus, size: int) -> None:
        self._store = store
        self.own = own
        self._other_ranks = [rank for rank in range(size) if rank != own.rank]

    def update(self, **changes: Any) -> None:
        """Change this rank's status and publish it; a dead store is ignored."""
        if changes:  # else the watch thread would overwrite changes of the main thread
            self.own = replace(self.own, **changes)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"status {self.own.rank}", json.dumps(asdict(self.own)))

    def statuses(self, ranks: Collection[int]) -> dict[int, RankStatus]:
        """Return the statuses published so far, by rank."""
        keys = {rank: f"status {rank}" for rank in ranks}
        published = {rank: key for rank, key in keys.items() if self._store.check([key])}
        if not published:
            return {}
        records = self._store.multi_get(list(published.values()))
        return {
            rank: RankStatus(**json.loads(record))
            for rank, record in zip(published, records, strict=True)
        }

    def others(self) -> dict[int, RankStatus]:
        """Return the statuses of the other ranks; empty if the store does not respond."""
        with contextlib.suppress(RuntimeError):
            return self.statuses(self._other_ranks)
        return {}

    def trouble(self) -> Trouble | None:
        """Return the reported trouble, if any."""
        if not self._store.check([_TROUBLE]):
            return None
        return Trouble(**json.loads(self._store.get(_TROUBLE)))

    def report(self, trouble: Trouble) -> Trouble:
        """Report trouble; return the first report of any rank, or this one without a store."""
        with contextlib.suppress(RuntimeError):
            first = self._store.compare_set(_TROUBLE, "", json.dumps(asdict(trouble)))
            trouble = Trouble(**json.loads(first))
        return trouble
