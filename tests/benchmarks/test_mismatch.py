"""`jetrl bench mismatch`: which component has which form, and the rows of the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import mismatch


def test_one_component_at_a_time_takes_the_trainers_form() -> None:
    names = set(mismatch.COMPONENTS)
    plans = mismatch.plans()
    assert len(plans) == 1 + 2 * len(names) + len(mismatch.PRESETS) + 1
    linears = {
        (): "bf16",
        ("weights",): "fp8_weights",
        ("activations",): "fp8_activations",
        ("activations", "weights"): "fp8",
    }
    for components in (names, *(names - {name} for name in names), *({name} for name in names)):
        plan = mismatch.plan_with(sorted(components))
        sampler = plan.on("rollout")
        codes = tuple(sorted(components & {"weights", "activations"}))
        assert sampler.rollout_linear == linears[codes]
        assert sampler.kv == ("fp8" if "keys and values" in components else "bf16")
        assert sampler.lm_head == ("fp8" if "head" in components else "bf16")
        assert bool(plan.sampler_deviation.attention_split) == ("attention" in components)
        trainer = (plan.train_linear, plan.kv, plan.lm_head)
        assert (trainer, plan.exact) == (("bf16",) * 3, False)


def test_rows_are_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mismatch.json"
    words = ["--shape", "tiny", "--device", "cpu", "--layers", "1", "--load", "2x4x30"]
    mismatch.main([*words, "--out", str(out)])
    written = json.loads(out.read_text())
    assert written["command"].endswith("--shape tiny --device cpu --layers 1 --load 2x4x30")
    rows = {row["sampler"]: row for row in written["rows"]}
    assert list(rows) == list(mismatch.plans())
    for name in ("preset unified", "preset jet", "preset bf16, pinned sums"):
        assert (rows[name]["exact_plan"], rows[name]["different"]) == (True, 0)
    for name in ("all five in the sampler's form", "preset mixed", "preset alike"):
        assert rows[name]["different"] > 0
        assert rows[name]["k3_kl"] > 0
    assert "weights in the trainer's form" in capsys.readouterr().out
