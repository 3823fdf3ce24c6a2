"""Memory that runs out while sampling: less at a time, the same tokens."""

from __future__ import annotations

import pytest
import torch

from jetrl.errors import OutOfMemoryStop, UserError
from jetrl.memory.pages import gpu_pages_room, most_contexts
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.prefill import Prefill
from jetrl.rollout.sizes import RolloutSizes, Sizes
from jetrl.types import SamplingParams

PROMPTS = [[5, 6, 7], [9] * 17, [11, 12, 13, 14]]
PARAMS = SamplingParams(n=2, max_tokens=12, temperature=0.9, stop_token_ids=(33, 34), seed=7)


@pytest.fixture(scope="module")
def expected(policy):
    return RolloutEngine(policy, page_size=16).generate(PROMPTS, PARAMS)


def limit_forwards(monkeypatch, limit):
    """Prompt forwards of at most `limit` tokens fit."""
    forward, sizes = Prefill.forward, []

    def limited(runner, step, sequences):
        tokens = sum(chunk.length for chunk in step.chunks)
        if tokens > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        sizes.append(tokens)
        return forward(runner, step, sequences)

    monkeypatch.setattr(Prefill, "forward", limited)
    return sizes


def test_the_call_begins_anew_and_draws_the_same(policy, expected, monkeypatch):
    sizes = limit_forwards(monkeypatch, 16)
    engine = RolloutEngine(policy, page_size=16, max_batch_size=64, max_prefill_tokens=30)
    assert engine.generate(PROMPTS, PARAMS) == expected
    assert max(sizes) <= 16
    assert engine.sizes.take_retries() >= 1
    assert engine.generate(PROMPTS, PARAMS) == expected  # at the smaller size at once
    assert engine.sizes.take_retries() == 0


def test_a_cache_that_does_not_fit_is_made_smaller(policy, expected, monkeypatch):
    import jetrl.rollout.kv_pool as module

    made, cache = [], module.PagedCache

    class Limited(cache):
        def __init__(self, config, plan, num_pages, **rest):
            if num_pages > 20:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            made.append(num_pages)
            super().__init__(config, plan, num_pages, **rest)

    monkeypatch.setattr(module, "PagedCache", Limited)
    engine = RolloutEngine(policy, page_size=16, num_pages=64)
    assert engine.generate(PROMPTS, PARAMS) == expected
    assert made == [16]


def test_pages_never_fall_below_one_sequence(policy, expected, monkeypatch):
    """17 + 12 tokens need 2 pages of 16: no halving may take that away."""
    limit_forwards(monkeypatch, 4)
    engine = RolloutEngine(policy, page_size=16, num_pages=3, max_prefill_tokens=64)
    with pytest.raises(OutOfMemoryStop, match=r"in rollout .*one sequence at a time.*max_tokens"):
        engine.generate(PROMPTS, PARAMS)
    assert engine.sizes.now == Sizes(1, 16, 2)
    assert engine.pages_in_use == 0
    monkeypatch.undo()
    assert engine.generate(PROMPTS, PARAMS) == expected


@pytest.mark.parametrize("num_pages", [None, 20])
def test_pages_that_were_halved_are_no_limit_of_one_longer_sequence(policy, num_pages):
    """17 + 40 - 1 tokens need 14 pages of 4; pages were halved when sequences needed 7."""
    longer = SamplingParams(n=2, max_tokens=40, seed=7)
    engine = RolloutEngine(policy, page_size=4, num_pages=num_pages)
    engine.sizes.halve(14, 7, "x")
    assert engine.sizes.now.max_pages == 7
    assert engine.generate(PROMPTS, longer) == RolloutEngine(policy).generate(PROMPTS, longer)
    assert engine.stats.pages_total == 14
    asked = RolloutEngine(policy, page_size=4, num_pages=13)
    with pytest.raises(UserError, match=r"13 pages .* raise rollout\.num_pages to at least 14"):
        asked.generate(PROMPTS, longer)


def test_sizes_go_through_a_checkpoint_unless_the_settings_changed():
    sizes = RolloutSizes(Sizes(256, 8192, None))
    sizes.halve(1000, 10, "x")
    assert sizes.now == Sizes(128, 4096, 500)
    other = RolloutSizes(Sizes(256, 8192, None))
    other.load_state(sizes.state())
    assert other.now == sizes.now
    changed = RolloutSizes(Sizes(64, 8192, None))
    changed.load_state(sizes.state())
    assert changed.now == Sizes(64, 8192, None)


def test_a_gpu_has_room_for_contexts_next_to_the_pages():
    gib = 2**30
    assert gpu_pages_room(100 * gib, 0) == 96 * gib
    assert gpu_pages_room(10 * gib, gib) == 7 * gib
    assert gpu_pages_room(gib, gib) == 0
    assert gpu_pages_room(100 * gib, gib, again=True) == 97 * gib, "pages that were given back"
    assert most_contexts(8192, 256, 4096) == 64 * 8192
    assert most_contexts(8192, 100, 4096) == 100 * 4096
    assert most_contexts(16, 10, 4096) == 4096, "one sequence is read whatever its length"
