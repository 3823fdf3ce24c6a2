"""The helpers that benchmarks share, as far as they need no GPU."""

from __future__ import annotations

import pytest
import torch
from benchmarks._timing import watched


class Event:
    def __init__(self, enable_timing: bool) -> None:
        self.recorded = False

    def record(self) -> None:
        self.recorded = True


class Owner:
    def double(self, x: int) -> int:
        return 2 * x

    @staticmethod
    def half(x: int) -> int:
        return x // 2


def test_watched_functions_do_what_they_did_and_are_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    before = dict(vars(Owner))
    log: list = []
    with watched([(Owner, "double", "twice", False), (Owner, "half", "half", True)], log):
        assert Owner().double(3) == 6
        assert Owner().half(9) == Owner.half(9) == 4
    assert [label for label, _, _ in log] == ["twice", "half", "half"]
    assert all(start.recorded and end.recorded for _, start, end in log)
    assert vars(Owner)["double"] is before["double"]
    assert isinstance(vars(Owner)["half"], staticmethod)
    assert Owner.half(8) == 4
    assert len(log) == 3
