"""torchrun's key-value store, where ranks compare their setup and report how they end.

A run begins only if all ranks wrote the same facts. On an error, ranks write their messages to the
store, and rank 0 prints a common message once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from jetrl.distributed.console import tell
from jetrl.distributed.world import launched_rank, launched_size, named, ranks_that_differ
from jetrl.errors import RankLost, Terminated, UserError

START_S = 300.0  # for the slowest rank to import packages from a cold disk
SILENT_S = 10.0  # before rank 0 reports whom it waits for
LAST_WORDS_S = 8.0  # for ranks that end at the same time, on a busy machine

_TOLD = "told"


class NoMeeting(UserError):  # noqa: N818  (bad input, as its base)
    """The processes of a run cannot reach each other."""


class Meeting:
    """The key-value store of a run, seen from one rank."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.compared = False
        self._joined = 0  # counter: a script may start several runs
        self._words: Store = PrefixStore("jetrl", store)

    def again(self) -> Meeting:
        """Return this meeting on another connection, for another thread."""
        store: Any = self.store  # whose types lack this method
        return Meeting(store.clone(), self.rank, self.size)

    def own_store(self, name: str) -> Store:
        """Return a prefix of the store on another connection, on which nobody else waits."""
        return PrefixStore(f"jetrl {name} {self._joined}", self.again().store)

    def group_store(self) -> Store:
        """Return the store for the process group of the current run."""
        return PrefixStore(f"group {self._joined}", self.store)

    def part(self) -> None:
        """Record that the run has ended; the ranks may meet for another one."""
        self.compared = False
        self._joined += 1

    def compare(self, facts: Mapping[str, str], problem: str = "") -> None:
        """Return once all ranks have equal facts and no problem; otherwise all raise UserError."""
        self.compared = True
        start = f"start {self._joined}"
        if self._words.add(f"{start} as {self.rank}", 1) > 1:
            self._refuse(start, f"two processes have RANK={self.rank}: give each its own")
        facts_here = {"problem": problem, "facts": {**facts}, "size": self.size}
        self._words.set(f"{start} {self.rank}", json.dumps(facts_here))
        came = self._all(start)
        problems = [one["problem"] for one in came]
        if any(problems):
            raise UserError(_common(problems))
        all_facts = [one["facts"] for one in came]
        for name in dict.fromkeys(name for one in all_facts for name in one):
            values = [one.get(name) for one in all_facts]
            ranks = ranks_that_differ(values)
            if ranks:
                usual = next(value for rank, value in enumerate(values) if rank not in ranks)
                both = f"{values[ranks[0]]} on {named(ranks)} and {usual} on the other ranks"
                raise UserError(f"{name} is {both}: start all ranks alike")

    def end(self, words: str, heard: bool = False) -> str | None:
        """Return the text that this rank must print when it ends with an error, or None.

        Rank 0 prints its own message, and those of ranks that end for other reasons. Other ranks
        print only if rank 0 does not within seconds; `heard` means that rank 0 will. An empty
        message leaves it to another rank.
        """
        self._words.set(f"end {self.rank}", words)
        if self.rank:
            if not heard and not self._came([_TOLD]):
                return f"rank {self.rank}: {words}"
            self._words.set(f"heard {self.rank}", "yes")
            return None
        ends = [f"end {rank}" for rank in range(self.size)]
        if not (heard and has_agent_store()):  # otherwise the others lose the store with this rank
            start = f"start {self._joined}"
            met = [rank for rank in range(self.size) if self._words.check([f"{start} {rank}"])]
            self._came([ends[rank] for rank in met])
        said = [self._words.get(key).decode() if self._words.check([key]) else "" for key in ends]
        return _common(said, own=words)

    def told(self) -> None:
        """Tell ending ranks that rank 0 has printed their messages."""
        self._words.set(_TOLD, "yes")
        ending = [rank for rank in range(1, self.size) if self._words.check([f"end {rank}"])]
        self._came([f"heard {rank}" for rank in ending])  # this process may host the store

    def _came(self, keys: Sequence[str]) -> bool:
        """Return True if all keys are in the store, now or within seconds."""
        deadline = time.monotonic() + LAST_WORDS_S
        while not (came := self._words.check(list(keys))) and time.monotonic() < deadline:
            time.sleep(0.02)
        return bool(came)

    def _all(self, start: str) -> list[dict[str, Any]]:
        """Wait until every rank has written; return the records by rank."""
        began, told = time.monotonic(), False
        came: dict[int, dict[str, Any]] = {}
        try:
            while True:
                for rank in range(self.size):
                    if rank not in came and self._words.check([f"{start} {rank}"]):
                        came[rank] = json.loads(self._words.get(f"{start} {rank}"))
                        if (size := came[rank]["size"]) != self.size:
                            both = f"{size} on rank {rank} and {self.size} on rank {self.rank}"
                            self._refuse(start, f"WORLD_SIZE is {both}: start all ranks alike")
                if self._words.check([f"{start} refused"]):
                    raise UserError(self._words.get(f"{start} refused").decode())
                if len(came) == self.size:
                    return [came[rank] for rank in range(self.size)]
                waited = time.monotonic() - began
                if waited > START_S:
                    late = f"{self._missing(came)} did not come within {START_S:.0f} s"
                    raise UserError(f"{late}: its own output, or torchrun's, says why")
                if waited > SILENT_S and self.rank == 0 and not told:
                    told = True
                    tell(f"waiting for {self._missing(came)}, for up to {START_S:.0f} s")
                time.sleep(0.02)
        except Terminated:
            what = f"terminated while waiting for {self._missing(came)}"
            words = f"{what}; torchrun says which rank ended first"
            raise RankLost(words, Terminated.exit_code) from None

    def _missing(self, came: Collection[int]) -> str:
        """Name the ranks that have not joined."""
        missing = [rank for rank in range(self.size) if rank not in came]
        return f"{named(missing)} of {self.size} (WORLD_SIZE)"

    def _refuse(self, start: str, why: str) -> NoReturn:
        """Abort the start on all ranks."""
        self._words.set(f"{start} refused", why)
        raise UserError(why)


