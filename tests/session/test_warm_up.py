"""The supervised warm-up of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jetrl import load_config
from jetrl.rollout.engine import RolloutEngine
from jetrl.session import Session
from jetrl.session.open import RunContext
from jetrl.training import SftTrainer

TINY = [
    "sft.steps=3",
    "sft.check_every=1",
    "sft.until=2.0",
    "sft.examples_per_step=4",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "eval.prompts=4",
    "report.enabled=false",
]


def test_kv_pages_make_room_for_the_updates_between_two_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def seen(owner: type, method: str) -> None:
        really = getattr(owner, method)

        def called(self: Any, *arguments: Any, **options: Any) -> Any:
            order.append(method)
            return really(self, *arguments, **options)

        monkeypatch.setattr(owner, method, called)

    seen(SftTrainer, "step")
    seen(RolloutEngine, "generate")
    seen(RunContext, "free_kv_pages")
    with Session(load_config("demo", [*TINY, f"run.dir={tmp_path}"])) as session:
        session.warm_up()
    looked = ["generate", "free_kv_pages"]
    assert order == ["step", *looked, "step", *looked, "step", *looked]
