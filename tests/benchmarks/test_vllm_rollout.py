"""The comparison with vLLM, with a stand-in for vLLM."""

from __future__ import annotations

import pytest
from benchmarks.harness import tailed_load
from benchmarks.shapes import SHAPES
from benchmarks.vllm_rollout import quantization_and_drafts

VOCABULARY = SHAPES["qwen3-8b"]["vocab_size"]


@pytest.mark.parametrize(
    ("name", "prompts", "tokens", "longest"),
    [("grpo", 64, 759204, 8192), ("tail", 16, 96522, 2703)],
)
def test_loads_are_what_the_published_figures_were_measured_on(
    name: str, prompts: int, tokens: int, longest: int
) -> None:
    assert quantization_and_drafts("fp8_per_block+ngram") == ("fp8_per_block", "ngram")
    load, drawn, lengths = tailed_load(name, VOCABULARY)
    assert [len(p) for p in drawn] == [256] * prompts
    assert len(lengths) == load.sequences == 8 * prompts
    assert (sum(lengths), max(lengths)) == (tokens, longest)
    # One load has prompts and lengths of one generator, the other those of `bench speculation`.
    assert (lengths == load.response_lengths()) == (name == "tail")
    assert drawn == load.random_prompts(VOCABULARY, 0)
