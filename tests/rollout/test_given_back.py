"""The engine gives its pages back between calls and takes them again where they were.

It continues with the cache and the decode batch that it has, or says why not.
"""

from __future__ import annotations

import pytest
import torch

from jetrl.models.attention import staged_bytes_per_token
from jetrl.rollout import kv_pool
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.kv_cache import PagedCache
from jetrl.types import SamplingParams

PROMPTS = [[5, 6, 7], [9] * 17, [11, 12, 13, 14]]
PARAMS = SamplingParams(n=2, max_tokens=12, seed=7)


class Memory:
    """In place of a GPU's: what was given back comes again with anything in it, here NaN."""

    failures = 0  # of the calls of `map` that come

    def __init__(self, content: torch.Tensor) -> None:
        self._content = content
        self.mapped = True

    def unmap(self) -> None:
        self.mapped = False
        self._content.fill_(255)

    def map(self) -> None:
        assert not self.mapped
        if Memory.failures:
            Memory.failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to map it")
        self.mapped = True


class Cache(PagedCache):
    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self._memory = Memory(self._bytes)


@pytest.fixture(scope="module")
def expected(policy):
    return RolloutEngine(policy, page_size=4).generate(PROMPTS, PARAMS)


@pytest.fixture
def engine(policy, monkeypatch):
    monkeypatch.setattr(kv_pool, "PagedCache", Cache)
    monkeypatch.setattr(Memory, "failures", 0)
    return RolloutEngine(policy, page_size=4, max_batch_size=8)


def parts(engine):
    return engine._pool._cache, engine._pool._decode


def test_the_next_call_goes_on_with_what_there_is(engine, expected):
    assert engine.generate(PROMPTS, PARAMS) == expected
    cache, decode = parts(engine)
    for _ in range(2):
        engine.free_cache()
        engine.free_cache()  # nothing is left to give back
        assert not cache.ready
        assert engine.generate(PROMPTS, PARAMS) == expected
        assert parts(engine) == (cache, decode)
    engine.free_cache()
    assert engine.generate(PROMPTS[:1], PARAMS) == expected[:2], "fewer pages would do"
    assert parts(engine) == (cache, decode)
    engine.free_cache()
    engine.generate(PROMPTS, SamplingParams(n=2, max_tokens=40))
    assert engine._pool._cache.num_pages > cache.num_pages
    assert not cache.ready
    assert engine._pool._decode is not decode


def test_fewer_pages_where_there_is_less_room(policy, engine, expected, monkeypatch):
    assert engine.generate(PROMPTS, PARAMS) == expected
    cache, decode = parts(engine)
    engine.free_cache()
    # Half of what is left for other things may be missing, not more; here half of a fifth, and
    # contexts of 17 + 12 - 1 tokens.
    staged = 6 * 28 * staged_bytes_per_token(policy.config, policy.plan)
    free = int((cache.num_bytes + staged) / 0.9) + 1
    monkeypatch.setattr(engine._pool, "_free_bytes", lambda: free)
    assert engine.generate(PROMPTS, PARAMS) == expected
    assert parts(engine) == (cache, decode)
    engine.free_cache()
    monkeypatch.setattr(engine._pool, "_free_bytes", lambda: cache.num_bytes)
    assert engine.generate(PROMPTS, PARAMS) == expected
    assert engine._pool._cache.num_pages < cache.num_pages
    assert engine._pool._decode is not decode


def test_no_memory_after_all_halves_the_sizes(engine, expected):
    assert engine.generate(PROMPTS, PARAMS) == expected
    cache, decode = parts(engine)
    engine.free_cache()
    Memory.failures = 1
    assert engine.generate(PROMPTS, PARAMS) == expected
    assert engine.sizes.take_retries() == 1
    assert engine.sizes.now.max_batch_size == 4
    assert engine._pool._cache is not cache
    assert engine._pool._decode is not decode


def test_a_call_that_fails_leaves_no_memory_behind(engine, expected):
    assert engine.generate(PROMPTS, PARAMS) == expected
    cache = engine._pool._cache

    def interrupt(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS, progress=interrupt)
    assert not cache.ready
    assert engine.generate(PROMPTS, PARAMS) == expected
    assert engine._pool._cache is not cache
