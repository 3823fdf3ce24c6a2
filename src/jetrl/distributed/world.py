"""Processes (ranks) of a run, and their exchange of host values. Does not import torch.

A run is a single process, or several started by `torchrun`, one per GPU. In a single-process run,
every method of `world()` returns its input, and there is no process group. `process_group.py` opens
the multi-process world; `collectives.py` moves tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jetrl.errors import UserError

Item = TypeVar("Item")


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one; this base class is a single-process run.

    `local_rank` counts processes on a machine: the index of this process's GPU.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: str = ""

    @property
    def waited_s(self) -> float:
        """Seconds that this process has waited for other ranks on the host."""
        return 0.0

    @property
    def is_first(self) -> bool:
        """True for rank 0, which writes the run directory and the console."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return this rank's share of a common list: every `size`-th item."""
        return items[self.rank :: self.size]

    def share_of_machine(self, count: int) -> int:
        """Return this rank's share of `count` helpers of a machine: at least 1, but 0 of 0."""
        more = count % self.local_size > self.local_rank
        return max(count // self.local_size + more, min(count, 1))

    def gather(self, what: str, value: Item) -> list[Item]:
        """Return the values of all ranks, by rank; each rank calls this with a picklable value."""
        return [value]

    def gather_in_order(self, what: str, share: Sequence[Item]) -> list[Item]:
        """Return the whole list, given each rank's `share`."""
        shares = self.gather(what, share)
        return [shares[i % self.size][i // self.size] for i in range(sum(map(len, shares)))]

    def from_first(self, what: str, make: Callable[[], Item]) -> Item:
        """Return the picklable result of `make` on rank 0; every rank raises its error."""
        return make()

    def together(self, what: str, work: Callable[[], Item]) -> Item:
        """Return this rank's result once all have theirs; all raise the first rank's error."""
        return work()

    def channel(self) -> World:
        """Return the same world with a separate channel for another thread; a collective."""
        return self

    def same(self, what: str, value: Any) -> None:
        """Raise RanksDiffer, naming the ranks, unless all have the same value."""

    def barrier(self, what: str) -> None:
        """Wait until every rank has called this method."""
        self.gather(what, None)


ONE_PROCESS = World()
_world = ONE_PROCESS


def started_by_torchrun() -> bool:
    """Return True if torchrun or a similar launcher started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_rank() -> int:
    """Return this process's rank from torchrun; 0 without torchrun."""
    return _number_of("RANK") if started_by_torchrun() else 0


def launched_size() -> int:
    """Return the number of processes started by torchrun; 1 without torchrun."""
    return _number_of("WORLD_SIZE") if started_by_torchrun() else 1


def _number_of(variable: str) -> int:
    value = os.environ[variable]
    if not value.isdecimal():
        raise UserError(
            f"the environment has {variable}={value:.40}, which is not a number: start ranks with "
            "torchrun, or unset RANK and WORLD_SIZE"
        )
    return int(value)


def world() -> World:
    """Return this process's world."""
    return _world


def set_world(new: World) -> None:
    """Set this process's world, when a process group opens or closes."""
    global _world
    _world = new


def ranks_that_differ(values: Sequence[object]) -> list[int]:
    """Return the ranks whose values differ from the most common one; ties go to rank 0."""
    counts = [sum(other == value for other in values) for value in values]
    most = [value for value, count in zip(values, counts, strict=True) if count == max(counts)]
    usual = most[0] if all(value == most[0] for value in most) else values[0]
    return [rank for rank, value in enumerate(values) if value != usual]


def named(ranks: Sequence[int]) -> str:
    """Return ranks as text."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
