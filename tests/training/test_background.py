"""The background does a job at a time, and no error is lost."""

from __future__ import annotations

import threading

import pytest

from jetrl.training.checkpoint import Background


def test_the_owner_goes_on_and_the_next_job_waits() -> None:
    background, gate, done = Background(), threading.Event(), []
    background.start(lambda: (gate.wait(), done.append(1)), "first")
    assert not background.has_failed
    assert done == []
    gate.set()
    background.start(lambda: done.append(2), "second")
    background.wait()
    assert done == [1, 2]


@pytest.mark.parametrize("call", ["wait", "start"])
def test_an_error_surfaces_once(call: str) -> None:
    def fail() -> None:
        raise OSError("disk full")

    background = Background()
    background.start(fail, "fails")
    assert background._thread is not None
    background._thread.join()
    assert background.has_failed
    with pytest.raises(OSError, match="disk full"):
        background.start(lambda: None, "next") if call == "start" else background.wait()
    assert not background.has_failed
    background.wait()