_meetings: list[Meeting] = []  # at most one, joined once per process


def meet(init_method: str = "env://") -> Meeting:
    """Return the store of this process's run, connecting on the first call."""
    if _meetings:
        return _meetings[0]
    rank, size = launched_rank(), launched_size()
    if not 0 <= rank < size:
        raise NoMeeting(f"RANK={rank} and WORLD_SIZE={size}: ranks count from 0 to WORLD_SIZE - 1")
    # A store with a world size would wait silently; `compare` reports whom it waits for.
    waits = size if init_method != "env://" else 1
    try:
        store, _, _ = next(rendezvous(init_method, rank, waits, timeout=timedelta(seconds=START_S)))
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).strip().splitlines()[0]
        what = f"rank {rank} could not be joined to the others at {address}"
        hint = "MASTER_ADDR and MASTER_PORT: try another port, and give each process its own RANK"
        raise NoMeeting(f"{what} ({hint}): {reason}") from None
    _meetings.append(Meeting(_of_this_attempt(store), rank, size))
    return _meetings[0]


def has_agent_store() -> bool:
    """Return True if torchrun, not rank 0, hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _of_this_attempt(store: Store) -> Store:
    """Return a store prefix that no earlier attempt has written to."""
    if not has_agent_store():
        return store
    machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if machines > 1 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        instead = "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started"
        why = "or an attempt would meet what the one before left"
        raise NoMeeting(f"--max-restarts on {machines} machines: {instead}, {why}")
    return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _common(words: Sequence[str], own: str = "") -> str:
    """Return the messages of all ranks as one text, without duplicates."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(words):
        if text:
            ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1 and len(ranks[min(ranks)]) == len(words):
        return min(ranks)
    return "\n".join(
        text if text == own else f"{named(having)}: {text}" for text, having in ranks.items()
    )
