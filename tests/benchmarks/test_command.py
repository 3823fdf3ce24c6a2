"""The command that a result file names is the one that was typed."""

from __future__ import annotations

import pytest
from benchmarks.harness import command_typed

from benchmarks import harness


def test_words_are_kept_as_they_were_typed_but_for_files_of_results() -> None:
    words = ["--out", "a.json", "--row", "unified, fastest attention", "--beside=b.json", "--load"]
    assert command_typed("jetrl bench layer", words) == (
        "jetrl bench layer --row 'unified, fastest attention' --load"
    )
    assert command_typed("jetrl bench gemm", []) == "jetrl bench gemm"


def test_several_ranks_are_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "world", lambda: type("World", (), {"size": 2}))
    assert command_typed("jetrl bench step", ["--digest"]) == (
        "torchrun --nproc-per-node 2 -m jetrl bench step --digest"
    )
