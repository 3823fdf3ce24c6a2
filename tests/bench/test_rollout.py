"""What the rollout benchmark asks of the engine before it measures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from jetrl.bench.rollout import GRPO_MAX, GRPO_PROMPT, capture_graphs, warm_lengths
from jetrl.rollout.decode_forward import padded_batch, padded_context


class Engine:
    """Captures what a call of these sizes needs, as `GraphForwards` does."""

    def __init__(self) -> None:
        self.sizes: set[tuple[int, int]] = set()

    def generate(self, prompts: list[list[int]], params: Any, max_tokens: list[int]) -> None:
        (prompt,) = prompts
        assert params.n == len(max_tokens)
        before = len(self.sizes)
        for step in range(1, max(max_tokens)):
            running = sum(length > step for length in max_tokens)
            self.sizes.add((padded_batch(running), padded_context(len(prompt) + step)))
        self.stats = SimpleNamespace(graphs=len(self.sizes) - before, capture_s=0.5)


def test_every_size_of_the_load_with_a_tail_is_captured_before() -> None:
    engine = Engine()
    graphs, seconds = capture_graphs(engine, 512, GRPO_PROMPT + GRPO_MAX)  # type: ignore[arg-type]
    batches = {padded_batch(count) for count in range(1, 513)}
    contexts = {padded_context(tokens) for tokens in range(GRPO_PROMPT, GRPO_PROMPT + GRPO_MAX)}
    assert engine.sizes == {(batch, context) for batch in batches for context in contexts}
    assert graphs == len(engine.sizes)
    assert seconds == 0.5 * len(contexts)


def test_the_warm_up_ends_with_one_sequence_alone() -> None:
    lengths = sorted(warm_lengths(512))
    assert len(lengths) == 512
    assert lengths[-1] > lengths[-2]
    assert len(set(lengths)) > 30
