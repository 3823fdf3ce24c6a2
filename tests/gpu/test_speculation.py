"""Speculation on a Hopper GPU: kernels beside their references, no different bit in the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linears import assert_same
from small_models import config, make_policy, outcome
from tests.kernels.interpreted_verify import CASES, differences, overruns

from jetrl import Policy, RolloutEngine, SamplingParams
from jetrl.kernels.attention.decode import attend_decode, attend_decode_quantized
from jetrl.kernels.attention.layout import KeyValueCodes, SequenceQueries
from jetrl.kernels.attention.reference import quantize_kv
from jetrl.kernels.decode_state import HEAD
from jetrl.models.draft_head import DraftHead
from jetrl.precision.formats import number_format
from jetrl.rollout.draft_widths import DraftWidths, choices
from jetrl.session.parity import random_prompts

pytestmark = pytest.mark.gpu

CONFIG = config(vocab_size=500, max_position_embeddings=4096, eos_token_id=7)


@pytest.mark.parametrize("case", [*CASES, (171, 4, 300), (171, 8, 1368), (171, 8, 171)], ids=str)
def test_drafts_and_their_verification_are_the_references(case: tuple[int, int, int]) -> None:
    assert differences(case, torch.device("cuda"))[0] == []


@pytest.mark.parametrize(
    ("kv", "group", "head_dim", "width"),
    [
        ("fp8", 4, 128, 2), ("fp8", 4, 128, 4), ("fp8", 4, 128, 8), ("fp8", 16, 128, 2),
        ("fp8", 2, 64, 8), ("int8", 5, 128, 4), ("int8", 8, 64, 2), ("bf16", 1, 64, 4),
        ("bf16", 7, 128, 8), ("bf16", 4, 128, 4),
    ],
)  # fmt: skip
def test_each_query_has_the_bits_that_it_has_alone(
    kv: str, group: int, head_dim: int, width: int
) -> None:
    """Contexts around the ends of pages and of splits, and some of each query's width."""
    generator = torch.Generator("cuda").manual_seed(0)
    heads, num_pages = 2, 200
    ends = [3, 63, 64, 65, 130, 1020, 1023, 1024, 1025, 1027, 1030, 2047, 2049, 2055, 3000, 0]
    shape = (num_pages * 64, heads, head_dim)
    pages = []
    for _ in "kv":
        x = torch.randn(shape, device="cuda", generator=generator).bfloat16()
        pages += [
            s if s is None else s.view(num_pages, 64, *s.shape[1:])
            for s in quantize_kv(x, number_format(kv))
        ]
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
    stored, several = KeyValueCodes(*pages), SequenceQueries(queries, first, keys, width)
    together = attend_decode(q, stored, tables, lengths, 3000, queries=several)
    codes = attend_decode_quantized(q, stored, tables, lengths, 3000, queries=several)
    for j in range(width):
        # Query j of each sequence, as decode of one token a forward would attend.
        own = torch.where(queries > j, lengths - queries + 1 + j, 0)
        rows = (first + j).clamp(max=size - 1).long()
        alone = attend_decode(q[rows], stored, tables, own.int(), 3000)
        alone_codes = attend_decode_quantized(q[rows], stored, tables, own.int(), 3000)
        live = queries > j
        assert torch.equal(together[rows][live], alone[live])
        assert_same(codes.codes[rows][live], alone_codes.codes[live])
        assert_same(codes.scales[rows][live], alone_codes.scales[live])


def trained_head(policy: Policy) -> DraftHead:
    """A head that counts as one that has learned: its drafts are noise."""
    head = DraftHead(policy, 3, 0)
    head.trained = True
    return head


