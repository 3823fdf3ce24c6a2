"""The other ranks of a run: where each one is, and how all end when one is lost or fails.

Each rank has a line on a board in the run's key-value store: its phase and step, how many
collectives it has begun, and what it waits for. The first rank that meets trouble writes it down as
well; all ranks end by this one account, with one exit code. Trouble is an error or a hang that a
rank reports itself, or a process of this machine that is gone. Each rank looks for it when a
collective breaks, on SIGTERM, and once per second in a thread, which ends the process if a main
thread stuck in a kernel does not do so within seconds.

A process that is stopped (SIGSTOP) and a machine that is cut off are not noticed here: they end the
run by `distributed.timeout_s`. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from jetrl.errors import EXIT_HANG, RankLost, Terminated, ending

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger(__name__)

TICK_S = 1.0
ANSWER_S = 2.0  # for a lost rank's process to be gone, or its words to come
BUSY_S = 4.0  # for the main thread to notice trouble
ENDING_S = 6.0  # for the main thread to end, once it has noticed
LEAVE_S = 3.0  # for last words, with a store or a disk that may not answer

RECORD = "board.json"
UNKNOWN = -1  # instead of a rank that is lost
_TROUBLE = "trouble"


@dataclass(frozen=True)
class RankStatus:
    """The line of a rank on the board.

    `number` counts the collectives that it has begun; `awaits` names the one in which it waits.
    `left` is True once it ends by itself. `phase` is empty between phases.
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
        """The phase and step in words, with what the rank waits for."""
        phase = f"in {self.phase}" if self.phase else "between phases"
        where = f"{phase} of step {self.step}" if self.phase or self.step else "before step 1"
        return where + (f", waiting for the others ({self.awaits})" if self.awaits else "")


@dataclass(frozen=True)
class Trouble:
    """The end of a rank that ends the run.

    A rank is "lost" if it cannot say so itself, "failed" if it raised an error, and ends by a
    "hang" if its watchdog ended it. `teller` prints the message if the lost rank is unknown.
    """

    rank: int
    kind: Literal["lost", "failed", "hang"]
    words: str
    code: int = EXIT_HANG
    teller: int = 0

    @property
    def printed_by(self) -> int:
        """The rank that prints the message and records the board."""
        if self.rank == UNKNOWN:
            return self.teller
        return int(self.rank == 0 and self.kind == "lost")

    @property
    def message(self) -> str:
        return f"{'stopped' if self.kind == 'lost' else f'rank {self.rank}'}: {self.words}"

    @property
    def reason(self) -> str:
        """The reason of the run's end, in a line."""
        if self.kind == "lost":
            return self.words
        return f"rank {self.rank}: {self.words.strip().splitlines()[-1]}"


class Peers:
    """The other ranks of a run; this class is a run that has none."""

    def here(self, phase: str, step: int) -> None:
        """Write down where this rank is; an empty phase is between phases."""

    @contextlib.contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """Take part in a collective in the body of the `with`."""
        yield

    def lost(self, what: str, reason: str) -> RankLost:
        """Return the error of a collective that broke, which names the lost rank if it can."""
        return RankLost(f"another rank is gone or did not answer ({what}): {reason}")

    def waits_for_others(self) -> bool:
        """Return whether this rank is silent only because it waits for others that are behind."""
        return False

    def is_well(self, rank: int) -> bool:
        """Return whether another rank is known to run."""
        return False

    def trouble(self) -> Trouble | None:
        """Return what ends the run, after one more look for it."""
        return None

    def failed(self, words: str, code: int, hangs: bool = False) -> None:
        """Tell the others that this rank ends, so that they end as well."""

    def leaving(self) -> None:
        """Tell the others that this rank ends in an orderly way, as they do themselves."""

    def interrupted(self) -> bool:
        """Return whether a signal handler, which calls this first, is to ignore its signal.

        True if this rank is ending already; RankLost if another rank's trouble caused the signal.
        """
        return False

    def close(self) -> None:
        """End the watch over the others."""

    def attach(
        self, folder: Path, on_hang: Callable[[str], None], at_end: Callable[[Trouble], None]
    ) -> None:
        """Name the folder, which may not exist yet, for a record of trouble, and two callbacks.

        `on_hang` is called when another rank hangs while this one still waits for it, `at_end` when
        this rank must leave while its main thread cannot.
        """


NOBODY = Peers()
_peers: Peers = NOBODY


def peers() -> Peers:
    """Return the other ranks of the run that this process belongs to."""
    return _peers


