"""Drafts of a draft head change no token and no log-prob, and say what they brought."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.rollout.conftest import TINY

from jetrl.errors import UserError
from jetrl.kernels.decode_state import HEAD, SOURCES, UNKNOWN, DecodeState, Drafts
from jetrl.models.draft_head import DraftHead, draft_head_shapes
from jetrl.models.policy import Policy
from jetrl.precision.plan import PrecisionPlan
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.options import GenerateOptions, Partial
from jetrl.rollout.speculation import HeadDrafts
from jetrl.types import SamplingParams

PROMPTS = [[5, 6, 7], [9] * 17, [11, 12, 13, 14]]
PARAMS = SamplingParams(n=3, max_tokens=40, temperature=0.3, stop_token_ids=(33, 34, 35), seed=7)


def trained_head(policy, tokens=3, seed=0):
    """A head that counts as one that has learned: its drafts are noise."""
    head = DraftHead(policy, tokens, seed)
    head.trained = True
    return head


class Oracle(DraftHead):
    """A head that knows what the policy draws most likely: the policy itself, on one token."""

    def draft(self, hidden, token_ids, count):
        return token_ids[:, None].expand(-1, count).int()


def speculating(policy, mode="head", head=None, **options):
    head = head or trained_head(policy)
    engine = RolloutEngine(policy, page_size=4, speculation=mode, draft_head=head, **options)
    engine._repeats, engine._ahead = 3, 1
    return engine


@pytest.fixture(scope="module")
def plain(policy):
    return RolloutEngine(policy, page_size=16).generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("mode", ["head", "auto"])
@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_the_guesses_of_a_head_change_nothing(policy, plain, mode, tokens):
    engine = speculating(policy, mode, trained_head(policy, tokens))
    for _ in range(2):
        assert engine.generate(PROMPTS, PARAMS) == plain
    stats = engine.take_speculation()
    assert stats.drafted[HEAD] > 0
    assert stats.accepted[HEAD] <= stats.drafted[HEAD]
    assert (sum(stats.drafted[:HEAD]) > 0) == (mode == "auto"), "text serves auto alone"


def test_guesses_that_are_right_bring_several_tokens_a_forward(policy):
    """A policy that repeats itself, and a head that says that it does."""
    params = dataclasses.replace(PARAMS, temperature=0.0, n=1)
    expected = RolloutEngine(policy, page_size=16).generate(PROMPTS, params)
    head = Oracle(policy, 3, 0)
    head.trained = True
    engine = speculating(policy, head=head)
    assert engine.generate(PROMPTS, params) == expected
    repeats = sum(
        a == b
        for completion in expected
        for a, b in zip(completion.token_ids, completion.token_ids[1:], strict=False)
    )
    assert (engine.stats.speculation.accepted[HEAD] > 0) == (repeats > 1)


def test_a_head_that_has_learned_nothing_is_not_asked(policy, plain):
    engine = speculating(policy, head=DraftHead(policy, 3, 0))
    assert engine.generate(PROMPTS, PARAMS) == plain
    assert sum(engine.stats.speculation.drafted) == 0
    assert engine.stats.speculation.tokens_per_forward == 1


@pytest.mark.parametrize("sizes", [{"num_pages": 16}, {"max_batch_size": 1}, {"max_batch_size": 5}])
def test_few_pages_and_small_batches_change_nothing(policy, plain, sizes):
    engine = speculating(policy, **sizes)
    assert engine.generate(PROMPTS, PARAMS) == plain
    assert "num_pages" not in sizes or engine.stats.preemptions > 0


def test_what_an_earlier_call_cut_off_goes_on_with_the_same_tokens(policy):
    engine = RolloutEngine(policy, page_size=4, max_batch_size=4)
    engine.generate(PROMPTS, PARAMS, options=GenerateOptions(partial=Partial(enough=1)))
    resume = [[cut] for cut in engine.unfinished.values()]
    options = GenerateOptions(partial=Partial(9, resume, 1))
    expected = engine.generate(PROMPTS, PARAMS, options=options)
    for mode in ("text", "head", "auto"):
        assert speculating(policy, mode).generate(PROMPTS, PARAMS, options=options) == expected


def test_modes_are_checked(policy):
    with pytest.raises(UserError, match="speculation 'head' needs a draft head"):
        RolloutEngine(policy, speculation="head")
    with pytest.raises(UserError, match="speculation 'fast': one of off, text, head, auto"):
        RolloutEngine(policy, speculation="fast")


def test_a_row_takes_the_draft_of_the_text_first(policy):
    drafts = HeadDrafts(trained_head(policy), 4)
    drafts.begin()
    state = DecodeState.empty(4, 3, torch.device("cpu"))
    rows = torch.tensor([2, 0, 3])
    drafts._ready[:] = torch.tensor([1, 1, 1, 0])
    nothing = torch.full((3, 7), UNKNOWN, dtype=torch.int32)
    found = torch.tensor([[4, 5, 6, 7, 8, 9, 10]]).int()
    counts = torch.tensor([0, 5, 0]).int()
    text = Drafts(torch.cat([nothing[:1], found, nothing[:1]]), counts, torch.ones(3).int())
    both = drafts.propose(state, rows, 3, text)
    assert both.counts.tolist() == [3, 5, 0], "slot 3 has no hidden state yet"
    assert both.sources.tolist() == [HEAD, 1, 1]
    assert both.tokens[1].tolist() == found[0].tolist()
    assert (both.tokens[0, 3:] == UNKNOWN).all()
    assert (both.tokens[0, :3] >= 0).all()
    alone = drafts.propose(state, rows, 3, None)
    assert alone.counts.tolist() == [3, 3, 0]
    assert alone.sources.tolist() == [HEAD] * 3
    assert torch.equal(alone.tokens[0], both.tokens[0])
    assert SOURCES[HEAD] == "head"


def test_the_head_begins_at_the_state_of_the_last_token_drawn(policy, monkeypatch):
    """A slot's hidden state is the one that the trainer's forward has at that token."""
    head = trained_head(policy)
    seen = []
    draft = head.draft

    def watched(hidden, token_ids, count):
        seen.append((hidden.clone(), token_ids.clone()))
        return draft(hidden, token_ids, count)

    monkeypatch.setattr(head, "draft", watched)
    engine = speculating(policy, head=head)
    engine._repeats, engine._ahead = 1, 0
    params = dataclasses.replace(PARAMS, n=1, ignore_eos=True, stop_token_ids=())
    (completion,) = engine.generate(PROMPTS[:1], params)
    tokens = torch.tensor([*PROMPTS[0], *completion.token_ids])
    with torch.no_grad():
        ends = torch.tensor([0, len(tokens)])
        states = policy.packed_hidden(tokens, ends, torch.arange(len(tokens)))
    found = 0
    for hidden, last in seen:
        places = [
            place
            for place in range(len(PROMPTS[0]), len(tokens))
            if tokens[place] == last[0] and torch.equal(states[place - 1], hidden[0])
        ]
        found += bool(places)
    assert found >= len(seen) - 1, "the first forward has no state"


def test_a_head_knows_the_tokens_that_are_drawn_most(policy, monkeypatch):
    monkeypatch.setattr("jetrl.models.draft_head.KNOWN_TOKENS", 5)
    head = DraftHead(policy, 3, 0)
    assert head.known.tolist() == [0, 1, 2, 3, 4]
    counts = np.zeros(policy.config.vocab_size, dtype=np.int64)
    counts[[50, 7, 60]] = [3, 9, 1]
    addresses = [t.data_ptr() for t in (head.known, head.rows, *head.weights.values())]
    head.know(counts)
    head.round()
    assert head.known.tolist() == [0, 1, 7, 50, 60]
    rows = policy.decoder.lm_head.operand("rollout")
    assert torch.equal(head.rows, rows[[0, 1, 7, 50, 60]])
    guesses = head.draft(torch.randn(9, 128).bfloat16(), torch.arange(9), 4)
    assert set(guesses.flatten().tolist()) <= {0, 1, 7, 50, 60}
    assert [t.data_ptr() for t in (head.known, head.rows, *head.weights.values())] == addresses


@pytest.mark.parametrize(
    ("preset", "options"),
    [("unified", {}), ("unified", {"lm_head": "fp8"}), ("bf16", {}), ("fp32", {})],
    ids=["unified", "fp8-head", "bf16", "fp32"],
)
def test_heads_of_all_plans_read_the_policy_as_it_is(preset, options):
    # FP8 takes rows in blocks of 128.
    config = {**TINY, "vocab_size": 128} if options else TINY
    policy = Policy.from_config(config, PrecisionPlan.preset(preset).replace(**options), seed=0)
    head = trained_head(policy)
    shapes = {name: tuple(master.shape) for name, master in head.masters.items()}
    assert shapes == draft_head_shapes(128)
    logits = policy.rollout_logits(torch.eye(128)[:3].to(policy.weights.dtype))
    product = torch.eye(128)[:3] @ head.rows.float().T
    assert torch.allclose(logits, product, atol=1e-2)
    expected = RolloutEngine(policy, page_size=16).generate(PROMPTS[:1], PARAMS)
    found = speculating(policy, head=head).generate(PROMPTS[:1], PARAMS)
    assert found == expected or not policy.plan.exact
