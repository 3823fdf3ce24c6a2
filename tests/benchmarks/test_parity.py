"""`jetrl bench parity`: what it compares, and the proof that it times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.commit import commit
from benchmarks.policies import plan_of, plan_words

from benchmarks import parity
from jetrl.models.policy import Policy


def test_loads_are_rows_of_the_file(tmp_path: Path) -> None:
    out = tmp_path / "parity.json"
    words = ["--shape", "tiny", "--device", "cpu", "--plan", "unified", "--plan", "mixed"]
    parity.main([*words, "--load", "3x4x30", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["command"].endswith("--plan unified --plan mixed --load 3x4x30")
    assert (found["versions"]["torch"], found["commit"]) == (torch.__version__, commit())
    unified, mixed = found["rows"]
    assert (unified["tokens"], unified["different"]) == (12, 0)
    assert unified["longest_context"] == 340 + 4, "a prompt of random length"
    assert mixed["different"] > 0
    assert "first operation that differs" in mixed["located"]


@pytest.mark.parametrize("shape", ["tiny", "tiny-experts"])
def test_adapters_are_compared_that_change_all_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    found: dict[str, bool] = {}

    def run(policy: Policy, load: tuple[int, int, int]) -> dict[str, Any]:
        matrices = {n: m for n, m in policy.master_weights().items() if "lora_" in n}
        found.update((name, bool(matrix.any())) for name, matrix in matrices.items())
        return plain(policy, load)

    plain = parity.run
    monkeypatch.setattr(parity, "run", run)
    words = ["--shape", shape, "--layers", "1", "--device", "cpu", "--plan", "int8"]
    out = ["--load", "3x4x30", "--out", str(tmp_path / "parity.json")]
    parity.main([*words, "--adapter-rank", "2", "--updates", "1", *out])
    updates, row = json.loads((tmp_path / "parity.json").read_text())["rows"]
    assert (row["adapter_rank"], row["tokens"], row["different"]) == (2, 12, 0)
    assert updates["last_grad_norm"] > 0
    linears = {name.split(".")[2] for name in found}
    assert linears == {"qkv", "o", "gate_up", "down"}
    assert all(found.values())


def test_a_plan_is_read_with_its_options() -> None:
    plan = plan_of("int8 kv=bf16 grad_output=e4m3 last_layers_bf16=2 pinned_sums=true")
    assert (plan.kv, plan.grad_output, plan.last_layers_bf16) == ("bf16", "e4m3", 2)
    for words in (plan_words(plan), "unified base=nvfp4"):
        assert plan_words(plan_of(words)) == words
