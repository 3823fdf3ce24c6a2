"""The other ranks, seen from one: what is trouble, who is named, and how a rank is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from torch.distributed import HashStore

from jetrl.distributed import peers as module
from jetrl.distributed.board import Board, RankStatus, Trouble
from jetrl.distributed.peers import NOBODY, OtherRanks, peers
from jetrl.errors import RankLost


class Run:
    """A run of three ranks, of which rank 0 is this process; rank 2 is on another machine."""

    def __init__(self) -> None:
        self.store, self.left = HashStore(), list[Trouble]()
        self.ranks = OtherRanks(
            Board(self.store, RankStatus(0, "here", os.getpid()), 3), (0, 1), self.left.append
        )
        self.write(RankStatus(1, "here", os.getpid()))
        self.write(RankStatus(2, "there", 2**30))

    def write(self, status: RankStatus) -> None:
        self.store.set(f"status {status.rank}", json.dumps(asdict(status)))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run whose thread never ends this process."""
    monkeypatch.setattr(module, "TICK_S", 0.05)
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    run = Run()
    ended: list[Trouble] = []
    monkeypatch.setattr(run.ranks.watch, "_end_process", ended.append)
    run.ranks.open()
    yield run
    run.ranks.close()
    assert not ended


@pytest.fixture
def gone() -> int:
    """A process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_ranks_that_are_well_or_have_left_are_no_trouble(run: Run, gone: int) -> None:
    assert peers() is run.ranks
    assert run.ranks.trouble() is None
    assert run.ranks.is_well(1)
    assert not run.ranks.interrupted()
    run.write(RankStatus(1, "here", gone, left=True))
    assert run.ranks.trouble() is None
    run.ranks.close()
    assert peers() is NOBODY


@pytest.mark.parametrize("rank", [1, 2])
def test_a_lost_rank_is_named_with_its_place(run: Run, gone: int, rank: int) -> None:
    """On another machine nobody knows which rank is gone, but where each was."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the thread's own
    try:
        run.write(RankStatus(rank, "node", gone, phase="update", step=7))
        error = run.ranks.lost("gradients", "Connection closed")
        words = {
            1: rf"^rank 1 is gone \(process {gone} on node: .*it was last in update of step 7$",
            2: "gradients.* gone or did not answer: Connection closed; rank 1 was last before step "
            "1; rank 2 was last in update of step 7$",
        }[rank]
        with pytest.raises(RankLost, match=words):
            raise error
        assert error.exit_code == 5
        assert run.ranks.trouble() == run.ranks._board.trouble()
        assert run.ranks.interrupted()  # it is ending: a signal changes nothing
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def test_a_rank_waits_only_for_others_that_are_behind(run: Run) -> None:
    assert not run.ranks.waits_for_others()  # nobody waits: this one hangs itself
    with run.ranks.awaiting("gradients"):
        assert run.ranks.waits_for_others()
        for rank in (1, 2):
            run.write(RankStatus(rank, number=1, awaits="gradients"))
        assert not run.ranks.waits_for_others()  # all wait, for the same
    run.write(RankStatus(1, number=0))
    assert run.ranks.waits_for_others()


def test_a_main_thread_that_cannot_be_reached_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork a rank whose main thread ignores signals, as one within a kernel does."""
    pid = os.fork()
    if not pid:
        module.TICK_S = module.BUSY_S = 0.05
        run = Run()
        run.ranks.open()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        run.store.set("trouble", json.dumps(asdict(Trouble(1, "lost", "rank 1 is gone"))))
        time.sleep(60)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


@pytest.mark.parametrize("first", ["lost", "interrupted"])
def test_a_signal_does_not_cut_a_record_off(
    first: str, monkeypatch: pytest.MonkeyPatch, gone: int, tmp_path: Path
) -> None:
    """torchrun sends SIGTERM while the other ranks write down what they remember."""
    monkeypatch.setattr(module, "TICK_S", 60.0)  # the main thread finds the trouble
    run, recorded = Run(), []

    def record(folder: Path, rank: int) -> None:
        signal.raise_signal(signal.SIGTERM)
        recorded.append(rank)

    monkeypatch.setattr(run.ranks._files, "_write_collectives", record)
    run.ranks.open()
    run.ranks.attach(tmp_path, print, print)
    run.write(RankStatus(1, "here", gone))
    with pytest.raises(RankLost, match="rank 1 is gone"):
        raise run.ranks.lost("x", "closed") if first == "lost" else run.ranks.interrupted()
    run.ranks.close()
    assert recorded == [0]


def test_a_rank_does_not_end_before_its_record_is_whole(
    run: Run, gone: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, recorded = threading.Event(), threading.Event(), []

    def record(folder: Path, rank: int) -> None:
        begun.set()
        go_on.wait()
        recorded.append(threading.current_thread().name)

    monkeypatch.setattr(run.ranks._files, "_write_collectives", record)
    run.ranks.attach(tmp_path, print, print)
    run.write(RankStatus(1, "here", gone))
    begun.wait()
    threading.Timer(0.2, go_on.set).start()
    run.ranks.lost("x", "closed")
    assert recorded == ["peers"]


def test_torchrun_that_is_gone_ends_all() -> None:
    run = Run()
    run.ranks._store_host = 1 if os.getppid() != 1 else 2
    trouble = run.ranks.trouble()
    assert trouble is not None
    assert "torchrun, which keeps the key-value store" in trouble.message
