"""The comparison with vLLM, with a stand-in for vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from benchmarks.harness import tailed_load

from jetrl.models.families import SHAPES

FOLDER = Path(__file__).parents[2] / "benchmarks"
VOCABULARY = SHAPES["qwen3-8b"]["vocab_size"]
# A module whose jobs are words, some of which fail.
WORK = """
def work(job):
    print("about", job)
    assert job != "broken", "no such engine"
    yield None
    yield job.upper()
    assert job != "half", "half way"
    yield 2
"""


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The folder of benchmarks on the path, and a stand-in for vLLM; returns `vllm_engine`."""
    monkeypatch.syspath_prepend(FOLDER)
    vllm = ModuleType("vllm")
    vllm.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    import vllm_engine

    return vllm_engine


@pytest.mark.parametrize(
    ("name", "prompts", "tokens", "longest"),
    [("grpo", 64, 759204, 8192), ("tail", 16, 96522, 2703)],
)
def test_loads_are_what_the_published_figures_were_measured_on(
    name: str, prompts: int, tokens: int, longest: int
) -> None:
    load, drawn, lengths = tailed_load(name, VOCABULARY)
    assert [len(p) for p in drawn] == [256] * prompts
    assert len(lengths) == load.sequences == 8 * prompts
    assert (sum(lengths), max(lengths)) == (tokens, longest)
    # One load has prompts and lengths of one generator, the other those of `bench speculation`.
    assert (lengths == load.response_lengths()) == (name == "tail")
    assert drawn == load.random_prompts(VOCABULARY, 0)


def test_prompts_of_prefill_share_nothing_and_fit_the_model(benchmarks: Any) -> None:
    prompts, lengths = benchmarks.prefill_load(VOCABULARY)
    assert len(prompts) == len(lengths) == 64
    assert {len(p) for p in prompts} == {8192}
    assert set(lengths) == {1}
    assert len({tuple(p[:16]) for p in prompts}) == 64
    setup = benchmarks.Setup("qwen3-8b", "grpo", "fp8", "off", "fp8", None, 1)
    assert benchmarks.settings(setup)["max_model_len"] >= 8192 + 1


def test_known_drafts_are_taken_with_the_chance_of_a_right_token(benchmarks: Any) -> None:
    setup = benchmarks.Setup("qwen3-8b", "tail", "fp8", "known", "fp8", None, 1)
    speculative = benchmarks.settings(setup)["speculative_config"]
    assert speculative["synthetic_acceptance_rates"] == pytest.approx([0.6, 0.36, 0.216])
    config = SimpleNamespace(speculative_config=SimpleNamespace(**speculative))
    module, name = speculative["model"].split(".")
    assert module == benchmarks.__name__
    # A sequence whose prompt is not read whole has drawn nothing, and gets no draft.
    drafts = getattr(benchmarks, name)(config).propose([[7], [], [8, 9]], None, None)
    assert drafts == [[7, 7, 7], [], [9, 9, 9]]


def test_jobs_take_turns_and_fail_alone(
    benchmarks: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "words.py").write_text(WORK)
    import in_turn
    import words

    logs = tmp_path / "logs"
    jobs = {name: name for name in ("one", "broken", "half", "two")}
    results = list(in_turn.in_turn(words.work, jobs, logs, 600))
    assert results == [("one", "ONE"), ("one", 2), ("half", "HALF"), ("two", "TWO"), ("two", 2)]
    printed = capsys.readouterr().out
    assert "no such engine" in printed
    assert "half ended with 1" in printed
    assert "half way" in printed
    assert (logs / "one.log").read_text() == "about one\n"
    assert list(in_turn.in_turn(words.work, {"late": "late"}, logs, 0)) == []
    assert "late was not ready after 0 s" in capsys.readouterr().out
