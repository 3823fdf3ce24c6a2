"""A run whose phase has no memory says which phase that was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jetrl.errors import OutOfMemoryStop
from jetrl.session import Session
from jetrl.session.training_run import MemoryPeaks, Phases
from jetrl.settings.loading import load_config


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


class Order:
    """An observer of phases that keeps the order in which they begin, with what is told to it."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin(self, phase: str, step: int) -> None:
        self.seen.append(phase)

    def beat(self) -> None: ...

    def end(self, phase: str, seconds: float) -> None: ...


def test_the_pages_of_a_rollout_are_given_back_before_its_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the plan of an update leaves them out, and so does the measured peak of its phase."""
    words = ["task.options.max_operand=4", "task.options.digits=1", "rollout.max_tokens=6"]
    words += ["model.config.num_hidden_layers=1", "sft.steps=0", "eval.every=0"]
    words += ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"]
    words += [f"run.dir={tmp_path}", "run.name=run", "report.enabled=false"]
    order = Order()

    def step(*_: object) -> None:
        order.seen.append("step")
        raise RuntimeError("enough")

    with Session(load_config("demo", words)) as session:
        session.warm_up()
        sampled = session.score(session.sample(session.draw_prompts(1)))
        session.run.phases.observers.append(order)
        monkeypatch.setattr(session.context.policy, "device", torch.device("cuda"))
        monkeypatch.setattr(session.context.engine, "free_cache", lambda: order.seen.append("free"))
        monkeypatch.setattr(session.trainer, "step", step)
        with pytest.raises(RuntimeError, match="enough"):
            session.update(sampled)
    assert order.seen == ["free", "update", "step"]
