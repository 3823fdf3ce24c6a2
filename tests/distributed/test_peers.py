"""The other ranks, seen from one: what is trouble, who is named, and how a rank is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from torch.distributed import HashStore

from jetrl.distributed import peers as module
from jetrl.distributed.peers import NOBODY, OtherRanks, RankStatus, Trouble, peers
from jetrl.errors import RankLost
from jetrl.session.ranks import _started_before


class Run:
    """A run of three ranks, of which rank 0 is this process; rank 2 is on another machine."""

    def __init__(self) -> None:
        self.store, self.left = HashStore(), list[Trouble]()
        self.ranks = OtherRanks(
            self.store, RankStatus(0, "here", os.getpid()), 3, (0, 1), self.left.append
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
    monkeypatch.setattr(run.ranks, "_end_process", ended.append)
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


def test_ranks_that_are_well_are_no_trouble(run: Run) -> None:
    assert peers() is run.ranks
    assert run.ranks.trouble() is None
    assert run.ranks.is_well(1)
    assert not run.ranks.interrupted()
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
        assert run.ranks.trouble() == run.ranks._told()
        assert run.ranks.interrupted()  # it is ending: a signal changes nothing
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def test_a_rank_that_has_left_is_not_lost(run: Run, gone: int) -> None:
    run.write(RankStatus(1, "here", gone, left=True))
    assert run.ranks.trouble() is None


def test_the_first_trouble_is_that_of_all_and_is_recorded(tmp_path: Path) -> None:
    first, run = Trouble(1, "failed", "stopped: a", 7), Run()
    run.ranks.records_in(tmp_path)
    run.store.set("trouble", json.dumps(asdict(first)))
    run.ranks.failed("stopped: b", 6)
    assert run.ranks.trouble() == first
    assert first.message == "rank 1: stopped: a"
    record = json.loads((tmp_path / module.RECORD).read_text())
    assert (record["rank"], record["words"]) == (1, "rank 1: stopped: a")
    assert [line["rank"] for line in record["ranks"]] == [0, 1, 2]


@pytest.mark.parametrize(
    "trouble, printed_by",
    [
        (Trouble(1, "lost", ""), 0),
        (Trouble(0, "lost", ""), 1),
        (Trouble(0, "failed", ""), 0),
        (Trouble(module.UNKNOWN, "lost", "", teller=3), 3),
    ],
)
def test_one_rank_prints_it(trouble: Trouble, printed_by: int) -> None:
    assert trouble.printed_by == printed_by


def test_a_rank_waits_only_for_others_that_are_behind(run: Run) -> None:
    assert not run.ranks.waits_for_others()  # nobody waits: this one hangs itself
    with run.ranks.awaiting("gradients"):
        assert run.ranks.waits_for_others()
        for rank in (1, 2):
            run.write(RankStatus(rank, number=1, awaits="gradients"))
        assert not run.ranks.waits_for_others()  # all wait, for the same
    run.write(RankStatus(1, number=0))
    assert run.ranks.waits_for_others()


def test_trouble_of_another_rank_interrupts_the_main_thread(run: Run) -> None:
    run.store.set("trouble", json.dumps(asdict(Trouble(2, "failed", "stopped: full", 6))))
    with pytest.raises(RankLost, match="rank 2: stopped: full") as caught:
        time.sleep(60)
    assert caught.value.exit_code == 6


def test_a_main_thread_that_cannot_be_reached_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork a rank whose main thread ignores signals, as one within a kernel does."""
    pid = os.fork()
    if not pid:
        module.TICK_S = module.BUSY_S = 0.05
        run = Run()
        run.ranks.before_leaving(lambda trouble: os.write(1, b""))
        run.ranks.open()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        run.store.set("trouble", json.dumps(asdict(Trouble(1, "lost", "rank 1 is gone"))))
        time.sleep(60)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


def test_torchrun_that_is_gone_ends_all() -> None:
    run = Run()
    run.ranks._keeper = 1 if os.getppid() != 1 else 2
    trouble = run.ranks.trouble()
    assert trouble is not None
    assert "torchrun, which keeps the key-value store" in trouble.message


def test_the_age_of_a_process_is_known() -> None:
    assert _started_before(os.getpid(), time.time() + 5)
    assert not _started_before(os.getpid(), time.time() - 1e6)
