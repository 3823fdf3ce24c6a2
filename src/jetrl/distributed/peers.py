"""Monitoring of the other ranks: where each one is, and a common end if one is lost or fails.

The first rank that detects trouble reports it on the board (`board.py`), and all ranks exit with
its reason and exit code. Trouble is an error or hang that a rank reports itself, or a dead local
process. Each rank checks when a collective fails, on SIGTERM, and once per second in the thread of
its `Watch`, which ends the process if the main thread is stuck in a kernel.

Stopped processes (SIGSTOP) and disconnected machines are not detected here: they end the run after
`distributed.timeout_s`. This module does not import torch.

Threads that may call the methods of `Peers`:

    main thread              open, close, attach, here, leaving
    main thread's handlers   interrupted
    any thread               awaiting, lost, trouble, failed, waits_for_others, is_well

On threads other than the main one, `awaiting` does nothing, as only the main thread's collectives
are in the same order on all ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

from jetrl.distributed.board import UNKNOWN, Board, RankStatus, Trouble
from jetrl.errors import EXIT_HANG, RankLost, Terminated, ending

logger = logging.getLogger(__name__)

TICK_S = 1.0
ANSWER_S = 2.0  # for a lost rank's process to exit, or its message to arrive
BUSY_S = 4.0  # for the main thread to notice trouble
ENDING_S = 6.0  # for the main thread to exit once it has noticed
LEAVE_S = 3.0  # for a last message, if store or disk may not respond

RECORD = "board.json"


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

    def failed(self, message: str, code: int, hangs: bool = False) -> None:
        """Report that this rank fails, so that the others exit too."""

    def leaving(self) -> None:
        """Publish that this rank exits normally, as the others do."""

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
    """The other ranks of a multi-process run, monitored between `open` and `close`.

    `neighbors` are the ranks on this machine. `leave` ends this process after its last message.
    `store_host` is the process that hosts the store if it is this one's parent, else 0.
    """

    def __init__(
        self,
        board: Board,
        neighbors: Collection[int],
        leave: Callable[[Trouble], None],
        write_collectives: Callable[[Path, int], None] = lambda folder, rank: None,
        store_host: int = 0,
    ) -> None:
        self._board = board
        self._rank = board.own.rank
        self._neighbors = [rank for rank in neighbors if rank != self._rank]
        self._store_host = store_host
        self._trouble: Trouble | None = None
        self._closed = False
        self.ending = False  # this process exits, for whatever reason
        self.orderly = False  # and so do the others
        self._files = FailureFiles(board, write_collectives)
        self.watch = Watch(self, board, leave)

    def open(self) -> None:
        """Start monitoring, and make this object the process's `peers()`."""
        global _peers
        _peers = self
        self._board.update()
        self.watch.start()

    def close(self) -> None:
        global _peers
        self.leaving()
        self._closed = True
        self.watch.stop()
        _peers = NOBODY

    def here(self, phase: str, step: int) -> None:
        """Publish where this rank is, immediately: it may be lost the next moment."""
        self._board.update(phase=phase, step=step)

    @contextlib.contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """Count a collective of the main thread, and note what it waits for."""
        if not _in_main_thread():
            yield
            return
        board = self._board
        board.own = replace(board.own, number=board.own.number + 1, awaits=what)
        try:
            yield
        finally:
            board.own = replace(board.own, awaits="")

    def lost(self, what: str, reason: str) -> RankLost:
        deadline = time.monotonic() + ANSWER_S
        while (trouble := self.trouble()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if _in_main_thread():
            self.ending = True
        if trouble is None:
            text = f"rank {self._rank} waited for the others ({what})"
            text += f", and one of them is gone or did not answer: {reason}"
            for rank, status in sorted(self._board.others().items()):
                text += f"; rank {rank} was last {status.place}"
            report = Trouble(UNKNOWN, "lost", text, reporter=self._rank)
            trouble = self._end_with(self._board.report(report))
        return RankLost(trouble.reason, trouble.code)

    def waits_for_others(self) -> bool:
        """Return True if another rank is behind and its watchdog has not ended it."""
        own = self._board.own
        for other in self._board.others().values():
            is_behind = other.number < own.number or (own.awaits and not other.awaits)
            if is_behind and not other.left:
                return True
        return False

    def is_well(self, rank: int) -> bool:
        status = self._board.others().get(rank)
        return status is not None and not self._is_gone(status)

    def trouble(self) -> Trouble | None:
        if self._trouble is None and not self._closed:
            with contextlib.suppress(RuntimeError):  # the store may be gone
                self._find()
        return self._trouble

    def failed(self, message: str, code: int, hangs: bool = False) -> None:
        self.ending = True
        self._board.own = replace(self._board.own, left=True)
        if self._trouble is None:
            report = Trouble(self._rank, "hang" if hangs else "failed", message, code)
            self._end_with(self._board.report(report))

    def leaving(self) -> None:
        self.ending = self.orderly = True
        self._board.update(left=True)

    def interrupted(self) -> bool:
        if self.ending:
            return True
        trouble = self.trouble()
        if trouble is None:
            return False
        self.ending = True
        raise RankLost(trouble.reason, trouble.code)

    def attach(
        self, folder: Path, on_hang: Callable[[str], None], at_end: Callable[[Trouble], None]
    ) -> None:
        self._files.folder = folder
        self.watch.on_hang, self.watch.at_end = on_hang, at_end

    def _find(self) -> None:
        """Look for reported trouble and for dead processes."""
        if self._store_host and os.getppid() != self._store_host:
            text = "torchrun, which keeps the key-value store of the run, is gone"
            self._trouble = Trouble(UNKNOWN, "lost", text)
            return
        found = self._board.trouble()
        neighbors = {} if found else self._board.statuses(self._neighbors)
        for rank in [rank for rank, status in neighbors.items() if self._is_gone(status)]:
            status = self._board.statuses([rank])[rank]  # it may have published a last one
            found = found or self._board.trouble()
            if found is None and not status.left:
                text = (
                    f"rank {rank} is gone (process {status.pid} on {status.node}: killed from "
                    "outside, by the system for its memory, or a crash)"
                )
                text += f"; it was last {status.place}"
                found = self._end_with(self._board.report(Trouble(rank, "lost", text)))
        if found is not None and self._trouble is None:
            self._end_with(found)

    def _is_gone(self, status: RankStatus) -> bool:
        """Return True if the process of a local rank no longer exists."""
        if status.rank not in self._neighbors:
            return False
        try:
            os.kill(status.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # the process of another user
            pass
        return False

    def _end_with(self, trouble: Trouble) -> Trouble:
        """Write this rank's files about the trouble that ends the run; return the trouble."""
        if self._files.claim():
            if _in_main_thread():
                self.ending = True  # SIGTERM must not interrupt the writing
            self._files.write(trouble)
        self._trouble = trouble
        return trouble


class FailureFiles:
    """The files that a rank writes once, when trouble ends the run.

    `folder` is None until the run has one.
    """

    def __init__(self, board: Board, write_collectives: Callable[[Path, int], None]) -> None:
        self.folder: Path | None = None
        self._board = board
        self._write_collectives = write_collectives
        self._written: threading.Event | None = None  # None until a thread begins to write

    def claim(self) -> bool:
        """Return True if the caller must write; otherwise wait for the thread that does."""
        if self._written is not None:
            self._written.wait(LEAVE_S)  # the caller may end the process next
        if self._written is not None or self.folder is None:
            return False
        self._written = threading.Event()
        return True

    def write(self, trouble: Trouble) -> None:
        """Save this rank's collectives; one surviving rank also saves all statuses."""
        assert self.folder is not None, "files without a folder"
        assert self._written is not None, "files without a claim"
        own = self._board.own
        if trouble.kind != "failed":
            self._write_collectives(self.folder, own.rank)
        if own.rank == trouble.printed_by:
            statuses = {**self._board.others(), own.rank: own}
            ranks = [
                {**asdict(status), "place": status.place, "collectives": status.number}
                for _, status in sorted(statuses.items())
            ]
            record = {"time": time.time(), "rank": trouble.rank, "words": trouble.reason}
            text = json.dumps({**record, "ranks": ranks}, indent=1)
            try:
                (self.folder / RECORD).write_text(text + "\n")
            except OSError as error:  # a full disk may be the cause
                logger.warning("%s: %s", self.folder / RECORD, error)
        self._written.set()


class Watch:
    """The thread that ends this process on trouble, and the SIGTERM handler of its main thread.

    `on_hang` is called if another rank hangs, `at_end` if the thread ends the process.
    """

    def __init__(self, ranks: OtherRanks, board: Board, leave: Callable[[Trouble], None]) -> None:
        self._ranks = ranks
        self._board = board
        self._leave = leave
        self.on_hang: Callable[[str], None] = lambda reason: None
        self.at_end: Callable[[Trouble], None] = lambda trouble: None
        self._handler: Any = signal.SIG_DFL  # previous handler
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)

    def start(self) -> None:
        if _in_main_thread():
            self._handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(ANSWER_S)  # else interpreter exit would crash it inside C++
        if _in_main_thread():
            signal.signal(signal.SIGTERM, self._handler)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """End the process if the run does not handle SIGTERM at this point."""
        if not self._ranks.interrupted():
            message, code = ending(Terminated())
            self._ranks.failed(message, code)
            raise Terminated

    def _run(self) -> None:
        """Publish this rank's status, and end the process on trouble; body of the thread."""
        ranks = self._ranks
        noticed: float | None = None
        while not self._stopped.wait(TICK_S):
            self._board.update()
            trouble = ranks.trouble()
            if trouble is None or ranks.orderly:
                continue
            if noticed is None:
                noticed = time.monotonic()
                if trouble.kind == "hang" and trouble.rank != self._board.own.rank:
                    with contextlib.suppress(Exception):
                        self.on_hang(trouble.reason)
                # The SIGTERM handler raises RankLost, unless the main thread is inside C code.
                main = threading.main_thread().ident
                if not ranks.ending and main and callable(signal.getsignal(signal.SIGTERM)):
                    signal.pthread_kill(main, signal.SIGTERM)
            elif time.monotonic() - noticed > (ENDING_S if ranks.ending else BUSY_S):
                self._end_process(trouble)

    def _end_process(self, trouble: Trouble) -> None:
        """End this process even if its main thread is stuck."""
        code = trouble.code or EXIT_HANG
        limit = threading.Timer(LEAVE_S, os._exit, (code,))
        limit.daemon = True
        limit.start()
        try:
            with contextlib.suppress(Exception):
                self.at_end(trouble)
            self._leave(trouble)
        finally:
            os._exit(code)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
