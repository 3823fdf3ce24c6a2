"""The comparison of an export in vLLM with our plans, with a stand-in for vLLM."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks import harness

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vllm_export.py"


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("vllm_export", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def vllm_that_answers(ours: Path, plan: str) -> ModuleType:
    """A vLLM whose log-probs are those of one of our plans."""

    class Engine:
        def __init__(self, model: str, **_: object) -> None:
            config = json.loads(Path(model, "config.json").read_text())
            assert config["quantization_config"]["weight_block_size"] == [128, 128]

        def generate(self, requests: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
            assert params.prompt_logprobs == 0
            logprobs = json.loads(ours.read_text())["logprobs"][plan]
            return [
                SimpleNamespace(
                    prompt_logprobs=[
                        None,
                        *(
                            {token: SimpleNamespace(logprob=value), -1: None}
                            for token, value in zip(
                                request["prompt_token_ids"][1:], values, strict=True
                            )
                        ),
                    ]
                )
                for request, values in zip(requests, logprobs, strict=True)
            ]

    vllm = ModuleType("vllm")
    vllm.__version__ = "as installed"  # type: ignore[attr-defined]
    vllm.LLM, vllm.SamplingParams = Engine, SimpleNamespace  # type: ignore[attr-defined]
    return vllm


def test_the_plan_that_vllm_computes_as_is_the_nearest(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", vllm_that_answers(tmp_path / "ours.json", "jet"))
    monkeypatch.setattr(harness, "environment", dict)
    out = tmp_path / "out.json"
    words = ["--shape", "tiny", "--device", "cpu", "--prompts", "2", "--tokens", "40"]
    script.main([*words, "--work", str(tmp_path), "--out", str(out)])
    written = json.loads(out.read_text())
    rows = {row["plan"]: row for row in written["rows"]}
    assert list(rows) == list(script.PLANS)
    assert rows["jet"]["max_abs_diff"] == 0.0
    assert all(row["tokens"] == 78 for row in rows.values())
    assert min(row["mean_abs_diff"] for name, row in rows.items() if name != "jet") > 0.001
    assert rows["fp32"]["mean_abs_diff"] < 0.5, "an export that is read rightly"
    assert written["vllm"] == "as installed"
