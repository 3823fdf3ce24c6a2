"""Monitoring of the other ranks: where each one is, and a common end if one is lost or fails.

Each rank has a status line in the run's key-value store: phase, step, number of collectives
started, and what it waits for. The first rank that detects trouble records it, and all ranks exit
with this reason and exit code. Trouble is an error or hang that a rank reports itself, or a dead
local process. Each rank checks when a collective fails, on SIGTERM, and once per second in a
thread, which ends the process if the main thread is stuck in a kernel.

Stopped processes (SIGSTOP) and disconnected machines are not detected here: they end the run after
`distributed.timeout_s`. This module does not import torch.
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
ANSWER_S = 2.0  # for a lost rank's process to exit, or its message to arrive
BUSY_S = 4.0  # for the main thread to notice trouble
ENDING_S = 6.0  # for the main thread to exit once it has noticed
LEAVE_S = 3.0  # for a last message, if store or disk may not respond

RECORD = "board.json"
UNKNOWN = -1  # placeholder for an unknown lost rank
_TROUBLE = "trouble"


@dataclass(frozen=True)
class RankStatus:
    """Status line of a rank.

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
    """The reason for which a rank ended the run.

    Kinds: "lost" if the rank cannot report itself, "failed" if it raised an error, "hang" if its
    watchdog ended it. `teller` prints the message if the lost rank is unknown.
    """

    rank: int
    kind: Literal["lost", "failed", "hang"]
    words: str
    code: int = EXIT_HANG
    teller: int = 0

    @property
    def printed_by(self) -> int:
        """The rank that prints the message and saves the status lines."""
        if self.rank == UNKNOWN:
            return self.teller
        return int(self.rank == 0 and self.kind == "lost")

    @property
    def message(self) -> str:
        return f"{'stopped' if self.kind == 'lost' else f'rank {self.rank}'}: {self.words}"

    @property
    def reason(self) -> str:
        """Reason for the end of the run, in one line."""
        if self.kind == "lost":
            return self.words
        return f"rank {self.rank}: {self.words.strip().splitlines()[-1]}"


class Peers:
    """The other ranks of a run; this base class is a run without any."""

    def here(self, phase: str, step: int) -> None:
        """Record where this rank is; an empty phase means between phases."""

    @contextlib.contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """Run a collective in this context."""
        yield

    def lost(self, what: str, reason: str) -> RankLost:
        """Return the error for a failed collective, naming the lost rank if known."""
        return RankLost(f"another rank is gone or did not answer ({what}): {reason}")

    def waits_for_others(self) -> bool:
        """Return True if this rank is silent only because it waits for slower ranks."""
        return False

    def is_well(self, rank: int) -> bool:
        """Return True if another rank is known to be running."""
        return False

    def trouble(self) -> Trouble | None:
        """Return the failure that ends the run, polling once more."""
        return None

    def failed(self, words: str, code: int, hangs: bool = False) -> None:
        """Tell the others that this rank fails, so that they exit too."""

    def leaving(self) -> None:
        """Tell the others that this rank exits normally, as they do."""

    def interrupted(self) -> bool:
        """Return True if a signal handler, which calls this first, must ignore its signal.

        True if this rank is already exiting; raises RankLost if another rank's failure caused the
        signal.
        """
        return False

    def close(self) -> None:
        """Stop monitoring the other ranks."""

    def attach(
        self, folder: Path, on_hang: Callable[[str], None], at_end: Callable[[Trouble], None]
    ) -> None:
        """Set the folder for failure records, which may not exist yet, and two callbacks.

        `on_hang` is called if another rank hangs while this one waits for it, `at_end` if this rank
        must exit although its main thread cannot.
        """


NOBODY = Peers()
_peers: Peers = NOBODY


def peers() -> Peers:
    """Return the peers of this process's run."""
    return _peers


