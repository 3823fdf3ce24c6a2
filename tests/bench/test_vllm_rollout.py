"""The comparison with vLLM, with a stand-in for vLLM."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jetrl.bench.rollout import (
    GRPO_MAX,
    GRPO_PROMPT,
    GRPO_PROMPTS,
    GRPO_SAMPLES,
    grpo_load,
)
from jetrl.bench.shapes import SHAPES

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vllm_rollout.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("vllm_rollout", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vllm = ModuleType("vllm")
    vllm.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    return module


class Engine:
    """Answers each request with `short` tokens fewer than it asks for."""

    def __init__(self, short: int = 0) -> None:
        self.short = short

    def generate(self, requests: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        self.asked = [
            (tuple(r["prompt_token_ids"]), p.max_tokens)
            for r, p in zip(requests, params, strict=True)
        ]
        assert all(p.ignore_eos and p.logprobs == 0 for p in params)
        drawn = [[0] * (p.max_tokens - self.short) for p in params]
        return [
            SimpleNamespace(request_id="", outputs=[SimpleNamespace(token_ids=d, logprobs=d)])
            for d in drawn
        ]


def test_the_load_is_what_the_published_figures_were_measured_on() -> None:
    prompts, lengths = grpo_load(SHAPES["qwen3-8b"]["vocab_size"])
    assert [len(p) for p in prompts] == [GRPO_PROMPT] * GRPO_PROMPTS
    assert len(lengths) == GRPO_PROMPTS * GRPO_SAMPLES
    assert (sum(lengths), max(lengths)) == (759204, GRPO_MAX)


def test_each_sample_is_a_request_of_its_prompt_with_its_length(script: Any) -> None:
    engine = Engine()
    script.generate(engine, [[1, 2], [3]], [4, 5, 6, 7])
    assert engine.asked == [((1, 2), 4), ((1, 2), 5), ((3,), 6), ((3,), 7)]


def test_a_completion_of_another_length_is_not_a_measurement(script: Any) -> None:
    with pytest.raises(AssertionError):
        script.generate(Engine(short=1), [[1]], [4, 5])


def test_prompts_of_prefill_share_nothing_and_fit_the_model(script: Any) -> None:
    prompts, lengths = script.prefill_load(SHAPES["qwen3-8b"]["vocab_size"])
    assert len(prompts) == len(lengths) == 64
    assert {len(p) for p in prompts} == {8192}
    assert set(lengths) == {1}
    assert len({tuple(p[:16]) for p in prompts}) == 64
    assert GRPO_PROMPT + GRPO_MAX >= 8192 + 1
