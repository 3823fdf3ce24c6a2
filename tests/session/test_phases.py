"""A run whose phase has no memory says which phase that was."""

from __future__ import annotations

import pytest
import torch

from jetrl.errors import OutOfMemoryStop
from jetrl.session.memory_peaks import MemoryPeaks
from jetrl.session.phases import Phases


def test_out_of_memory_names_the_phase() -> None:
    phases = Phases()
    with (
        pytest.raises(OutOfMemoryStop, match=r"out of memory in the phase reward \(CUDA out of"),
        phases.phase("reward"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    with pytest.raises(ValueError, match="other"), phases.phase("reward"):
        raise ValueError("other")


def test_peaks_of_phases_are_the_highest_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"peak": 0}

    def peak(_: torch.device) -> int:
        return held["peak"]

    def reset(_: torch.device) -> None:
        held["peak"] = 2**30

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    peaks, phases = MemoryPeaks(torch.device("cuda")), Phases()
    phases.observers.append(peaks)
    held["peak"] = 9 * 2**30  # while the model was loaded
    for name, gib in (("rollout", 3), ("rollout", 2), ("update", 5), ("eval", 4)):
        with phases.phase(name):
            held["peak"] = gib * 2**30
    assert peaks.take_metrics() == {
        "memory/peak_gib": 9,
        "memory/rollout_peak_gib": 3,
        "memory/update_peak_gib": 5,
    }
    with phases.phase("update"):
        held["peak"] = 4 * 2**30
    assert peaks.take_metrics() == {"memory/peak_gib": 9, "memory/update_peak_gib": 4}
