"""The board on which each rank of a run says where it is, for the others to read.

It lies in the key-value store of the run. A rank renews its line each second and at the begin of
each phase; the first rank that meets trouble writes it down, and all ranks end by that one account.
This module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from jetrl.distributed.processes import ProcessId
from jetrl.errors import EXIT_HANG

Kind = Literal["lost", "failed", "hang"]

_TROUBLE = "trouble"


class KeyValueStore(Protocol):
    """The parts of torch.distributed's Store that a board needs."""

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys that are there."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if it has the value that is expected, and return the key's value.

        Args:
            expected: The value that is replaced; empty for a key that is not there.
        """


@dataclass(frozen=True)
class RankStatus:
    """The line of a rank on the board.

    Attributes:
        phase: The phase of the run that it is in; empty before the first one and between phases.
        limit_s: The silence after which it counts as hanging, in seconds; None: no limit.
        awaits: What it waits for the others for; empty where it does not wait.
        left: Whether it has ended, or is ending, in an orderly way.
    """

    rank: int
    node: str = ""
    process: ProcessId = field(default_factory=lambda: ProcessId("", 0, 0))
    phase: str = ""
    step: int = 0
    limit_s: float | None = None
    number: int = 0
    awaits: str = ""
    beat: int = 0
    left: bool = False

    def record(self) -> dict[str, object]:
        """Return what the run directory keeps of the line."""
        return {
            "rank": self.rank,
            "node": self.node,
            "pid": self.process.pid,
            "place": self.place,
            "collectives": self.number,
            "left": self.left,
        }

    @property
    def place(self) -> str:
        """The phase and step of the rank in words, with what it waits for."""
        phase = f"in {self.phase}" if self.phase else "between phases"
        where = f"{phase} of step {self.step}" if self.phase or self.step else "before step 1"
        return where + (f", waiting for the others ({self.awaits})" if self.awaits else "")


@dataclass(frozen=True)
class Trouble:
    """The end of a rank that ends the run.

    Attributes:
        kind: "lost" where the rank cannot say so itself, "failed" where it has raised an error, and
            "hang" where its watchdog has ended it.
    """

    rank: int
    kind: Kind
    words: str
    code: int = EXIT_HANG

    @property
    def message(self) -> str:
        return (
            f"stopped: {self.words}" if self.kind == "lost" else f"rank {self.rank}: {self.words}"
        )

    @property
    def reason(self) -> str:
        """The reason of the run's end, in a line."""
        if self.kind == "lost":
            return self.words
        return f"rank {self.rank}: {self.words.strip().splitlines()[-1]}"


class Board:
    """The board, seen from one rank."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store
        self._there: set[int] = set()  # the ranks whose lines are known to be there

    def write(self, status: RankStatus) -> None:
        """Write the line of a rank."""
        self._store.set(_key(status.rank), json.dumps(asdict(status)))

    def read(self, ranks: Iterable[int]) -> dict[int, RankStatus]:
        """Return the lines of those of some ranks that have written one."""
        there = []
        for rank in ranks:
            if rank in self._there or self._store.check([_key(rank)]):
                self._there.add(rank)
                there.append(rank)
        values = self._store.multi_get([_key(rank) for rank in there]) if there else []
        return {rank: _status(json.loads(value)) for rank, value in zip(there, values, strict=True)}

    def trouble(self) -> Trouble | None:
        """Return the trouble that ends the run, if a rank has met one."""
        if not self._store.check([_TROUBLE]):
            return None
        return Trouble(**json.loads(self._store.multi_get([_TROUBLE])[0]))

    def tell(self, trouble: Trouble) -> Trouble:
        """Write down trouble, unless another rank was first; return what stands there."""
        written = self._store.compare_set(_TROUBLE, "", json.dumps(asdict(trouble)))
        return Trouble(**json.loads(written))


def _key(rank: int) -> str:
    return f"status {rank}"


def _status(values: Mapping[str, Any]) -> RankStatus:
    """Return a line of the board from its JSON values."""
    return RankStatus(**{**values, "process": ProcessId(**values["process"])})
