"""What the rollout benchmark asks of the engine before it measures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from jetrl.bench.rollout import capture_graphs, warm_lengths
from jetrl.rollout.decode_forward import padded_batch, padded_context


class Engine:
    """Captures what a call of these sizes needs, as `GraphForwards` does, and loses it when a call
    needs a larger cache."""

    def __init__(self) -> None:
        self.sizes: set[tuple[int, int]] = set()
        self.tokens = 0

    def generate(self, prompts: list[list[int]], params: Any, max_tokens: list[int]) -> None:
        (prompt,) = prompts
        assert params.n == len(max_tokens)
        if params.n * (len(prompt) + max(max_tokens)) > self.tokens:
            self.tokens = params.n * (len(prompt) + max(max_tokens))
            self.sizes.clear()
        before = len(self.sizes)
        for step in range(1, max(max_tokens)):
            running = sum(length > step for length in max_tokens)
            self.sizes.add((padded_batch(running), padded_context(len(prompt) + step)))
        self.stats = SimpleNamespace(graphs=len(self.sizes) - before, capture_s=0.5)


@pytest.mark.parametrize("shortest, longest", [(256, 256 + 8192), (256, 2304), (1020, 1030)])
def test_every_size_of_a_load_is_captured_before(shortest: int, longest: int) -> None:
    engine = Engine()
    graphs, seconds = capture_graphs(engine, 512, shortest, longest)  # type: ignore[arg-type]
    batches = {padded_batch(count) for count in range(1, 513)}
    contexts = {padded_context(tokens) for tokens in range(shortest + 1, longest)}
    assert engine.sizes == {(batch, context) for batch in batches for context in contexts}
    assert engine.tokens >= 512 * longest, "what is measured needs no larger cache"
    assert graphs == len(engine.sizes)
    assert seconds == 0.5 * len(contexts)


def test_the_warm_up_ends_with_one_sequence_alone() -> None:
    lengths = sorted(warm_lengths(512))
    assert len(lengths) == 512
    assert lengths[-1] > lengths[-2]
    assert len(set(lengths)) > 30