class OtherRanks(Peers):
    """The other ranks of a run of several processes, watched between `open` and `close`.

    Nobody else may wait on the connection of `store`. `leave` ends this process after its last
    words. `keeper` is the process that keeps the store, if it is this one's parent; else 0.
    """

    def __init__(
        self,
        store: Store,
        status: RankStatus,
        size: int,
        on_machine: Collection[int],
        leave: Callable[[Trouble], None],
        write_collectives: Callable[[Path, int], None] = lambda folder, rank: None,
        keeper: int = 0,
    ) -> None:
        self._store, self._status, self._size = store, status, size
        self._rank, self._leave, self._keeper = status.rank, leave, keeper
        self._write_collectives = write_collectives
        self._neighbors = [rank for rank in on_machine if rank != status.rank]
        self._main = threading.main_thread().ident
        self._handler: Any = signal.SIG_DFL  # before this object was opened
        self._folder: Path | None = None
        self._on_hang: Callable[[str], None] = lambda why: None
        self._at_end: Callable[[Trouble], None] = lambda trouble: None
        self._trouble: Trouble | None = None
        self._ending = self._orderly = False
        self._recorded: threading.Event | None = None  # set once the record is on disk
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)

    def open(self) -> None:
        """Begin to watch, and make this object the process's `peers()`."""
        global _peers
        _peers = self
        self._write()
        if threading.get_ident() == self._main:
            self._handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        self._thread.start()

    def close(self) -> None:
        global _peers
        self.leaving()
        self._over.set()
        self._thread.join(ANSWER_S)  # Python's end would kill it within C++, and so the process
        if threading.get_ident() == self._main:
            signal.signal(signal.SIGTERM, self._handler)
        _peers = NOBODY

    def here(self, phase: str, step: int) -> None:
        """Write down where this rank is, at once: it may be lost the next moment."""
        self._write(phase=phase, step=step)

    @contextlib.contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """Count a collective of the main thread, and note what it waits for."""
        if threading.get_ident() != self._main:
            yield
            return
        self._status = replace(self._status, number=self._status.number + 1, awaits=what)
        try:
            yield
        finally:
            self._status = replace(self._status, awaits="")

    def lost(self, what: str, reason: str) -> RankLost:
        deadline = time.monotonic() + ANSWER_S
        while (trouble := self.trouble()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if threading.get_ident() == self._main:
            self._ending = True
        if trouble is None:
            words = f"rank {self._rank} waited for the others ({what})"
            words += f", and one of them is gone or did not answer: {reason}"
            places = (f"rank {r} was last {s.place}" for r, s in sorted(self._others().items()))
            words = "; ".join([words, *places])
            trouble = self._tell(Trouble(UNKNOWN, "lost", words, teller=self._rank))
        return RankLost(trouble.reason, trouble.code)

    def waits_for_others(self) -> bool:
        """Return whether another rank is behind this one, and its own watchdog has not ended it."""
        own = self._status
        here = [other for other in self._others().values() if not other.left]
        return any(o.number < own.number or (own.awaits and not o.awaits) for o in here)

    def is_well(self, rank: int) -> bool:
        return (line := self._others().get(rank)) is not None and not self._is_gone(line)

    def trouble(self) -> Trouble | None:
        if self._trouble is None and not self._over.is_set():
            with contextlib.suppress(RuntimeError):  # of the store, which may be gone
                self._find()
        return self._trouble

    def failed(self, words: str, code: int, hangs: bool = False) -> None:
        self._ending = True
        self._status = replace(self._status, left=True)
        if self._trouble is None:
            self._tell(Trouble(self._rank, "hang" if hangs else "failed", words, code))

    def leaving(self) -> None:
        self._ending = self._orderly = True
        self._write(left=True)

    def interrupted(self) -> bool:
        if self._ending:
            return True
        if (trouble := self.trouble()) is None:
            return False
        self._ending = True
        raise RankLost(trouble.reason, trouble.code)

    def attach(
        self, folder: Path, on_hang: Callable[[str], None], at_end: Callable[[Trouble], None]
    ) -> None:
        self._folder, self._on_hang, self._at_end = folder, on_hang, at_end

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """End the process, if the run does not yet, or no longer, handle SIGTERM itself."""
        if not self.interrupted():
            words, code = ending(Terminated())
            self.failed(words, code)
            raise Terminated

    def _write(self, **changed: Any) -> None:
        """Write this rank's line; without a store that answers nobody reads it."""
        if changed:  # else this is the thread, which must not undo the main thread's changes
            self._status = replace(self._status, **changed)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"status {self._rank}", json.dumps(asdict(self._status)))

    def _lines(self, ranks: Iterable[int]) -> dict[int, RankStatus]:
        """Return the lines of those ranks that have written one."""
        there = [rank for rank in ranks if self._store.check([f"status {rank}"])]
        lines = self._store.multi_get([f"status {rank}" for rank in there]) if there else []
        return {r: RankStatus(**json.loads(line)) for r, line in zip(there, lines, strict=True)}

    def _others(self) -> dict[int, RankStatus]:
        """Return the lines of the other ranks; none if the store does not answer."""
        with contextlib.suppress(RuntimeError):
            return self._lines(rank for rank in range(self._size) if rank != self._rank)
        return {}

    def _told(self) -> Trouble | None:
        """Return the trouble that a rank has written down."""
        there = self._store.check([_TROUBLE])
        return Trouble(**json.loads(self._store.get(_TROUBLE))) if there else None

    def _tell(self, trouble: Trouble) -> Trouble:
        """Write trouble down, unless another rank was first; return the one that counts."""
        with contextlib.suppress(RuntimeError):  # without a store each rank ends by its own account
            written = self._store.compare_set(_TROUBLE, "", json.dumps(asdict(trouble)))
            trouble = Trouble(**json.loads(written))
        self._record(trouble)
        self._trouble = trouble
        return trouble

    def _find(self) -> None:
        """Look for trouble that a rank has written down, and for processes that are gone."""
        if self._keeper and os.getppid() != self._keeper:
            words = "torchrun, which keeps the key-value store of the run, is gone"
            self._trouble = Trouble(UNKNOWN, "lost", words)
            return
        told = self._told()
        lines = {} if told else self._lines(self._neighbors)
        for rank in [line.rank for line in lines.values() if self._is_gone(line)]:
            line = self._lines([rank])[rank]  # it may have written a last line
            told = told or self._told()
            if told is None and not line.left:
                why = "killed from outside, by the system for its memory, or a crash"
                words = f"rank {line.rank} is gone (process {line.pid} on {line.node}: {why})"
                words += f"; it was last {line.place}"
                told = self._tell(Trouble(line.rank, "lost", words))
        if told is not None and self._trouble is None:
            self._record(told)
            self._trouble = told

    def _is_gone(self, line: RankStatus) -> bool:
        """Return whether a rank of this machine has no process any more."""
        if line.rank not in self._neighbors:
            return False
        try:
            os.kill(line.pid, 0)
        except (ProcessLookupError, PermissionError) as error:
            return isinstance(error, ProcessLookupError)
        return False

    def _record(self, trouble: Trouble) -> None:
        """Write this rank's collectives; one of the surviving ranks also writes the board."""
        if self._recorded is not None:  # the other thread writes; this one may end the process
            self._recorded.wait(LEAVE_S)
        if self._recorded is not None or self._folder is None:
            return
        self._recorded = threading.Event()
        if threading.get_ident() == self._main:
            self._ending = True  # SIGTERM must not cut the record off
        if trouble.kind != "failed":
            self._write_collectives(self._folder, self._rank)
        if self._rank == trouble.printed_by:
            lines = sorted({**self._others(), self._rank: self._status}.items())
            ranks = [{**asdict(x), "place": x.place, "collectives": x.number} for _, x in lines]
            board = {"time": time.time(), "rank": trouble.rank, "words": trouble.reason}
            text = json.dumps({**board, "ranks": ranks}, indent=1)
            try:
                (self._folder / RECORD).write_text(text + "\n")
            except OSError as error:  # a full disk may be the trouble
                logger.warning("%s: %s", self._folder / RECORD, error)
        self._recorded.set()

    def _watch(self) -> None:
        """Keep this rank's line fresh, and end the process if trouble comes; the thread's body."""
        noticed: float | None = None
        while not self._over.wait(TICK_S):
            self._write()
            trouble = self.trouble()
            if trouble is None or self._orderly:
                continue
            if noticed is None:
                noticed = time.monotonic()
                if trouble.kind == "hang" and trouble.rank != self._rank:
                    with contextlib.suppress(Exception):
                        self._on_hang(trouble.reason)
                # The handler of SIGTERM raises RankLost, unless the main thread is within C.
                if not self._ending and self._main and callable(signal.getsignal(signal.SIGTERM)):
                    signal.pthread_kill(self._main, signal.SIGTERM)
            elif time.monotonic() - noticed > (ENDING_S if self._ending else BUSY_S):
                self._end_process(trouble)

    def _end_process(self, trouble: Trouble) -> None:
        """End this process, whatever its main thread is doing."""
        code = trouble.code or EXIT_HANG
        limit = threading.Timer(LEAVE_S, os._exit, (code,))
        limit.daemon = True
        limit.start()
        try:
            with contextlib.suppress(Exception):
                self._at_end(trouble)
            self._leave(trouble)
        finally:
            os._exit(code)
