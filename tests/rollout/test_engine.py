"""The engine's promises: the trainer's log-probs as bits, and draws that depend on nothing else."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from jetrl.errors import UserError
from jetrl.kernels.decode import take_draws
from jetrl.models.attention import PackedKeyValues
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


def of_prompt(completions, place, n=PARAMS.n):
    return completions[place * n : (place + 1) * n]


def count_different(policy, prompts, completions, n, temperature):
    """Tokens whose log-prob is not, as bits, the trainer's."""
    owners = [prompts[i // n] for i in range(len(completions))]
    sequences = [p + list(c.token_ids) for p, c in zip(owners, completions, strict=True)]
    trainer_logprobs = policy.logprobs(sequences, temperature)
    different = 0
    for prompt, completion, logprobs in zip(owners, completions, trainer_logprobs, strict=True):
        mine = torch.tensor(completion.logprobs)
        theirs = logprobs.detach()[len(prompt) - 1 :]
        different += int((mine.view(torch.int32) != theirs.view(torch.int32)).sum())
    return different


def train_logits(policy, tokens):
    """The trainer's logits of one sequence: float32 [len, V]."""
    ids = torch.tensor(tokens)
    kv = PackedKeyValues(torch.tensor([0, len(tokens)]), policy.plan)
    with torch.no_grad():
        hidden = policy.decoder(ids, torch.arange(len(tokens)), kv, "train")
        return policy.decoder.logits(hidden, "train")


@pytest.mark.parametrize("preset, temperature", [("unified", 0.7), ("jet", 1.0)])
def test_logprobs_are_the_trainers_as_bits(make_policy, preset, temperature):
    policy = make_policy(preset)
    engine = RolloutEngine(policy, max_batch_size=6, page_size=4, max_prefill_tokens=10)
    params = SamplingParams(n=4, max_tokens=24, temperature=temperature, top_p=0.9, top_k=50)
    out = engine.generate(PROMPTS, params)
    assert sum(len(c.token_ids) for c in out) > 200
    assert count_different(policy, PROMPTS, out, 4, temperature) == 0


@pytest.mark.parametrize("options", [{"scales": "pow2"}, {"first_layers_bf16": 1}], ids=str)
def test_exact_under_plan_options(make_policy, options):
    policy = make_policy("unified", **options)
    out = RolloutEngine(policy, page_size=4).generate(PROMPTS, PARAMS)
    assert count_different(policy, PROMPTS, out, PARAMS.n, PARAMS.temperature) == 0


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


def test_the_comparison_can_fail(make_policy):
    """Under `mixed` the sampler is FP8 and the trainer BF16: nearly every log-prob differs."""
    policy = make_policy("mixed")
    out = RolloutEngine(policy).generate(PROMPTS, PARAMS)
    total = sum(len(c.token_ids) for c in out)
    assert count_different(policy, PROMPTS, out, PARAMS.n, PARAMS.temperature) > total / 2


@pytest.mark.parametrize(
    "sizes",
    [{"max_batch_size": 2}, {"max_prefill_tokens": 1}, {"max_prefill_tokens": 7}, {"page_size": 1}],
    ids=str,
)
def test_sizes_change_nothing(policy, reference, sizes):
    assert (
        RolloutEngine(policy, **{"page_size": 16, **sizes}).generate(PROMPTS, PARAMS) == reference
    )


@pytest.mark.parametrize("num_pages", [9, 12])
def test_preemption_changes_nothing(policy, reference, num_pages):
    """9 pages of 4 hold the longest sequence, 17 + 20 - 1 tokens, and nothing else."""
    engine = RolloutEngine(policy, num_pages=num_pages, page_size=4, max_batch_size=8)
    assert engine.generate(PROMPTS, PARAMS) == reference
    assert engine.stats.preemptions > 0
    assert engine.stats.peak_pages <= num_pages


@pytest.mark.parametrize(
    "num_pages, repeats, ahead", [(None, 4, 0), (None, 4, 1), (12, 4, 1), (12, 3, 2)]
)
def test_decode_in_a_row_and_ahead_changes_nothing(policy, reference, num_pages, repeats, ahead):
    engine = RolloutEngine(policy, num_pages=num_pages, page_size=4, max_batch_size=4)
    engine._repeats, engine._ahead = repeats, ahead
    assert engine.generate(PROMPTS, PARAMS) == reference
    assert engine.generate(PROMPTS, PARAMS) == reference, "the second call on the same state"
    assert engine.stats.tokens_drawn == sum(len(c.token_ids) for c in reference)


class _HostEvent:
    """A CUDA event of a device that does everything at once: milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self.at = 1e3 * time.perf_counter()

    def elapsed_time(self, later: _HostEvent) -> float:
        return later.at - self.at

    def synchronize(self) -> None:
        pass


def test_time_between_steps_is_idle_and_no_prefill(policy, monkeypatch):
    monkeypatch.setattr("jetrl.rollout.engine.mark", _HostEvent)
    monkeypatch.setattr("jetrl.rollout.decode.mark", _HostEvent)
    engine = RolloutEngine(policy, page_size=4, max_prefill_tokens=8)
    params = replace(PARAMS, n=1, max_tokens=1)  # steps over prompts alone
    engine.generate(PROMPTS, params, progress=lambda _: time.sleep(0.05))
    stats = engine.stats
    assert stats.prefill_s > 0
    assert stats.device_idle_s >= 0.05 * (stats.forwards - 1)
    assert stats.prefill_s + stats.device_idle_s <= stats.seconds


def test_stop_ids_that_the_device_has_no_room_for_are_the_hosts(policy, reference, monkeypatch):
    monkeypatch.setattr("jetrl.rollout.decode.MAX_STOP_IDS", 1)
    engine = RolloutEngine(policy, page_size=4, max_batch_size=4)
    engine._repeats, engine._ahead = 4, 1
    assert engine.generate(PROMPTS, PARAMS) == reference


def test_stop_strings_end_what_runs_ahead(policy, reference):
    """The device knows of stop ids alone: what it draws past a stop string is dropped."""
    text = reference[0].text
    params = replace(PARAMS, stop=(text[3:5],))
    wanted = RolloutEngine(policy, page_size=4).generate(PROMPTS, params)
    assert wanted[0].text == text[: text.index(text[3:5])]
    engine = RolloutEngine(policy, page_size=4, max_batch_size=4)
    engine._repeats, engine._ahead = 5, 1
    assert engine.generate(PROMPTS, params) == wanted


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
    monkeypatch.setattr("jetrl.rollout.decode_forward.take_draws", broken)
    engine = RolloutEngine(policy, page_size=4)
    engine._repeats, engine._ahead = 5, 1
    if past:
        assert engine.generate(PROMPTS[:1], params) == wanted
    else:
        with pytest.raises(NonFiniteLogits) as caught:
            engine.generate(PROMPTS[:1], params)
        assert caught.value.token_ids == (*PROMPTS[0], *wanted[0].token_ids[:-1])


def test_draws_depend_on_prompt_occurrence_sample_and_seed_only(policy, reference):
    engine = RolloutEngine(policy, max_batch_size=4, page_size=4)
    order = [3, 0, 4, 0]
    out = engine.generate([PROMPTS[i] for i in order], replace(PARAMS, n=4))
    for place, i in enumerate(order[:3]):
        assert of_prompt(out, place, 4)[:3] == of_prompt(reference, i)
        assert len({c.token_ids for c in of_prompt(out, place, 4)}) == 4
    assert of_prompt(out, 3, 4)[:3] != of_prompt(reference, 0), "a prompt that comes again"
    assert engine.generate(PROMPTS, replace(PARAMS, seed=8)) != reference
    flat = engine.generate([[5]], SamplingParams(max_tokens=40, temperature=1000, ignore_eos=True))
    assert len(set(flat[0].token_ids)) > 20, "each position has its own draw"


def test_a_prompt_is_prefilled_once_for_all_samples(policy):
    engine = RolloutEngine(policy, max_batch_size=2)
    out = engine.generate(PROMPTS, SamplingParams(n=6, max_tokens=5))
    drawn = sum(len(c.token_ids) for c in out)
    assert engine.stats.tokens_prefilled == sum(map(len, PROMPTS))
    assert engine.stats.tokens_drawn == drawn
    assert engine.stats.tokens_decoded == drawn - len(out), "the last token is drawn, not run"
    assert (engine.stats.prompts, engine.stats.sequences) == (5, 30)


def test_finish_reasons_and_stop_ids(policy, reference):
    stops = {1, *PARAMS.stop_token_ids}
    assert {c.finish_reason for c in reference} == {"stop", "length"}
    for completion in reference:
        *before, last = completion.token_ids
        assert not stops & set(before)
        assert (completion.finish_reason == "stop") == (last in stops)
        assert len(completion.token_ids) == PARAMS.max_tokens or last in stops


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


def test_greedy_takes_the_most_probable(policy):
    out = RolloutEngine(policy).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
    for prompt, completion in zip(PROMPTS, out, strict=True):
        logits = train_logits(policy, prompt + list(completion.token_ids))
        best = logits.argmax(-1)[len(prompt) - 1 : -1]
        assert best.tolist() == list(completion.token_ids)
    assert count_different(policy, PROMPTS, out, 1, 1.0) == 0, "log-probs of temperature 1"


def test_top_k_and_top_p_leave_out_the_rest(policy):
    params = SamplingParams(n=3, max_tokens=20, temperature=1.5, top_k=6, top_p=0.6)
    out = RolloutEngine(policy).generate(PROMPTS, params)
    beyond_greedy = 0
    for i, completion in enumerate(out):
        prompt = PROMPTS[i // 3]
        logits = train_logits(policy, prompt + list(completion.token_ids))[len(prompt) - 1 : -1]
        for row, token in zip(logits.double() / 1.5, completion.token_ids, strict=True):
            above = row > row[token]
            assert above.sum() < 6
            kept = row.topk(6).values.exp().sum()
            # the sampler's weights have 40 bits below the largest, of 98 tokens: error < 2**-33
            assert row[above].exp().sum() / kept < 0.6 + 2**-33
            beyond_greedy += int(above.any())
    assert beyond_greedy > 50


def test_first_tokens_follow_the_distribution(policy):
    """2000 samples of one prompt against its softmax; each frequency within 5 sigma + 1 draw."""
    n = 2000
    params = SamplingParams(n=n, max_tokens=1, temperature=1.3, ignore_eos=True)
    engine = RolloutEngine(policy, max_batch_size=8)
    out = engine.generate([PROMPTS[0]], params)
    assert engine.stats.forwards == 1
    p = (train_logits(policy, PROMPTS[0])[-1].double() / 1.3).softmax(-1)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in out]), minlength=98)
    assert ((counts - n * p).abs() <= 5 * (n * p * (1 - p)).sqrt() + 1).all()
    assert p.max() < 0.6, "a distribution that says something"


def test_new_weights_are_used_at_once(make_policy):
    policy = make_policy()
    engine = RolloutEngine(policy, page_size=4)
    before = engine.generate(PROMPTS, PARAMS)
    with torch.no_grad():
        for master in policy.master_weights().values():
            master.mul_(1.1)
    policy.requantize()
    after = engine.generate(PROMPTS, PARAMS)
    assert after != before
    assert count_different(policy, PROMPTS, after, PARAMS.n, PARAMS.temperature) == 0


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


def test_time_left_is_no_less_because_the_short_ones_end_first(policy):
    """All begin together, so what has finished is shorter than what has not."""
    records = []
    out = RolloutEngine(policy).generate(PROMPTS, PARAMS, progress=records.append)
    drawn = sum(len(c.token_ids) for c in out)
    for record in records:
        left = record.eta_s * record.tokens_per_s
        running = record.sequences_total - record.sequences_done
        assert left <= running * PARAMS.max_tokens
        assert (left > 0) == (record.tokens < drawn)


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
    for name in ("sequences_done", "tokens", "seconds"):
        values = [getattr(record, name) for record in records]
        assert values == sorted(values)
    assert max(record.pages_in_use for record in records) <= engine.stats.peak_pages <= 40


def test_default_pages_are_what_the_batch_can_use(policy, reference, caplog):
    engine = RolloutEngine(policy, page_size=4, max_batch_size=8)
    with caplog.at_level("INFO", logger="jetrl.rollout.kv_pool"):
        assert engine.generate(PROMPTS, PARAMS) == reference
    assert engine.stats.pages_total == 8 * 9 + 1, (
        "8 sequences of 17 + 20 - 1 tokens, and parked ones"
    )
    assert engine.stats.preemptions == 0
    assert "KV cache: 73 pages of 4 tokens, int8+fp8" in caplog.text

    engine.generate([[5, 6]], SamplingParams(max_tokens=4))
    assert engine.stats.pages_total == 73, "a cache that is large enough stays"
    engine.free_cache()
    engine.generate([[5, 6]], SamplingParams(max_tokens=4))
    assert engine.stats.pages_total == 2


def test_little_memory_means_fewer_pages(policy, reference, monkeypatch, caplog):
    page = PagedCache.page_bytes(policy.config, policy.plan, 4)
    free = 4 * 10 * page
    monkeypatch.setattr("jetrl.rollout.kv_pool.available_bytes", lambda: free)
    engine = RolloutEngine(policy, page_size=4)
    with caplog.at_level("INFO", logger="jetrl.rollout.kv_pool"):
        assert engine.generate(PROMPTS, PARAMS) == reference
    assert engine.stats.pages_total == 10
    assert f"MiB of the {free / 2**30:.1f} GiB that were free" in caplog.text
    with pytest.raises(UserError, match="at most 40, or leave it unset"):
        RolloutEngine(policy, page_size=4, num_pages=41)
    free = 4 * 8 * page
    with pytest.raises(UserError, match="more memory"):
        RolloutEngine(policy, page_size=4).generate(PROMPTS, PARAMS)


def test_the_context_limits_max_tokens(policy):
    prompt = list(range(2, 98)) + [5] * 29  # 125 tokens of 128
    engine = RolloutEngine(policy, page_size=16)
    (out,) = engine.generate([prompt], SamplingParams(max_tokens=50, ignore_eos=True))
    assert (len(out.token_ids), out.finish_reason) == (3, "length")
    assert count_different(policy, [prompt], [out], 1, 1.0) == 0


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


def test_a_page_size_that_a_gpu_has_not_is_refused_when_the_engine_is_made(policy):
    on_gpu = SimpleNamespace(config=policy.config, device=torch.device("cuda"))
    with pytest.raises(UserError, match="page_size 32: a page has 64 tokens on a GPU"):
        RolloutEngine(on_gpu, page_size=32)
