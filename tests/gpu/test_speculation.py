"""Speculation on a Hopper GPU: kernels beside their references, no different bit in the engine."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from small_models import config
from tests.kernels.interpreted_verify import overruns

from jetrl import Policy, RolloutEngine, SamplingParams
from jetrl.kernels.attention.decode import attend_decode, attend_decode_quantized
from jetrl.kernels.attention.layout import KeyValueCodes, SequenceQueries
from jetrl.kernels.attention.reference import quantize_kv
from jetrl.kernels.decode import take_verified, verify_inputs
from jetrl.kernels.decode_state import (
    MAX_DRAFT,
    ORDERS,
    QUALITY_ONE,
    UNKNOWN,
    DecodeState,
    DraftText,
    Verified,
)
from jetrl.kernels.draft import ngram_entry, propose, remember
from jetrl.models.draft_head import DraftHead
from jetrl.precision import PrecisionPlan
from jetrl.rollout.draft_widths import DraftWidths, choices
from jetrl.session.parity import random_prompts

pytestmark = pytest.mark.gpu

CONFIG = config(vocab_size=500, max_position_embeddings=4096, eos_token_id=7)
VOCABULARY = 12  # of texts in which n-grams come again


def on_gpu(record: Any) -> Any:
    """The record with its tensors on the GPU."""
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return type(record)(
        **{n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in fields.items()}
    )


def assert_equal(cpu: Any, gpu: Any, names: list[str]) -> None:
    for name in names:
        assert torch.equal(getattr(cpu, name), getattr(gpu, name).cpu()), name


@pytest.mark.parametrize(
    ("width", "size"), [(1, 171), (2, 342), (2, 180), (4, 300), (8, 1368), (8, 500), (8, 171)]
)
def test_drafts_and_their_verification_are_the_references(width: int, size: int) -> None:
    generator = torch.Generator().manual_seed(width)
    slots, length, rows = 200, 60, 171

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    state = DecodeState.empty(slots, 30, torch.device("cpu"))
    state.position.copy_(integers(0, length - 12, slots))
    state.limit.copy_(state.position + 1 + integers(0, 12, slots))
    state.active.copy_(integers(0, 5, slots) > 0)
    state.key.copy_(integers(0, 2**62, slots))
    state.seed.fill_(12345)
    state.tables.copy_(integers(0, 10**6, slots, 30))
    state.stops[:3] = torch.tensor([2, 1, 2])
    text = DraftText.empty(slots, length, 5000, 2**16, torch.device("cpu"))
    text.group.copy_(integers(0, 2**62, slots // 10).repeat_interleave(10))
    text.quality.copy_(integers(0, QUALITY_ONE + 1, slots))
    for slot in range(slots):
        # All are far enough that what is drawn enters the tables only in this test.
        tokens = integers(3, VOCABULARY, int(state.position[slot]) + 1)
        places = slot * text.width + torch.arange(len(tokens))
        remember(text, places, tokens, text.group[slot].expand(len(tokens)), 8)
        state.token[slot] = tokens[-1]
    archived = torch.where(integers(0, 30, 5000) == 0, UNKNOWN, integers(3, VOCABULARY, 5000))
    places = text.archive_start + torch.arange(5000)
    remember(text, places, archived, text.group[:20].repeat(250), 1)

    which = torch.randperm(slots, generator=generator)[:rows]
    out = Verified(
        torch.zeros(2, slots * 8).int(),
        torch.zeros(2, slots * 8),
        torch.zeros(2, slots).int(),
        torch.zeros(1).int(),
    )
    gpu_state, gpu_text, gpu_out = on_gpu(state), on_gpu(text), on_gpu(out)
    drafts, gpu_drafts = propose(text, state, which), propose(gpu_text, gpu_state, which.cuda())
    assert int((drafts.counts > 2).sum()) > 20
    assert_equal(drafts, gpu_drafts, ["counts", "sources"])
    used = torch.arange(MAX_DRAFT) < drafts.counts[:, None]
    assert torch.equal(drafts.tokens[used], gpu_drafts.tokens.cpu()[used])
    inputs = verify_inputs(state, text, drafts, which, 4, width, size)
    gpu_inputs = verify_inputs(gpu_state, gpu_text, gpu_drafts, which.cuda(), 4, width, size)
    assert_equal(inputs, gpu_inputs, [f.name for f in dataclasses.fields(inputs)])
    # Draws that are mostly what the drafts say.
    right = inputs.token_ids.roll(-1)  # of each query but a sequence's last
    wrong = integers(0, 4, size) == 0
    tokens = torch.where(wrong, integers(0, VOCABULARY, size), right)
    logprobs = torch.randn(size, generator=generator)
    lse = torch.where(integers(0, 40, size) == 0, torch.nan, logprobs)
    before = copy.deepcopy(text.tables)
    take_verified(state, text, drafts, inputs, which, tokens, logprobs, lse, out, width)
    on_device = (x.cuda() for x in (which, tokens, logprobs, lse))
    take_verified(gpu_state, gpu_text, gpu_drafts, gpu_inputs, *on_device, gpu_out, width)
    assert_equal(out, gpu_out, ["tokens", "logprobs", "offers", "count"])
    assert_equal(state, gpu_state, ["token", "position", "active"])
    assert_equal(text, gpu_text, ["text", "quality"])
    # Where two n-grams went to one entry either may have come last.
    assert int((text.tables != before).sum()) > 50
    for order, gpu_table, table in zip(ORDERS, gpu_text.tables.cpu(), text.tables, strict=True):
        entries = (gpu_table != table).nonzero().flatten()
        for places in (gpu_table[entries].long(), table[entries].long()):
            groups = text.group[places // text.width]
            assert torch.equal(ngram_entry(text, groups, places, order), entries)


@pytest.mark.parametrize(
    ("kv", "group", "head_dim", "width"),
    [
        ("fp8", 4, 128, 2),
        ("fp8", 4, 128, 4),
        ("fp8", 4, 128, 8),
        ("fp8", 16, 128, 2),
        ("fp8", 2, 64, 8),
        ("int8", 5, 128, 4),
        ("int8", 8, 64, 2),
        ("bf16", 1, 64, 4),
        ("bf16", 7, 128, 8),
        ("bf16", 4, 128, 4),
    ],
)
def test_each_query_has_the_bits_that_it_has_alone(
    kv: str, group: int, head_dim: int, width: int
) -> None:
    """Contexts around the ends of pages and of splits, and some of each query's width."""
    generator = torch.Generator("cuda").manual_seed(0)
    heads, num_pages = 2, 200
    ends = [3, 63, 64, 65, 130, 1020, 1023, 1024, 1025, 1027, 1030, 2047, 2049, 2055, 3000, 0]
    shape = (num_pages * 64, heads, head_dim)
    stored = [
        quantize_kv(torch.randn(shape, device="cuda", generator=generator).bfloat16(), kv)
        for _ in "kv"
    ]
    (k, k_scales), (v, v_scales) = (
        (x.view(num_pages, 64, *x.shape[1:]), None if s is None else s.view(num_pages, 64, heads))
        for x, s in stored
    )
    pages = KeyValueCodes(k, k_scales, v, v_scales)
    counts = [min(1 + i % width, end) for i, end in enumerate(ends)]
    tables = torch.stack(
        [torch.randperm(num_pages, device="cuda", generator=generator)[:48] for _ in ends]
    ).int()
    lengths = torch.tensor(ends, device="cuda").int()
    queries = torch.tensor(counts, device="cuda").int()
    # Rows one after the other, and padding behind them.
    size = sum(counts) + 5
    first = (queries.cumsum(0) - queries).int()
    keys = torch.nn.functional.pad(lengths.repeat_interleave(queries), (0, 5)).int()
    q = torch.randn(size, heads * group, head_dim, device="cuda", generator=generator).bfloat16()
    several = SequenceQueries(queries, first, keys, width)
    together = attend_decode(q, pages, tables, lengths, 3000, queries=several)
    codes = attend_decode_quantized(q, pages, tables, lengths, 3000, queries=several)
    for j in range(width):
        # Query j of each sequence, as decode of one token a forward would attend.
        own = torch.where(queries > j, lengths - queries + 1 + j, 0)
        rows = (first + j).clamp(max=size - 1).long()
        alone = attend_decode(q[rows], pages, tables, own.int(), 3000)
        alone_codes = attend_decode_quantized(q[rows], pages, tables, own.int(), 3000)
        live = queries > j
        assert torch.equal(together[rows][live], alone[live])
        assert torch.equal(
            codes.codes[rows][live].view(torch.uint8), alone_codes.codes[live].view(torch.uint8)
        )
        assert torch.equal(codes.scales[rows][live], alone_codes.scales[live])


