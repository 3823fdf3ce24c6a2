"""The paged cache against attention over the packed batch: equal bits, wherever the pages lie."""

from __future__ import annotations

import random

import pytest
import torch

from jetrl.kernels.attention.integer import attend_packed_integer
from jetrl.kernels.attention.reference import attend_packed
from jetrl.models.families import ModelConfig
from jetrl.precision.plan import PrecisionPlan
from jetrl.rollout.kv_cache import PagedCache, Span

CPU = torch.device("cpu")


@pytest.fixture
def config(policy):
    return policy.config


def plan_of(preset: str, kv: str | None = None) -> PrecisionPlan:
    plan = PrecisionPlan.preset(preset)
    return plan if kv is None else plan.replace(kv=kv)


def make_cache(config: ModelConfig, preset="unified", num_pages=64, page_size=4, kv=None):
    return PagedCache(config, plan_of(preset, kv), num_pages, page_size, CPU)


def random_qkv(config, tokens, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    shapes = [(tokens, number, config.head_dim) for number in heads]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def run_in_chunks(cache, config, layer, lengths, qkv, chunk, rng):
    """Feeds packed sequences in turns of at most `chunk` tokens, into pages in random order."""
    q, k, v = qkv
    free = list(range(cache.num_pages))
    rng.shuffle(free)
    pages = [[free.pop() for _ in range(-(-n // cache.page_size))] for n in lengths]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    out = torch.full_like(q, torch.nan)
    done = [0] * len(lengths)
    while done != lengths:
        spans, tokens = [], []
        for i in rng.sample(range(len(lengths)), len(lengths)):
            length = min(chunk, lengths[i] - done[i], rng.randint(1, chunk))
            if length > 0:
                spans.append(Span(len(tokens), done[i], length, pages[i]))
                tokens += range(starts[i] + done[i], starts[i] + done[i] + length)
                done[i] += length
        out[tokens] = cache.key_values(spans).attend_heads(layer, q[tokens], k[tokens], v[tokens])
    return out


@pytest.mark.parametrize(
    "preset, kv",
    [("jet", None), ("integer", None), *(("unified", kv) for kv in ("fp8", "int8+fp8"))],
)
@pytest.mark.parametrize("page_size, chunk", [(1, 9), (16, 3000)])
def test_paged_equals_packed_as_bits(config, preset, kv, page_size, chunk):
    lengths = [1, 5, 17, 16, 300]  # more queries than one item has
    cache = make_cache(config, preset, num_pages=360, page_size=page_size, kv=kv)
    plan = plan_of(preset, kv)
    q, k, v = random_qkv(config, sum(lengths), torch.bfloat16)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    if plan.integer_attention:
        wanted = attend_packed_integer(q, k, v, cu_seqlens, plan.scales)
    else:
        wanted = attend_packed(q, k, v, cu_seqlens, plan.kv, plan.scales)
    got = run_in_chunks(cache, config, 1, lengths, (q, k, v), chunk, random.Random(0))
    assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize(
    "preset, kv", [("unified", "fp8"), ("unified", "int8+fp8"), ("integer", None)]
)
def test_slots_of_no_token_may_hold_anything(config, preset, kv):
    """Old NaN in the rest of a page and in other pages does not reach a result."""
    lengths = [5, 9, 2]
    results = []
    for fill in (0.0, torch.nan):
        cache = make_cache(config, preset, kv=kv)
        tokens = cache.num_pages * cache.page_size
        dirt = [torch.full_like(x, fill) for x in random_qkv(config, tokens, torch.bfloat16)]
        whole = Span(0, 0, tokens, list(range(cache.num_pages)))
        cache.key_values([whole]).attend_heads(0, *dirt)
        qkv = random_qkv(config, sum(lengths), torch.bfloat16)
        results.append(run_in_chunks(cache, config, 0, lengths, qkv, 3, random.Random(1)))
    assert results[1].isfinite().all()
    assert torch.equal(results[0], results[1])


def test_copies_read_all_sources_first(config):
    """A page may be a source and a destination in one step: 0 -> 1 -> 2."""
    cache = make_cache(config, num_pages=3, page_size=2)
    q, k, v = random_qkv(config, 2, torch.bfloat16)
    for page in range(3):
        span = Span(0, 0, 2, [page])
        cache.key_values([span]).attend_heads(0, q, k * (page + 1), v * (page + 1))
    expected = [cache._keys.codes[0, 0].clone(), cache._keys.codes[0, 1].clone()]
    scales = [cache._values.scales[0, 0].clone(), cache._values.scales[0, 1].clone()]
    cache.copy_pages([(0, 1), (1, 2)])
    for page in (1, 2):
        raw = cache._keys.codes[0, page].view(torch.uint8)
        assert torch.equal(raw, expected[page - 1].view(torch.uint8))
        assert torch.equal(cache._values.scales[0, page], scales[page - 1])


@pytest.mark.parametrize(
    "preset, kv, share", [("unified", "fp8", 36), ("bf16", None, 64), ("fp32", None, 128)]
)
def test_page_bytes_is_what_a_page_takes(config, preset, kv, share):
    """`share`: bytes a head of 32 values, with the 4 bytes of its scale beside codes."""
    cache = make_cache(config, preset, num_pages=7, page_size=4, kv=kv)
    tensors = [
        t for s in (cache._keys, cache._values) for t in (s.codes, s.scales) if t is not None
    ]
    taken = sum(t.numel() * t.element_size() for t in tensors)
    page = PagedCache.page_bytes(config, plan_of(preset, kv), 4)
    assert taken == 7 * page
    assert page == 2 * 2 * 4 * 2 * share, "keys and values, layers, tokens, heads"