class OtherRanks(Peers):
    """Monitors the other ranks of a multi-process run between `open` and `close`.

    Nothing else may wait on the connection of `store`. `leave` ends this process after its last
    message. `keeper` is the process that hosts the store if it is this one's parent, else 0.
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
        self._handler: Any = signal.SIG_DFL  # previous handler
        self._folder: Path | None = None
        self._on_hang: Callable[[str], None] = lambda why: None
        self._at_end: Callable[[Trouble], None] = lambda trouble: None
        self._trouble: Trouble | None = None
        self._ending = self._orderly = False
        self._recorded: threading.Event | None = None  # set once the record is written
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)

    def open(self) -> None:
        """Start monitoring, and make this object the process's `peers()`."""
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
        self._thread.join(ANSWER_S)  # else interpreter exit would crash it inside C++
        if threading.get_ident() == self._main:
            signal.signal(signal.SIGTERM, self._handler)
        _peers = NOBODY

    def here(self, phase: str, step: int) -> None:
        """Record where this rank is, immediately: it may be lost the next moment."""
        self._write(phase=phase, step=step)

    @contextlib.contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """Count a collective of the main thread, and record what it waits for."""
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
        """Return True if another rank is behind and its watchdog has not ended it."""
        own = self._status
        here = [other for other in self._others().values() if not other.left]
        return any(o.number < own.number or (own.awaits and not o.awaits) for o in here)

    def is_well(self, rank: int) -> bool:
        return (line := self._others().get(rank)) is not None and not self._is_gone(line)

    def trouble(self) -> Trouble | None:
        if self._trouble is None and not self._over.is_set():
            with contextlib.suppress(RuntimeError):  # the store may be gone
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
        """End the process if the run does not handle SIGTERM at this point."""
        if not self.interrupted():
            words, code = ending(Terminated())
            self.failed(words, code)
            raise Terminated

    def _write(self, **changed: Any) -> None:
        """Write this rank's status; ignored if the store does not respond."""
        if changed:  # else the thread must not overwrite the main thread's changes
            self._status = replace(self._status, **changed)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"status {self._rank}", json.dumps(asdict(self._status)))

    def _lines(self, ranks: Iterable[int]) -> dict[int, RankStatus]:
        """Return the status lines written so far, by rank."""
        there = [rank for rank in ranks if self._store.check([f"status {rank}"])]
        lines = self._store.multi_get([f"status {rank}" for rank in there]) if there else []
        return {r: RankStatus(**json.loads(line)) for r, line in zip(there, lines, strict=True)}

    def _others(self) -> dict[int, RankStatus]:
        """Return the status lines of the other ranks; empty if the store does not respond."""
        with contextlib.suppress(RuntimeError):
            return self._lines(rank for rank in range(self._size) if rank != self._rank)
        return {}

    def _told(self) -> Trouble | None:
        """Return the trouble recorded by a rank, if any."""
        there = self._store.check([_TROUBLE])
        return Trouble(**json.loads(self._store.get(_TROUBLE))) if there else None

    def _tell(self, trouble: Trouble) -> Trouble:
        """Record trouble unless another rank was first; return the one that counts."""
        with contextlib.suppress(RuntimeError):  # without a store, ranks exit on their own
            written = self._store.compare_set(_TROUBLE, "", json.dumps(asdict(trouble)))
            trouble = Trouble(**json.loads(written))
        self._record(trouble)
        self._trouble = trouble
        return trouble

    def _find(self) -> None:
        """Look for recorded trouble and for dead processes."""
        if self._keeper and os.getppid() != self._keeper:
            words = "torchrun, which keeps the key-value store of the run, is gone"
            self._trouble = Trouble(UNKNOWN, "lost", words)
            return
        told = self._told()
        lines = {} if told else self._lines(self._neighbors)
        for rank in [line.rank for line in lines.values() if self._is_gone(line)]:
            line = self._lines([rank])[rank]  # it may have written a last status
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
        """Return True if the process of a local rank no longer exists."""
        if line.rank not in self._neighbors:
            return False
        try:
            os.kill(line.pid, 0)
        except (ProcessLookupError, PermissionError) as error:
            return isinstance(error, ProcessLookupError)
        return False

    def _record(self, trouble: Trouble) -> None:
        """Save this rank's collectives; one surviving rank also saves the status lines."""
        if self._recorded is not None:  # the other thread writes; this one may end the process
            self._recorded.wait(LEAVE_S)
        if self._recorded is not None or self._folder is None:
            return
        self._recorded = threading.Event()
        if threading.get_ident() == self._main:
            self._ending = True  # SIGTERM must not interrupt the record
        if trouble.kind != "failed":
            self._write_collectives(self._folder, self._rank)
        if self._rank == trouble.printed_by:
            lines = sorted({**self._others(), self._rank: self._status}.items())
            ranks = [{**asdict(x), "place": x.place, "collectives": x.number} for _, x in lines]
            board = {"time": time.time(), "rank": trouble.rank, "words": trouble.reason}
            text = json.dumps({**board, "ranks": ranks}, indent=1)
            try:
                (self._folder / RECORD).write_text(text + "\n")
            except OSError as error:  # a full disk may be the cause
                logger.warning("%s: %s", self._folder / RECORD, error)
        self._recorded.set()

    def _watch(self) -> None:
        """Refresh this rank's status, and end the process on trouble; body of the thread."""
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
                # The SIGTERM handler raises RankLost, unless the main thread is inside C code.
                if not self._ending and self._main and callable(signal.getsignal(signal.SIGTERM)):
                    signal.pthread_kill(self._main, signal.SIGTERM)
            elif time.monotonic() - noticed > (ENDING_S if self._ending else BUSY_S):
                self._end_process(trouble)

    def _end_process(self, trouble: Trouble) -> None:
        """End this process even if its main thread is stuck."""
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
