"""The watch that each rank of a run keeps over the others, so that no rank waits for a lost one.

Two threads keep it, while the main thread may sit in a collective or in C code. One keeps the board
(board.py). The other looks after the processes of this machine, which the system knows to be gone
or stopped, after ranks elsewhere that have fallen silent, and after SIGTERM. Where a rank is lost,
has failed or hangs, that is written on the board, and all ranks end with it: the main thread by a
RankLost, if it can be reached, and otherwise by the watch's hand.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from jetrl.distributed.board import Board, RankStatus, Trouble
from jetrl.distributed.peers import NOBODY, Peers, set_peers
from jetrl.distributed.processes import is_gone, is_stopped
from jetrl.errors import EXIT_HANG, RankLost, Terminated, ending

logger = logging.getLogger(__name__)

TICK_S = 0.2
BEAT_S = 1.0
ANSWER_S = 1.5  # for the store to answer, before a rank decides by what it knows itself
BROKEN_S = 1.0  # of a store that refuses connections
STOPPED_S = 3.0  # of a process that is stopped, as a debugger may do for a moment
SILENT_S = 30.0  # the least silence of a rank elsewhere that is a loss
MAIN_S = 2.0  # for the main thread to take in a signal
BUSY_S = 4.0  # for the main thread to take in trouble
ENDING_S = 6.0  # for the main thread to end, once it has taken it in
LEAVE_S = 3.0  # for last words, with a store or a disk that may not answer

RECORD = "board.json"
THE_STORE = -1  # in place of a rank: what the run's key-value store runs in

_WAKE, _HEARD = b"\x00", b"\xff"  # written to the pipe between the numbers of signals


class PeerWatch(Peers):
    """The other ranks of a run of several processes, watched while this object is open.

    Args:
        watched: The ranks whose lines are read each second: those of this machine, and a neighbor.
    """

    def __init__(
        self,
        board: Board,
        status: RankStatus,
        size: int,
        watched: Collection[int],
        leave: Callable[[Trouble], None],
        write_collectives: Callable[[Path, int], None] = lambda folder, rank: None,
    ) -> None:
        self._board, self._status, self._size = board, status, size
        self._rank, self._leave = status.rank, leave
        self._write_collectives = write_collectives
        self._watched = [rank for rank in watched if rank != status.rank]
        self._main = threading.main_thread().ident
        self._number, self._awaits = 0, ""
        self._folder: Path | None = None
        self._hang_work: list[Callable[[str], None]] = []
        self._last_work: list[Callable[[Trouble], None]] = []

        # What the board's thread has read, and what it is to write.
        self._lines: dict[int, RankStatus] = {}
        self._to_tell: Trouble | None = None
        self._trouble: Trouble | None = None
        self._asked = threading.Event()
        self._news = threading.Condition()
        self._answered = 0.0  # when the last talk that came to its end had begun
        self._talking_since: float | None = None
        self._broken_since: float | None = None
        self._recorded = False

        # What the watching thread knows.
        self._heard: dict[int, tuple[int, float]] = {}
        self._stopped: dict[int, float] = {}
        self._looked = 0.0  # when the last look that came to its end had begun
        self._taken_in: float | None = None  # when trouble was first acted on
        self._pipe = os.pipe()
        self._signals, self._unheard_since = 0, 0.0
        self._handler: Any = signal.SIG_DFL  # before this watch
        self._ending = self._orderly = False
        self._interrupting = self._swallowed = False
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    # What the main thread says and asks

    def here(self, phase: str, step: int, limit_s: float | None) -> None:
        """Write on the board where this rank is, at once: it may be lost the next moment."""
        self._status = replace(self._status, phase=phase, step=step, limit_s=limit_s)
        self._write()

    @contextlib.contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """Count a collective of the main thread, and say what it waits for."""
        if threading.get_ident() != self._main:
            yield
            return
        self._number += 1
        self._awaits = what
        try:
            yield
        finally:
            self._awaits = ""

    def lost(self, what: str, reason: str) -> RankLost:
        """Return the error of a collective that broke, with the name of the lost rank."""
        deadline = time.monotonic() + 2 * ANSWER_S
        trouble = self.trouble()
        while trouble is None and time.monotonic() < deadline:
            time.sleep(TICK_S)
            trouble = self.trouble()
        if threading.get_ident() == self._main:
            self._ending = True
        if trouble is not None:
            return RankLost(trouble.reason, trouble.code)
        return RankLost(
            f"rank {self._rank} waited for the others ({what}), and one of them is gone or did not "
            f"answer: {reason}"
        )

    def waits_for_others(self) -> bool:
        """Return whether another rank is behind this one, and its own watchdog has not ended it."""
        if not self._ask(time.monotonic()):
            return False
        with contextlib.suppress(RuntimeError):
            lines = self._board.read(range(self._size))
            others = [line for line in lines.values() if line.rank != self._rank and not line.left]
            return any(
                line.number < self._number or (self._awaits and not line.awaits) for line in others
            )
        return False

    def is_well(self, rank: int) -> bool:
        """Return whether a rank is known to run, as far as this machine and the board know."""
        line = self._lines.get(rank)
        if rank == self._rank or line is None or self._broken_since is not None:
            return False
        return not (self._is_here(line) and is_gone(line.process))

    def trouble(self) -> Trouble | None:
        """Return what ends the run, after one more look."""
        if self._trouble is None and not self._over.is_set():
            asked = time.monotonic()
            self._wake()
            with self._news:
                self._news.wait_for(
                    lambda: self._trouble is not None or self._looked >= asked, 2 * ANSWER_S
                )
        return self._trouble

    def failed(self, words: str, code: int, hangs: bool = False) -> None:
        """Write on the board that this rank ends, and why."""
        self._ending = True
        self._status = replace(self._status, left=True)
        if self._trouble is None:
            self._announce(Trouble(self._rank, "hang" if hangs else "failed", words, code))

    def leaving(self) -> None:
        """Write on the board that this rank ends in an orderly way."""
        self._ending = self._orderly = True
        self._status = replace(self._status, left=True)
        self._write()

    def interrupted(self) -> bool:
        """Return whether a signal is to be ignored; raise RankLost where a lost rank caused it."""
        with contextlib.suppress(OSError):
            os.write(self._pipe[1], _HEARD)
        if self._ending or self._interrupting:  # a handler may be interrupted by another one
            return True
        self._interrupting = True
        try:
            trouble = self.trouble()
        finally:
            self._interrupting = False
        if trouble is None:
            return False
        self._ending = True
        raise RankLost(trouble.reason, trouble.code)

    def _on_unraisable(self, caught: Any) -> None:
        """Raise RankLost again which came where Python swallows errors, as in a destructor."""
        if isinstance(caught.exc_value, RankLost):
            self._ending, self._swallowed = False, True
        else:
            sys.__unraisablehook__(caught)

    def records_in(self, folder: Path) -> None:
        """Write the board into a folder, where trouble ends the run."""
        self._folder = folder

    def before_leaving(self, work: Callable[[Trouble], None]) -> None:
        """Do more work when the watch ends this process."""
        self._last_work.append(work)

    def on_hang(self, work: Callable[[str], None]) -> None:
        """Do work when another rank hangs."""
        self._hang_work.append(work)

    # Opening and closing

    def open(self) -> None:
        """Begin to watch, and make this object the process's `peers()`."""
        set_peers(self)
        self._write()
        for end in self._pipe:
            os.set_blocking(end, False)
        if threading.get_ident() == self._main:
            self._handler = signal.signal(signal.SIGTERM, self._on_sigterm)
            signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            sys.unraisablehook = self._on_unraisable
        for name, body in (("board", self._keep_board), ("peers", self._watch)):
            self._threads.append(threading.Thread(target=body, name=name, daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        """End the watch, at the end of a run without trouble."""
        self.leaving()
        self._over.set()
        self._asked.set()
        self._wake()
        for thread in self._threads:  # Python's end would kill them within C++, and so the process
            thread.join(ANSWER_S)
        if threading.get_ident() == self._main:
            signal.set_wakeup_fd(-1)
            sys.unraisablehook = sys.__unraisablehook__
            signal.signal(signal.SIGTERM, self._handler)
        set_peers(NOBODY)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """End the process, where the run does not yet, or no longer, handle SIGTERM itself."""
        if not self.interrupted():
            self.failed(*ending(Terminated()))
            raise Terminated

    # The thread that keeps the board

    def _keep_board(self) -> None:
        """Write this rank's line and read those of others, each second or when asked to."""
        while not self._over.is_set():
            self._asked.wait(BEAT_S if self._has_met_all else TICK_S)
            self._asked.clear()
            began = self._talking_since = time.monotonic()
            trouble = None
            try:
                self._write(again=True)
                told = self._to_tell
                trouble = self._board.tell(told) if told else self._board.trouble()
                self._lines |= self._board.read(self._watched)
                if trouble is not None and not self._recorded:
                    self._lines |= self._board.read(range(self._size))
                self._broken_since = None
            except RuntimeError:  # of torch.distributed: the connection is broken
                self._broken_since = self._broken_since or began
            self._talking_since = None
            self._note(trouble, began)

    @property
    def _has_met_all(self) -> bool:
        """True once the lines of all watched ranks have been read."""
        return all(rank in self._lines for rank in self._watched)

    def _write(self, again: bool = False) -> None:
        """Write this rank's line on the board; a board that does not answer is seen elsewhere."""
        self._status = replace(
            self._status,
            number=self._number,
            awaits=self._awaits,
            beat=self._status.beat + 1,
        )
        try:
            self._board.write(self._status)
        except RuntimeError:
            if again:
                raise

    def _note(self, trouble: Trouble | None, began: float) -> None:
        """Take in what the board said, and wake whoever waits for it."""
        if trouble is not None and self._trouble is None:
            self._record(trouble)
        with self._news:
            self._answered = began
            self._trouble = self._trouble or trouble
            self._news.notify_all()

    def _announce(self, trouble: Trouble) -> None:
        """Write trouble on the board; decide without the board where that does not answer."""
        self._to_tell = trouble
        self._asked.set()
        with self._news:
            if not self._news.wait_for(lambda: self._trouble is not None, ANSWER_S):
                self._trouble = trouble
        self._record(trouble)

    def _record(self, trouble: Trouble) -> None:
        """Write the board into the run directory; one rank of those that are left does it."""
        if self._recorded:
            return
        self._recorded = True
        if self._folder is None:
            return
        if trouble.kind != "failed":
            self._write_collectives(self._folder, self._rank)
        if self._rank != int(trouble.rank == 0 and trouble.kind == "lost"):
            return
        lines = self._lines | {self._rank: self._status}
        record = {
            "time": time.time(),
            "rank": trouble.rank,
            "words": trouble.reason,
            "ranks": [lines[rank].record() for rank in sorted(lines)],
        }
        try:
            (self._folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")
        except OSError as error:  # a full disk may be the trouble
            logger.warning("%s: %s", self._folder / RECORD, error)

    def _ask(self, since: float) -> bool:
        """Return whether the board has answered to a question asked now, in time."""
        self._asked.set()
        with self._news:
            return self._news.wait_for(
                lambda: self._answered >= since and self._broken_since is None, ANSWER_S
            )

    # The thread that watches

    def _watch(self) -> None:
        """Look after the others until the watch ends; the body of a thread."""
        before = time.monotonic()
        while not self._over.is_set():
            self._take_signals()
            began = time.monotonic()
            if began - before > SILENT_S / 2:  # this process was itself stopped
                self._heard.clear()
                self._stopped.clear()
            before = began
            if self._trouble is None and not self._ending:
                found = self._find(began)
                if found is not None and not self._over.is_set() and not self._ending:
                    self._announce(found)
            with self._news:
                self._looked = began
                self._news.notify_all()
            if self._trouble is not None and not self._orderly:
                self._act(self._trouble)
            elif self._main_is_deaf():
                self._end_process(Trouble(self._rank, "failed", "terminated", Terminated.exit_code))

    def _wake(self) -> None:
        """Let the watching thread look at once."""
        with contextlib.suppress(OSError):
            os.write(self._pipe[1], _WAKE)

    def _take_signals(self) -> None:
        """Wait for a tick, or until a signal has come, and take its number in."""
        if not select.select([self._pipe[0]], [], [], TICK_S)[0]:
            return
        for byte in os.read(self._pipe[0], 4096):
            if byte == signal.SIGTERM:
                self._signals += 1
                self._unheard_since = self._unheard_since or time.monotonic()
            elif byte == _HEARD[0]:
                self._unheard_since = 0.0

    def _main_is_deaf(self) -> bool:
        """Return whether the main thread does not hear a SIGTERM that ends the process at once."""
        if not self._unheard_since or time.monotonic() - self._unheard_since < MAIN_S:
            return False
        return self._signals > 1 or signal.getsignal(signal.SIGTERM) == self._on_sigterm

    def _find(self, now: float) -> Trouble | None:
        """Return the trouble of another rank or of the store; None where all are well."""
        if not self._has_met_all:
            self._ask(now)  # in the first moments: a rank may be lost right then
        for rank, line in list(self._lines.items()):
            if rank == self._rank or line.left:
                continue
            look = self._of_this_machine if self._is_here(line) else self._of_another
            words = look(line, now)
            if words:
                place = self._lines[rank].place  # the look may have read it once more
                return Trouble(rank, "lost", f"rank {rank} {words}; it was last {place}")
        talking, broken = self._talking_since, self._broken_since
        if (broken and now - broken > BROKEN_S) or (talking and now - talking > SILENT_S):
            words = "the key-value store of the run, which torchrun keeps, does not answer any more"
            return Trouble(THE_STORE, "lost", words)
        return None

    def _is_here(self, line: RankStatus) -> bool:
        """Return whether a rank runs on this machine, where its process can be asked for."""
        machine = line.process.machine
        return bool(machine) and machine == self._status.process.machine

    def _of_this_machine(self, line: RankStatus, now: float) -> str:
        """Return what became of a rank's process on this machine; empty where it is well."""
        process = f"process {line.process.pid} on {line.node}"
        if is_stopped(line.process):
            if now - self._stopped.setdefault(line.rank, now) > STOPPED_S:
                return f"is stopped ({process}, by SIGSTOP or a debugger)"
            return ""
        self._stopped.pop(line.rank, None)
        if not is_gone(line.process):
            return ""
        # It may have written a last line: that it ends in an orderly way, or why it does not.
        answered = self._ask(time.monotonic())
        if self._trouble is not None or (answered and self._lines[line.rank].left):
            return ""
        return f"is gone ({process}: killed from outside, by the system for its memory, or a crash)"

    def _of_another(self, line: RankStatus, now: float) -> str:
        """Return whether a rank elsewhere has fallen silent, in words; empty where it has not."""
        beat, since = self._heard.get(line.rank, (-1, now))
        if beat != line.beat:
            self._heard[line.rank] = line.beat, now
            return ""
        if line.limit_s is None or now - since < max(SILENT_S, line.limit_s):
            return ""
        return f"on {line.node} has not been heard of for {now - since:.0f} s"

    def _act(self, trouble: Trouble) -> None:
        """End this rank by its main thread, or without it where that takes too long."""
        now = time.monotonic()
        if self._taken_in is None:
            self._taken_in = now
            if trouble.kind == "hang" and trouble.rank != self._rank:
                for work in self._hang_work:
                    with contextlib.suppress(Exception):
                        work(trouble.reason)
            self._kill_stopped(trouble)
            self._interrupt_main()
        elif self._swallowed:
            self._swallowed = False
            self._interrupt_main()
        elif now - self._taken_in > (ENDING_S if self._ending else BUSY_S):
            self._end_process(trouble)

    def _interrupt_main(self) -> None:
        """Let the handler of SIGTERM raise RankLost, wherever in Python the main thread is."""
        if not self._ending and self._main and callable(signal.getsignal(signal.SIGTERM)):
            signal.pthread_kill(self._main, signal.SIGTERM)

    def _kill_stopped(self, trouble: Trouble) -> None:
        """Kill a lost rank of this machine that is stopped: nobody else can end it."""
        line = self._lines.get(trouble.rank)
        if trouble.kind == "lost" and line is not None and trouble.rank in self._stopped:
            with contextlib.suppress(OSError):
                os.kill(line.process.pid, signal.SIGKILL)

    def _end_process(self, trouble: Trouble) -> None:
        """End this process, whatever its main thread is doing."""
        code = trouble.code or EXIT_HANG
        limit = threading.Timer(LEAVE_S, os._exit, (code,))
        limit.daemon = True
        limit.start()
        for work in self._last_work:
            with contextlib.suppress(Exception):
                work(trouble)
        try:
            self._leave(trouble)
        finally:
            os._exit(code)
