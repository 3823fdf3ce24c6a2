"""Speculation changes no token and no log-prob, whatever the drafts are, and says what it brought.

`test_naive_sampler.py` has random calls with every option, `test_scheduler.py` random schedules.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from jetrl.errors import UserError
from jetrl.kernels.decode_state import HEAD, UNKNOWN, DecodeState, Drafts
from jetrl.models.draft_head import DraftHead
from jetrl.models.packed import ForwardInputs
from jetrl.rollout.draft_widths import AcceptanceModel, DraftWidths, Width, _Times, choices
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.options import GenerateOptions, Partial
from jetrl.rollout.sizes import padded_batch
from jetrl.rollout.speculation import HeadDrafts
from jetrl.types import SamplingParams

PROMPTS = [[5, 6, 7], [9] * 17, [11, 12, 13, 14]]
# Nearly greedy: the tiny model then repeats itself, and its samples each other.
PARAMS = SamplingParams(n=3, max_tokens=40, temperature=0.3, stop_token_ids=(33, 34, 35), seed=9)


def trained_head(policy, tokens=3, seed=0):
    """A head that counts as one that has learned: its drafts are noise."""
    head = DraftHead(policy, tokens, seed)
    head.trained = True
    return head


def speculating(policy, mode="text", head=None, **options):
    head = head or trained_head(policy)
    engine = RolloutEngine(policy, page_size=4, speculation=mode, draft_head=head, **options)
    engine._repeats, engine._ahead = 3, 1
    return engine


@pytest.fixture(scope="module")
def plain(policy):
    return RolloutEngine(policy, page_size=16).generate(PROMPTS, PARAMS)


def test_text_brings_more_than_a_token_a_forward_and_changes_none(policy, plain):
    engine = speculating(policy)
    assert engine.generate(PROMPTS, PARAMS) == plain
    first = engine.stats.speculation
    assert first.tokens_per_forward > 1.1
    assert min(first.accepted[:2]) > 0, "of the sequence itself, of siblings"
    assert all(a <= d for a, d in zip(first.accepted, first.drafted, strict=True))
    # The same call again: the whole text is known.
    assert engine.generate(PROMPTS, PARAMS) == plain
    assert engine.stats.speculation.tokens_per_forward > first.tokens_per_forward + 1
    assert engine.stats.speculation.accepted[2] > 0
    both = engine.take_speculation()
    assert both.tokens == first.tokens + engine.stats.speculation.tokens
    assert engine.take_speculation() is None


def test_nonsense_for_drafts_changes_nothing(policy, plain, monkeypatch):
    """Random text, and tables that lead anywhere in it."""
    engine = speculating(policy, max_batch_size=4)
    generator = torch.Generator().manual_seed(0)
    text = engine._pool.speculation.text
    text.text.random_(-1, 98, generator=generator)
    text.tables.random_(-1, len(text.text), generator=generator)
    # Whatever stands there counts as the n-gram.
    monkeypatch.setattr("jetrl.kernels.draft.ORDERS", (1, 1))
    assert engine.generate(PROMPTS, PARAMS) == plain
    assert sum(engine.stats.speculation.drafted) > 100


class Drawn:
    """Choices drawn at random: widths, rows from one a sequence on, and with or without drafts."""

    def __init__(self, widths, rows):
        self.generator, self.widths, self.rows = np.random.default_rng(3), widths, rows
        self.acceptance, self.times = AcceptanceModel(), _Times()
        self.chosen = set()

    def choose(self, sequences):
        size, most = padded_batch(sequences), int(self.generator.choice(self.widths))
        rows = size + int(self.generator.integers(0, self.rows + 1))
        drafts = bool(self.generator.integers(0, 3))
        width = Width(most, min(rows, size * most) if most > 1 else size, most > 1 or drafts)
        self.chosen.add((width.most, width.drafts))
        return width

    def observe(self, *_):
        pass


@pytest.mark.parametrize("rows", [0, 3])
def test_any_width_and_any_number_of_rows_draw_the_same(policy, plain, rows):
    engine = speculating(policy)
    widths = engine._pool.speculation.widths = Drawn([1, 2, 3, 4, 8], rows)
    for _ in range(2):
        assert engine.generate(PROMPTS, PARAMS) == plain
    assert {1, 2, 8} <= {most for most, _ in widths.chosen}
    assert engine.stats.speculation.tokens_per_forward > 1.1


@pytest.fixture(scope="module")
def siblings(policy):
    params = SamplingParams(n=256 + 255, max_tokens=3, seed=11, ignore_eos=True)
    return params, RolloutEngine(policy).generate([[3, 7, 5]], params)


@pytest.mark.parametrize(("mode", "beyond"), [("text", 17), ("head", 255), ("auto", 65)])
def test_siblings_that_need_no_prefill_have_rows(policy, siblings, monkeypatch, mode, beyond):
    """When the batch has ended, the rest of a prompt's samples enter in the step that they run."""
    # `auto` takes the fewest rows.
    monkeypatch.setattr("jetrl.rollout.draft_widths._Times.known", lambda *_: True)
    monkeypatch.setattr(DraftWidths, "_fastest", lambda _, size, __: choices(size)[0])
    params, expected = siblings
    params = dataclasses.replace(params, n=256 + beyond)
    engine = RolloutEngine(policy, speculation=mode, draft_head=trained_head(policy))
    assert engine.generate([[3, 7, 5]], params) == expected[: params.n]
    assert engine.stats.speculation.sequence_forwards >= params.n


