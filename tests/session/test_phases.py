"""A run whose phase has no memory says which phase that was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl.errors import OutOfMemoryStop
from jetrl.rollout.engine import RolloutEngine
from jetrl.session import Session
from jetrl.session.open import RunContext
from jetrl.session.phases import MemoryPeaks, Phases
from jetrl.settings.loading import load_config
from jetrl.training.sft import SftTrainer
from jetrl.training.trainer import Trainer


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
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: held["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: held.update(peak=2**30))
    peaks, phases = MemoryPeaks(torch.device("cuda")), Phases()
    phases.observers.append(peaks)
    held["peak"] = 9 * 2**30  # while the model was loaded
    for name, gib in (("rollout", 3), ("rollout", 2), ("update", 5), ("eval", 4)):
        with phases.phase(name):
            held["peak"] = gib * 2**30
    of_phases = {"memory/rollout_peak_gib": 3, "memory/update_peak_gib": 5}
    assert peaks.take_metrics() == {"memory/peak_gib": 9, **of_phases}
    with phases.phase("update"):
        held["peak"] = 4 * 2**30
    assert peaks.take_metrics() == {"memory/peak_gib": 9, "memory/update_peak_gib": 4}


WORDS = """task.options.max_operand=4 task.options.digits=1 rollout.max_tokens=6 eval.prompts=4
model.config.num_hidden_layers=1 rollout.prompts_per_step=2 rollout.samples_per_prompt=2
sft.steps=2 sft.check_every=1 sft.until=2.0 sft.examples_per_step=4 report.enabled=false"""


def test_the_pages_of_a_rollout_are_given_back_before_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the plan of an update leaves them out, and so does the measured peak of its phase."""
    order: list[str] = []

    def seen(owner: type, method: str) -> None:
        really = getattr(owner, method)

        def called(self: Any, *arguments: Any, **options: Any) -> Any:
            order.append(method)
            return really(self, *arguments, **options)

        monkeypatch.setattr(owner, method, called)

    for owner in (SftTrainer, Trainer):
        seen(owner, "step")
    seen(RolloutEngine, "generate")
    seen(RunContext, "free_kv_pages")
    with Session(load_config("demo", [*WORDS.split(), f"run.dir={tmp_path}"])) as session:
        session.warm_up()
        looked = ["generate", "free_kv_pages"]
        assert order == ["step", *looked, "step", *looked]
        order.clear()
        session.update(session.score(session.sample(session.draw_prompts(1))))
    assert order == ["generate", "free_kv_pages", "step"]
