"""The watch over the other ranks, in one process: what it finds, and how it ends a rank."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import HashStore

from jetrl.distributed import peer_watch
from jetrl.distributed.board import Board, RankStatus, Trouble
from jetrl.distributed.peer_watch import PeerWatch
from jetrl.distributed.peers import NOBODY, peers
from jetrl.distributed.processes import (
    ProcessId,
    is_gone,
    is_stopped,
    started_before,
    this_process,
)
from jetrl.errors import RankLost


@pytest.fixture
def board() -> Board:
    return Board(HashStore())


@pytest.fixture
def watch(board: Board, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerWatch]:
    """The watch of rank 0 of two, whose rank 1 is this process as well; it never leaves."""
    for limit in ("BUSY_S", "ENDING_S"):
        monkeypatch.setattr(peer_watch, limit, 1e9)
    board.write(RankStatus(1, "here", this_process(), limit_s=1000.0))
    left: list[Trouble] = []
    watch = PeerWatch(board, RankStatus(0, "here", this_process()), 2, [0, 1], left.append)
    watch.open()
    yield watch
    watch.close()
    assert not left


@pytest.fixture
def other() -> Iterator[ProcessId]:
    """Another process, that sleeps."""
    process = subprocess.Popen([sys.executable, "-c", "import time; print(); time.sleep(600)"])
    try:
        born = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        yield ProcessId(this_process().machine, process.pid, int(born))
    finally:
        process.kill()
        process.wait()


def test_the_system_tells_of_processes(other: ProcessId) -> None:
    assert not is_gone(other)
    assert not is_stopped(other)
    assert is_gone(ProcessId(other.machine, other.pid, other.born - 1))  # an earlier process
    assert started_before(other.pid, time.time() + 5)
    assert not started_before(other.pid, time.time() - 60)
    os.kill(other.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while not is_stopped(other) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_stopped(other)
    os.kill(other.pid, signal.SIGKILL)
    while not is_gone(other) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_gone(other)  # and not yet waited for


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EIO])
def test_a_process_that_cannot_be_asked_for_is_not_gone(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError(number, os.strerror(number))

    me = this_process()
    monkeypatch.setattr(Path, "read_text", fail)
    assert not is_gone(me)
    assert not is_stopped(me)


def test_a_rank_that_is_well_is_no_trouble(watch: PeerWatch) -> None:
    assert peers() is watch
    assert watch.trouble() is None
    assert watch.is_well(1)
    assert not watch.interrupted()


def test_a_lost_rank_is_named_with_its_place(
    watch: PeerWatch, board: Board, other: ProcessId
) -> None:
    board.write(RankStatus(1, "here", other, phase="update", step=7, limit_s=1000.0))
    watch.here("update", 7, 1000.0)
    os.kill(other.pid, signal.SIGKILL)
    words = r"^rank 1 is gone \(.*it was last in update of step 7$"
    with pytest.raises(RankLost, match=words) as raised:
        raise watch.lost("gradients", "Connection closed")  # or the watch's own signal was first
    assert raised.value.exit_code == 5
    assert board.trouble() == watch.trouble()


def test_a_rank_that_has_left_is_not_lost(watch: PeerWatch, board: Board, other: ProcessId) -> None:
    board.write(RankStatus(1, "here", other, left=True))
    os.kill(other.pid, signal.SIGKILL)
    assert watch.trouble() is None


def test_the_first_trouble_is_that_of_all(board: Board) -> None:
    first, second = Trouble(1, "failed", "stopped: a", 7), Trouble(2, "lost", "rank 2 is gone")
    assert board.trouble() is None
    assert board.tell(first) == board.tell(second) == board.trouble() == first
    assert first.message == "rank 1: stopped: a"
    assert second.message == "stopped: rank 2 is gone"


def test_a_rank_waits_only_for_others_that_are_behind(watch: PeerWatch, board: Board) -> None:
    assert not watch.waits_for_others()  # nobody waits: this one hangs itself
    with watch.awaiting("gradients"):
        assert watch.waits_for_others()
        board.write(RankStatus(1, "here", this_process(), number=1, awaits="gradients"))
        assert not watch.waits_for_others()  # all wait, for the same
    board.write(RankStatus(1, "here", this_process(), number=0))
    assert watch.waits_for_others()


def test_sigterm_because_of_a_lost_rank_raises_where_errors_are_not_swallowed(
    watch: PeerWatch, board: Board
) -> None:
    class Swallows:
        def __del__(self) -> None:
            watch.interrupted()

    board.tell(Trouble(1, "lost", "rank 1 is gone"))

    def runs() -> None:
        assert watch.trouble() is not None
        thing = Swallows()
        del thing
        time.sleep(60)

    with pytest.raises(RankLost, match="rank 1 is gone"):
        runs()
    assert watch.interrupted()  # it is ending: another SIGTERM changes nothing


def test_after_the_watch_there_is_nobody(watch: PeerWatch) -> None:
    watch.close()
    assert peers() is NOBODY
    assert peers().trouble() is None
