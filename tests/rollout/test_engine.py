"""The engine's promises: the trainer's log-probs as bits, and draws that depend on nothing else."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.training.shared import count_different

from jetrl.errors import UserError
from jetrl.kernels.decode import take_draws
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.kv_cache import PagedCache
from jetrl.rollout.options import GenerateOptions
from jetrl.rollout.sequence import NonFiniteLogits
from jetrl.types import SamplingParams

PROMPTS = [[5, 6, 7], [9] * 17, [11, 12, 13, 14], [20], [40, 41, 42, 43, 44, 45, 46, 47]]
PARAMS = SamplingParams(n=3, max_tokens=20, temperature=0.9, stop_token_ids=(33, 34, 35), seed=7)


@pytest.fixture(scope="module")
def reference(policy):
    """All prompts at once, with pages for everything."""
    return RolloutEngine(policy, page_size=16).generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("of_all", [False, True])
@pytest.mark.parametrize("preset, temperature", [("unified", 0.7), ("jet", 1.0), ("integer", 1.0)])
def test_logprobs_are_the_trainers_as_bits(make_policy, preset, temperature, of_all):
    policy = make_policy(preset)
    engine = RolloutEngine(policy, max_batch_size=6, page_size=4, max_prefill_tokens=10)
    params = SamplingParams(n=4, max_tokens=24, temperature=temperature, top_p=0.9, top_k=50)
    params = replace(params, min_p=0.02, truncated_logprobs=not of_all)
    out = engine.generate(PROMPTS, params)
    assert sum(len(c.token_ids) for c in out) > 200
    assert count_different(policy, PROMPTS, out, params) == 0
    other = replace(params, truncated_logprobs=of_all)
    assert count_different(policy, PROMPTS, out, other) > 100
    assert [c.token_ids for c in engine.generate(PROMPTS, other)] == [c.token_ids for c in out]


def test_of_prompts_the_last_layer_computes_the_ends_alone(make_policy):
    policy = make_policy("unified")
    rows: dict[str, list[int]] = {}
    policy.decoder.trace = lambda name, x: rows.setdefault(name, []).append(len(x))
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    RolloutEngine(policy, max_prefill_tokens=22).generate(PROMPTS, params)
    last = policy.config.num_layers - 1
    assert rows["layers.0.down"] == rows[f"layers.{last}.qkv"] == [22, 11]  # tokens
    assert rows[f"layers.{last}.attention"] == rows[f"layers.{last}.down"] == [3, 3]  # chunks
    assert rows["lm_head"] == [2, 3]  # draws: a prompt is cut


@pytest.mark.parametrize(
    "sizes, repeats, ahead",
    [
        ({"max_batch_size": 2}, 1, 0),
        ({"max_prefill_tokens": 1}, 1, 0),
        ({"max_prefill_tokens": 7, "page_size": 1}, 4, 0),
        ({"num_pages": 9}, 1, 0),  # the longest sequence, 17 + 20 - 1 tokens, and nothing else
        ({"num_pages": 12}, 4, 1),
        ({"num_pages": 12, "max_batch_size": 4}, 3, 2),
    ],
    ids=str,
)
def test_sizes_preemption_and_running_ahead_change_nothing(
    policy, reference, sizes, repeats, ahead
):
    engine = RolloutEngine(policy, **{"page_size": 4, "max_batch_size": 8, **sizes})
    engine._repeats, engine._ahead = repeats, ahead
    assert engine.generate(PROMPTS, PARAMS) == reference
    if ahead:
        assert engine.generate(PROMPTS, PARAMS) == reference, "the second call on the same state"
    assert engine.stats.tokens_drawn == sum(len(c.token_ids) for c in reference)
    if "num_pages" in sizes:
        assert engine.stats.preemptions > 0
        assert engine.stats.pages_total == sizes["num_pages"]


def test_stop_ids_that_the_device_has_no_room_for_are_the_hosts(policy, reference, monkeypatch):
    monkeypatch.setattr("jetrl.rollout.decode.MAX_STOP_IDS", 1)
    engine = RolloutEngine(policy, page_size=4, max_batch_size=4)
    engine._repeats, engine._ahead = 4, 1
    assert engine.generate(PROMPTS, PARAMS) == reference


@pytest.mark.parametrize("past", [True, False])
def test_logits_that_are_not_finite_past_the_end_are_nothing(policy, reference, monkeypatch, past):
    """Draws past a stop string are dropped; logits that are not finite before the string raise."""
    text = reference[0].text
    params = replace(PARAMS, n=1, stop=(text[3:5],))
    first_bad = len(PROMPTS[0]) + text.index(text[3:5]) + (2 if past else 1)  # one token a letter

    def broken(state, rows, tokens, logprobs, lse, out):
        bad = state.active[rows].bool() & (state.position[rows] + 1 >= first_bad)
        take_draws(state, rows, tokens, logprobs, lse.masked_fill(bad, math.nan), out)

    wanted = RolloutEngine(policy, page_size=4).generate(PROMPTS[:1], params)
    monkeypatch.setattr("jetrl.rollout.decode.take_draws", broken)
    engine = RolloutEngine(policy, page_size=4)
    engine._repeats, engine._ahead = 5, 1
    if past:
        assert engine.generate(PROMPTS[:1], params) == wanted
    else:
        with pytest.raises(NonFiniteLogits) as caught:
            engine.generate(PROMPTS[:1], params)
        assert caught.value.token_ids == (*PROMPTS[0], *wanted[0].token_ids[:-1])


def test_the_models_end_id_stops_unless_ignored(policy, reference):
    """Token 1 is the end by config.json; generation_config.json may name more."""
    end = reference[0].token_ids[4]
    policy.generation_config = {"eos_token_id": [end]}
    try:
        params = SamplingParams(n=3, max_tokens=20, temperature=0.9, seed=7)
        (first, *_) = RolloutEngine(policy).generate(PROMPTS, params)
        at = reference[0].token_ids.index(end)
        assert first.token_ids == reference[0].token_ids[: at + 1]
        params = SamplingParams(n=3, max_tokens=20, temperature=0.9, seed=7, ignore_eos=True)
        out = RolloutEngine(policy).generate(PROMPTS, params)
    finally:
        policy.generation_config = {}
    assert {len(c.token_ids) for c in out} == {20}


def test_interrupted_and_used_again(policy, reference):
    engine = RolloutEngine(policy, num_pages=12, page_size=4)
    seen, allocators = [], set()

    def interrupt(progress):
        seen.append(progress.pages_in_use)
        allocators.add(engine._running.scheduler.allocator)
        if len(seen) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS, progress=interrupt)
    assert max(seen) > 0
    assert engine.pages_in_use == 0
    assert [allocator.num_used for allocator in allocators] == [0]
    assert engine.generate(PROMPTS, PARAMS) == reference


def test_interrupted_before_its_first_step_and_used_again(policy, reference, monkeypatch):
    engine = RolloutEngine(policy, num_pages=12, page_size=4)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    for name in ("PageAllocator", "Scheduler", "text_decoder", "Generation"):
        with monkeypatch.context() as patch:
            patch.setattr(f"jetrl.rollout.engine.{name}", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(PROMPTS, PARAMS)
    engine.free_cache()
    assert engine.generate(PROMPTS, PARAMS) == reference


@pytest.mark.parametrize("preset", ["unified", "fp32"])
def test_logits_that_are_not_finite_stop_the_run(make_policy, preset):
    """And the NaN that they leave in the pages does not outlive the call."""
    policy = make_policy(preset)
    engine = RolloutEngine(policy, num_pages=20)
    before = engine.generate(PROMPTS, PARAMS)
    master = policy.master_weights()["layers.0.input_norm.weight"]
    with torch.no_grad():
        master[3] = math.nan
        policy.requantize()
        with pytest.raises(NonFiniteLogits, match="not finite") as caught:
            engine.generate([[9] * 60] * 20, PARAMS)
        assert caught.value.token_ids[:60] == (9,) * 60
        master[3] = 1.0
        policy.requantize()
    assert engine.pages_in_use == 0
    assert engine.generate(PROMPTS, PARAMS) == before


def test_progress_tells_how_far_it_is(policy):
    records = []
    engine = RolloutEngine(policy, num_pages=40, page_size=4, max_batch_size=4)
    out = engine.generate(PROMPTS, PARAMS, progress=records.append)
    assert len(records) == engine.stats.forwards
    last = records[-1]
    assert (last.sequences_done, last.sequences_total) == (15, 15)
    assert last.tokens == sum(len(c.token_ids) for c in out)
    assert (last.pages_in_use, last.pages_total) == (0, 40)
    assert last.eta_s == pytest.approx(0.0, abs=1e-6)
    for record in records:
        running = record.sequences_total - record.sequences_done
        assert record.eta_s * record.tokens_per_s <= running * PARAMS.max_tokens
    for name in ("sequences_done", "tokens", "seconds"):
        values = [getattr(record, name) for record in records]
        assert values == sorted(values)


def test_default_pages_are_what_the_batch_can_use_and_memory_has(policy, reference, monkeypatch):
    engine = RolloutEngine(policy, page_size=4, max_batch_size=8)
    assert engine.generate(PROMPTS, PARAMS) == reference
    assert engine.stats.preemptions == 0
    assert engine.stats.pages_total == 8 * 9 + 1, "17 + 20 - 1 tokens each, and parked ones"
    engine.generate([[5, 6]], SamplingParams(max_tokens=4))
    assert engine.stats.pages_total == 73, "a cache that is large enough stays"
    engine.free_cache()
    engine.generate([[5, 6]], SamplingParams(max_tokens=4))
    assert engine.stats.pages_total == 2

    page, free = PagedCache.page_bytes(policy.config, policy.plan, 4), 4 * 10
    monkeypatch.setattr("jetrl.rollout.kv_pool.available_bytes", lambda: free * page)
    engine = RolloutEngine(policy, page_size=4)
    assert engine.generate(PROMPTS, PARAMS) == reference
    assert engine.stats.pages_total == 10
    with pytest.raises(UserError, match="at most 40, or leave it unset"):
        RolloutEngine(policy, page_size=4, num_pages=41)
    free = 4 * 8
    with pytest.raises(UserError, match="more memory"):
        RolloutEngine(policy, page_size=4).generate(PROMPTS, PARAMS)


def test_completions_are_told_as_they_finish_and_returned_as_told(policy):
    engine = RolloutEngine(policy, max_batch_size=3)
    told, running = {}, []

    def finished(index, completion):
        assert index not in told
        told[index] = completion
        running.append(sum(not sequence.finished for sequence in engine.sequences))

    lengths = [5, 1, 9, 3]
    out = engine.generate(
        [[5, 6, 7], [8]],
        SamplingParams(n=2),
        options=GenerateOptions(max_tokens=lengths, finished=finished),
    )
    assert [told[i] is completion for i, completion in enumerate(out)] == [True] * 4
    assert running == [3, 2, 1, 0]


def test_a_page_size_that_a_gpu_has_not_is_refused_when_the_engine_is_made(policy, monkeypatch):
    monkeypatch.setattr("jetrl.rollout.engine.has_kernels", lambda _: True)
    on_gpu = SimpleNamespace(config=policy.config, device=torch.device("cuda"))
    with pytest.raises(UserError, match="page_size 32: a page has 64 tokens on a GPU"):
        RolloutEngine(on_gpu, page_size=32)