@pytest.mark.parametrize("mode", ["head", "auto"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_the_guesses_of_a_head_change_nothing(policy, plain, mode, tokens):
    engine = speculating(policy, mode, trained_head(policy, tokens))
    for _ in range(2):
        assert engine.generate(PROMPTS, PARAMS) == plain
    stats = engine.take_speculation()
    assert stats.drafted[HEAD] > 0
    assert stats.accepted[HEAD] <= stats.drafted[HEAD]
    assert mode == "auto" or not any(stats.drafted[:HEAD]), "text serves auto alone"


def test_a_head_that_has_learned_nothing_is_not_asked(policy, plain):
    engine = speculating(policy, "head", head=DraftHead(policy, 3, 0))
    assert engine.generate(PROMPTS, PARAMS) == plain
    assert sum(engine.stats.speculation.drafted) == 0
    assert engine.stats.speculation.tokens_per_forward == 1


def test_few_pages_change_nothing(policy, plain):
    engine = speculating(policy, "head", num_pages=16)
    assert engine.generate(PROMPTS, PARAMS) == plain
    assert engine.stats.preemptions > 0


def test_what_an_earlier_call_cut_off_goes_on_with_the_same_tokens(policy):
    engine = RolloutEngine(policy, page_size=4, max_batch_size=4)
    engine.generate(PROMPTS, PARAMS, options=GenerateOptions(partial=Partial(enough=1)))
    resume = [[cut] for cut in engine.unfinished.values()]
    options = GenerateOptions(partial=Partial(9, resume, 1))
    expected = engine.generate(PROMPTS, PARAMS, options=options)
    for mode in ("head", "auto"):
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
    alone = drafts.propose(state, rows, 3, None)
    assert alone.counts.tolist() == [3, 3, 0]
    assert torch.equal(alone.tokens[0], both.tokens[0])


def test_the_head_begins_at_the_state_of_the_last_token_drawn(policy, monkeypatch):
    head = trained_head(policy)
    seen = []
    draft = head.draft

    def watched(hidden, token_ids, count):
        seen.append((hidden.clone(), token_ids.clone()))
        return draft(hidden, token_ids, count)

    monkeypatch.setattr(head, "draft", watched)
    engine = speculating(policy, "head", head=head)
    engine._repeats, engine._ahead = 1, 0
    params = dataclasses.replace(PARAMS, n=1, ignore_eos=True, stop_token_ids=())
    (completion,) = engine.generate(PROMPTS[:1], params)
    tokens = torch.tensor([*PROMPTS[0], *completion.token_ids])
    with torch.no_grad():
        ends = torch.tensor([0, len(tokens)])
        states = policy.packed_hidden(
            ForwardInputs.packed(tokens, ends), ends, torch.arange(len(tokens))
        )
    found = 0
    for hidden, last in seen:
        places = [
            place
            for place in range(len(PROMPTS[0]), len(tokens))
            if tokens[place] == last[0] and torch.equal(states[place - 1], hidden[0])
        ]
        found += bool(places)
    assert found >= len(seen) - 1, "the first forward has no state"
