"""The processes of a run, and what they tell one another on the host.

A run is one process, or several that `torchrun` starts: one a GPU, each with the same program. The
processes are called ranks. `world()` returns the one that this process belongs to. In a run of one
process every method returns what it is given, and no process group exists.

This module imports no torch. `process_group.py` opens the world of several processes, and
`collectives.py` moves tensors between them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one process; this class is a run of one process.

    Attributes:
        rank: The number of this process, from 0.
        local_rank: The number of this process on its machine, from 0: the index of its GPU.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: str = ""

    @property
    def waited_s(self) -> float:
        """The seconds that this process has waited for the others, on the host."""
        return 0.0

    @property
    def is_first(self) -> bool:
        """True of rank 0, which alone writes the run directory and speaks to the user."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return this rank's items of a list that all ranks have: every `size`-th one."""
        return items[self.rank :: self.size]

    def share_of_machine(self, count: int) -> int:
        """Return how many of a machine's `count` helpers this rank has: at least 1, but 0 of 0."""
        more = count % self.local_size > self.local_rank
        return max(count // self.local_size + more, min(count, 1))

    def in_order(self, shares: Sequence[Sequence[Item]]) -> list[Item]:
        """Return the list whose `share` each rank had, from the shares in the order of ranks."""
        total = sum(map(len, shares))
        return [shares[i % self.size][i // self.size] for i in range(total)]

    def gather(self, what: str, value: Item) -> list[Item]:
        """Return the values of all ranks, in the order of ranks.

        Every rank calls this method, with the same words.

        Args:
            value: This rank's value, which `pickle` can encode.
        """
        return [value]

    def gather_in_order(self, what: str, share: Sequence[Item]) -> list[Item]:
        """Return the whole list, of which each rank gives its `share`."""
        return self.in_order(self.gather(what, share))

    def from_first(self, what: str, make: Callable[[], Item]) -> Item:
        """Return what rank 0 makes; an error that it raises is raised by every rank.

        Args:
            make: Makes the value, which `pickle` can encode; called by rank 0 alone.
        """
        return make()

    def from_first_alone(self, what: str, make: Callable[[], Item], otherwise: Item) -> Item:
        """Return what `make` makes on rank 0, and `otherwise` on the other ranks.

        The value need not be one that `pickle` can encode. An error that `make` raises is raised by
        every rank.

        Args:
            make: Makes the value; called by rank 0 alone.
        """
        made: list[Item] = []
        self.from_first(what, lambda: made.append(make()))
        return made[0] if made else otherwise

    def together(self, what: str, work: Callable[[], Item]) -> Item:
        """Return what this rank makes, when every rank has made its own.

        An error that a rank raises is raised by every rank; of several errors, the lowest rank's.
        """
        return work()

    def channel(self) -> World:
        """Return the same processes, whose messages do not mix with those of this world.

        Another thread speaks through it. Every rank calls this method.
        """
        return self

    def awaiting(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this rank waits for the others by."""
        return contextlib.nullcontext()

    def same(self, what: str, value: Any) -> None:
        """Check that all ranks have the same value.

        Raises:
            RanksDiffer: Ranks have other values; the message names them.
        """

    def barrier(self, what: str) -> None:
        """Return when every rank has called this method."""
        self.gather(what, None)


ONE_PROCESS = World()
_world = ONE_PROCESS


def started_by_torchrun() -> bool:
    """Return whether torchrun, or a program like it, has started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_rank() -> int:
    """Return the rank that torchrun gave to this process; 0 of a process that it did not start."""
    return int(os.environ["RANK"]) if started_by_torchrun() else 0


def launched_size() -> int:
    """Return the number of processes that torchrun has started; 1 where it started none."""
    return int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1


def world() -> World:
    """Return the world that this process belongs to."""
    return _world


def set_world(new: World) -> None:
    """Make `new` the world of this process; called when a process group opens or closes."""
    global _world
    _world = new


def ranks_that_differ(values: Sequence[object]) -> list[int]:
    """Return the ranks whose values differ from the value that most ranks have.

    Where no value is the most frequent one, rank 0's counts.

    Args:
        values: A value of each rank, in the order of ranks.
    """
    counts = [sum(other == value for other in values) for value in values]
    most = [value for value, count in zip(values, counts, strict=True) if count == max(counts)]
    usual = most[0] if all(value == most[0] for value in most) else values[0]
    return [rank for rank, value in enumerate(values) if value != usual]


def named(ranks: Sequence[int]) -> str:
    """Return the names of some ranks, in words."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