@pytest.mark.parametrize(
    ("preset", "options"),
    [("unified", {}), ("unified", {"kv": "int8"}), ("unified", {"lm_head": "fp8"}), ("jet", {})],
    ids=["unified", "int8", "fp8-head", "jet"],
)
@pytest.mark.parametrize(
    "filtered", [{}, {"top_p": 0.9, "top_k": 40, "min_p": 0.01}], ids=["all", "filtered"]
)
def test_the_engine_draws_the_same(
    preset: str, options: dict[str, Any], filtered: dict[str, Any]
) -> None:
    """Own and sibling text, then the known text, then nonsense for drafts; contexts over 1024."""
    # 500 is no multiple of a kernel's tile; FP8 takes multiples of 64.
    vocabulary = 512 if options.get("lm_head") == "fp8" else CONFIG["vocab_size"]
    policy = make_policy({**CONFIG, "vocab_size": vocabulary}, preset, **options)
    prompts = [*random_prompts(policy, 5, 60, seed=3), [5] * 1000]
    params = SamplingParams(n=4, max_tokens=90, seed=1, temperature=0.5, **filtered)
    expected = outcome(RolloutEngine(policy).generate(prompts, params))
    head = trained_head(policy)
    for mode, of_head in (("text", None), ("auto", None), ("head", head), ("auto", head)):
        engine = RolloutEngine(policy, speculation=mode, draft_head=of_head)
        for _ in range(2):
            assert outcome(engine.generate(prompts, params)) == expected
        drafts = engine.take_speculation()
        assert drafts is not None
        assert of_head is None or drafts.drafted[HEAD] > 0
        assert of_head is not None or drafts.accepted[2] > 0, "the call before is known"
        if of_head is None:
            text = engine._pool.speculation.text
            text.text.random_(-1, vocabulary)
            text.tables.random_(-1, len(text.text))
            assert outcome(engine.generate(prompts, params)) == expected


@pytest.mark.parametrize("mode", ["text", "head"])
def test_few_pages_and_a_batch_of_one_draw_the_same(mode: str) -> None:
    policy = make_policy(CONFIG)
    prompts = random_prompts(policy, 6, 100, seed=3)
    params = SamplingParams(n=3, max_tokens=200, seed=1, temperature=0.4, ignore_eos=True)
    expected = outcome(RolloutEngine(policy).generate(prompts, params))
    head = trained_head(policy)
    for sizes in ({"num_pages": 12}, {"max_batch_size": 1}, {"max_batch_size": 5}):
        engine = RolloutEngine(policy, speculation=mode, draft_head=head, **sizes)
        assert outcome(engine.generate(prompts, params)) == expected
        assert "num_pages" not in sizes or engine.stats.preemptions > 0


def test_no_kernel_stores_behind_its_buffers() -> None:
    assert overruns(torch.device("cuda")) == []


@pytest.fixture
def fewest_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes its narrowest choice."""
    monkeypatch.setattr("jetrl.rollout.draft_widths._Times.known", lambda *_: True)
    monkeypatch.setattr(DraftWidths, "_fastest", lambda _, size, __: choices(size)[0])


@pytest.mark.usefixtures("fewest_rows")
@pytest.mark.parametrize("mode", ["text", "head", "auto"])
@pytest.mark.parametrize(
    ("batch", "beyond"), [(32, 17), (256, 17), (256, 63), (256, 129), (256, 255)]
)
def test_siblings_beyond_the_batch_draw_the_same(mode: str, batch: int, beyond: int) -> None:
    """Samples of one prompt, the last of which enter in the very step that decodes them."""
    policy = make_policy(CONFIG)
    params = SamplingParams(n=batch + beyond, max_tokens=3, seed=11, ignore_eos=True)
    plain = RolloutEngine(policy, max_batch_size=batch)
    expected = outcome(plain.generate([[3, 7, 5]], params))
    head = trained_head(policy)
    engine = RolloutEngine(policy, max_batch_size=batch, speculation=mode, draft_head=head)
    assert outcome(engine.generate([[3, 7, 5]], params)) == expected
    assert engine.stats.speculation is not None
    assert engine.stats.speculation.sequence_forwards >= params.n