def outcome(completions: Any) -> list[Any]:
    return [(c.token_ids, c.logprobs, c.finish_reason) for c in completions]


@pytest.mark.parametrize(
    ("preset", "options"),
    [("unified", {}), ("unified", {"kv": "int8"}), ("jet", {})],
    ids=["unified", "int8", "jet"],
)
@pytest.mark.parametrize("filtered", [{}, {"top_p": 0.9, "top_k": 40}], ids=["all", "filtered"])
def test_the_engine_draws_the_same(
    preset: str, options: dict[str, Any], filtered: dict[str, Any]
) -> None:
    """Own and sibling text, then the known text, then nonsense for drafts; contexts over 1024."""
    plan = PrecisionPlan.preset(preset).replace(**options)
    policy = Policy.from_config(CONFIG, plan, seed=0, device="cuda")
    prompts = [*random_prompts(policy, 5, 60, seed=3), [5] * 1000]
    params = SamplingParams(n=4, max_tokens=90, seed=1, temperature=0.5, **filtered)
    expected = outcome(RolloutEngine(policy).generate(prompts, params))
    for mode in ("text", "auto"):
        engine = RolloutEngine(policy, speculation=mode)
        for _ in range(2):
            assert outcome(engine.generate(prompts, params)) == expected
        drafts = engine.stats.speculation
        assert drafts is not None
        assert drafts.accepted[2] > 0, "the call before is known"
        text = engine._pool.speculation.text
        text.text.random_(-1, CONFIG["vocab_size"])
        text.tables.random_(-1, len(text.text))
        assert outcome(engine.generate(prompts, params)) == expected


