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
END_S = 8.0  # for ranks that end at the same time, on a busy machine

_PRINTED = "printed"


class NoMeeting(UserError):  # noqa: N818  (bad input, as its base)
    """The processes of a run cannot reach each other."""


class Meeting:
    """The key-value store of a run, seen from one rank."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.compared = False
        self._joined = 0  # counter: a script may start several runs
        self._records: Store = PrefixStore("jetrl", store)

    def reconnected(self) -> Meeting:
        """Return this meeting over a new connection, for another thread."""
        store: Any = self.store  # whose types lack this method
        return Meeting(store.clone(), self.rank, self.size)

    def own_store(self, name: str) -> Store:
        """Return a prefix of the store over a new connection, which no other caller waits on."""
        return PrefixStore(f"jetrl {name} {self._joined}", self.reconnected().store)

    def group_store(self) -> Store:
        """Return the store for the process group of the current run."""
        return PrefixStore(f"group {self._joined}", self.store)

    def end_run(self) -> None:
        """Record that the run has ended; the ranks may meet for another one."""
        self.compared = False
        self._joined += 1

    def compare(self, facts: Mapping[str, str], problem: str = "") -> None:
        """Return once all ranks have equal facts and no problem; otherwise all raise UserError."""
        self.compared = True
        start = f"start {self._joined}"
        if self._records.add(f"{start} as {self.rank}", 1) > 1:
            self._refuse(start, f"two processes have RANK={self.rank}: give each its own")
        own = {"problem": problem, "facts": {**facts}, "size": self.size}
        self._records.set(f"{start} {self.rank}", json.dumps(own))
        ranks = self._wait_for_all(start)
        problems = [rank["problem"] for rank in ranks]
        if any(problems):
            raise UserError(_common(problems))
        all_facts = [rank["facts"] for rank in ranks]
        for name in dict.fromkeys(name for one in all_facts for name in one):
            values = [one.get(name) for one in all_facts]
            different = ranks_that_differ(values)
            if different:
                usual = next(value for rank, value in enumerate(values) if rank not in different)
                raise UserError(
                    f"{name} is {values[different[0]]} on {named(different)} and {usual} on the "
                    "other ranks: start all ranks alike"
                )

    def end(self, message: str, rank_0_prints: bool = False) -> str | None:
        """Return the text that this rank must print when it ends with an error, or None.

        Rank 0 prints its own message, and those of ranks that end for other reasons. Other ranks
        print only if rank 0 does not within seconds; `rank_0_prints`: it surely will. An empty
        message leaves it to another rank.
        """
        self._records.set(f"end {self.rank}", message)
        if self.rank:
            if not rank_0_prints and not self._wait_for([_PRINTED]):
                return f"rank {self.rank}: {message}"
            self._records.set(f"heard {self.rank}", "yes")
            return None
        ends = [f"end {rank}" for rank in range(self.size)]
        # Without torchrun's store, the others lose the store with this rank.
        if not (rank_0_prints and has_agent_store()):
            starts = [f"start {self._joined} {rank}" for rank in range(self.size)]
            started = [self._records.check([start]) for start in starts]
            self._wait_for([end for end, begun in zip(ends, started, strict=True) if begun])
        messages = [
            self._records.get(end).decode() if self._records.check([end]) else "" for end in ends
        ]
        return _common(messages, own=message)

    def confirm_printed(self) -> None:
        """Tell exiting ranks that rank 0 has printed their messages."""
        self._records.set(_PRINTED, "yes")
        ending = [rank for rank in range(1, self.size) if self._records.check([f"end {rank}"])]
        self._wait_for([f"heard {rank}" for rank in ending])  # this process may host the store

    def _wait_for(self, keys: Sequence[str]) -> bool:
        """Wait up to `END_S` for keys; return True if all are in the store."""
        deadline = time.monotonic() + END_S
        while not (found := self._records.check(list(keys))) and time.monotonic() < deadline:
            time.sleep(0.02)
        return bool(found)

    def _wait_for_all(self, start: str) -> list[dict[str, Any]]:
        """Wait until every rank has written; return the records by rank."""
        began = time.monotonic()
        reported = False
        joined: dict[int, dict[str, Any]] = {}
        try:
            while True:
                self._read_new(start, joined)
                if len(joined) == self.size:
                    return [joined[rank] for rank in range(self.size)]
                waited = time.monotonic() - began
                if waited > START_S:
                    raise UserError(
                        f"{self._missing(joined)} did not come within {START_S:.0f} s: its own "
                        "output, or torchrun's, says why"
                    )
                if waited > SILENT_S and self.rank == 0 and not reported:
                    reported = True
                    tell(f"waiting for {self._missing(joined)}, for up to {START_S:.0f} s")
                time.sleep(0.02)
        except Terminated:
            raise RankLost(
                f"terminated while waiting for {self._missing(joined)}; torchrun says which rank "
                "ended first",
                Terminated.exit_code,
            ) from None

    def _read_new(self, start: str, joined: dict[int, dict[str, Any]]) -> None:
        """Add the records written since the last call; raise UserError if a rank refused."""
        for rank in range(self.size):
            if rank in joined or not self._records.check([f"{start} {rank}"]):
                continue
            joined[rank] = json.loads(self._records.get(f"{start} {rank}"))
            size = joined[rank]["size"]
            if size != self.size:
                self._refuse(
                    start,
                    f"WORLD_SIZE is {size} on rank {rank} and {self.size} on rank {self.rank}: "
                    "start all ranks alike",
                )
        if self._records.check([f"{start} refused"]):
            raise UserError(self._records.get(f"{start} refused").decode())

    def _missing(self, joined: Collection[int]) -> str:
        """Name the ranks that have not joined."""
        missing = [rank for rank in range(self.size) if rank not in joined]
        return f"{named(missing)} of {self.size} (WORLD_SIZE)"

    def _refuse(self, start: str, why: str) -> NoReturn:
        """Abort the start on all ranks."""
        self._records.set(f"{start} refused", why)
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
        raise NoMeeting(
            f"rank {rank} could not be joined to the others at {address} (MASTER_ADDR and "
            f"MASTER_PORT: try another port, and give each process its own RANK): {reason}"
        ) from None
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
        raise NoMeeting(
            f"--max-restarts on {machines} machines: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "
            "where torchrun is started, or an attempt would meet what the one before left"
        )
    return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _common(messages: Sequence[str], own: str = "") -> str:
    """Return the messages of all ranks as one text, without duplicates."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(messages):
        if text:
            ranks.setdefault(text, []).append(rank)
    if list(ranks.values()) == [list(range(len(messages)))]:
        return messages[0]
    return "\n".join(
        text if text == own else f"{named(having)}: {text}" for text, having in ranks.items()
    )
