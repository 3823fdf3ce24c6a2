"""The rollout benchmark prepares the engine before it measures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.rollout import capture_graphs

from jetrl.rollout.decode import padded_batch, padded_context
from jetrl.rollout.options import GenerateOptions


class Engine:
    """An engine that captures the sizes of a call, and loses them when a call needs a larger cache.

    Args:
        forwards: Decode steps of a call, before each of which the engine looks at its sizes.
    """

    def __init__(self, forwards: int) -> None:
        self.forwards = forwards
        self.sizes: set[tuple[int, int]] = set()
        self.tokens = 0

    def generate(
        self, prompts: list[list[int]], params: Any, options: GenerateOptions | None = None
    ) -> None:
        max_tokens = [params.max_tokens] * params.n if options is None else options.max_tokens
        assert max_tokens is not None
        (prompt,) = prompts
        assert params.n == len(max_tokens)
        if params.n * (len(prompt) + max(max_tokens)) > self.tokens:
            self.tokens = params.n * (len(prompt) + max(max_tokens))
            self.sizes.clear()
        before = len(self.sizes)
        for drawn in range(1, max(max_tokens), self.forwards):
            running = sum(length > drawn for length in max_tokens)
            longest = len(prompt) + min(drawn + self.forwards, max(max_tokens)) - 1
            self.sizes.add((padded_batch(running), padded_context(longest)))
        self.stats = SimpleNamespace(graphs=len(self.sizes) - before, capture_s=0.5)


@pytest.mark.parametrize("forwards", [1, 8])
@pytest.mark.parametrize("shortest, longest", [(256, 256 + 8192), (256, 2304), (1020, 1030)])
def test_every_size_of_a_load_is_captured_before(
    shortest: int, longest: int, forwards: int
) -> None:
    engine = Engine(forwards)
    graphs, seconds = capture_graphs(engine, 512, shortest, longest)  # type: ignore[arg-type]
    batches = {padded_batch(count) for count in range(1, 513)}
    contexts = {padded_context(tokens) for tokens in range(shortest + 1, longest)}
    assert engine.sizes == {(batch, context) for batch in batches for context in contexts}
    assert engine.tokens >= 512 * longest, "what is measured needs no larger cache"
    assert graphs == len(engine.sizes)
    assert seconds == 0.5 * len(contexts)