def test_few_pages_and_a_batch_of_one_draw_the_same() -> None:
    policy = Policy.from_config(CONFIG, PrecisionPlan.preset("unified"), seed=0, device="cuda")
    prompts = random_prompts(policy, 6, 100, seed=3)
    params = SamplingParams(n=3, max_tokens=200, seed=1, temperature=0.4, ignore_eos=True)
    expected = outcome(RolloutEngine(policy).generate(prompts, params))
    for sizes in ({"num_pages": 12}, {"max_batch_size": 1}, {"max_batch_size": 5}):
        engine = RolloutEngine(policy, speculation="text", **sizes)
        assert outcome(engine.generate(prompts, params)) == expected
        assert "num_pages" not in sizes or engine.stats.preemptions > 0


def test_no_kernel_stores_behind_its_buffers() -> None:
    assert overruns(torch.device("cuda")) == []


@pytest.fixture
def fewest_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes its narrowest choice."""
    monkeypatch.setattr("jetrl.rollout.draft_widths._Times.known", lambda *_: True)
    monkeypatch.setattr(DraftWidths, "_fastest", lambda _, size, __: choices(size)[0])


def siblings(mode: str, batch: int, beyond: int) -> None:
    """Samples of one prompt, the last of which enter in the very step that decodes them."""
    policy = Policy.from_config(CONFIG, PrecisionPlan.preset("unified"), seed=0, device="cuda")
    params = SamplingParams(n=batch + beyond, max_tokens=3, seed=11, ignore_eos=True)
    plain = RolloutEngine(policy, max_batch_size=batch)
    expected = outcome(plain.generate([[3, 7, 5]], params))
    head = DraftHead(policy, 3, 0)
    head.trained = True  # Its drafts are noise.
    engine = RolloutEngine(policy, max_batch_size=batch, speculation=mode, draft_head=head)
    assert outcome(engine.generate([[3, 7, 5]], params)) == expected
    assert engine.stats.speculation is not None
    assert engine.stats.speculation.sequence_forwards >= params.n


@pytest.mark.usefixtures("fewest_rows")
@pytest.mark.parametrize("mode", ["text", "head", "auto"])
@pytest.mark.parametrize("beyond", [17, 63, 129, 255])
def test_siblings_beyond_the_batch_draw_the_same(mode: str, beyond: int) -> None:
    siblings(mode, 256, beyond)


@pytest.mark.usefixtures("fewest_rows")
def test_siblings_beyond_the_batch_small() -> None:
    """Quick enough for compute-sanitizer."""
    siblings("auto", 32, 17)
