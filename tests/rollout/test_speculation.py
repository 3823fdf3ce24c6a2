"""Speculation changes no token and no log-prob, whatever the drafts are, and says what it brought.

`test_naive_sampler.py` has random calls with every option, `test_scheduler.py` random schedules.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.rollout.test_head_drafts import trained_head

from jetrl.kernels.decode import share_rows
from jetrl.rollout.draft_widths import DraftWidths, DraftWorth, Width, choices
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.options import SpeculationStats
from jetrl.rollout.sizes import padded_batch
from jetrl.rollout.speculation import Speculation
from jetrl.runs.metrics import check_metrics
from jetrl.session.step import speculation_metrics
from jetrl.types import SamplingParams

PROMPTS = [[5, 6, 7], [9] * 17, [11, 12, 13, 14]]
# Nearly greedy: the tiny model then repeats itself, and its samples each other.
PARAMS = SamplingParams(n=3, max_tokens=40, temperature=0.3, stop_token_ids=(33, 34, 35), seed=7)


def speculating(policy, mode="text", **options):
    engine = RolloutEngine(policy, page_size=4, speculation=mode, **options)
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


def test_metrics_are_sums_over_calls_and_sources():
    assert speculation_metrics(None) == {}
    calls = SpeculationStats(100, 250, (10, 0, 90, 0), (5, 0, 60, 0), 4.0, 3.0)
    metrics = speculation_metrics(calls.plus(calls))
    assert metrics == check_metrics(metrics)
    assert metrics == {
        "speculation/tokens_per_forward": 2.5,
        "speculation/verify_share": 0.75,
        "speculation/acceptance_self": 0.5,
        "speculation/acceptance_earlier": 60 / 90,
    }


def test_text_is_kept_when_the_pages_are_given_back(policy, plain):
    engine = speculating(policy)
    engine.generate(PROMPTS, PARAMS)
    engine.free_cache()
    assert engine.generate(PROMPTS, PARAMS) == plain
    assert engine.stats.speculation.accepted[2] > 0


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


def test_few_pages_change_nothing(policy, plain):
    engine = speculating(policy, num_pages=16)
    assert engine.generate(PROMPTS, PARAMS) == plain
    assert engine.stats.preemptions > 0
    assert engine.stats.peak_pages <= 16


def test_the_archive_goes_round(policy):
    """Each completion that has ended is found, until newer ones lie over it."""
    speculation = Speculation("text", 2, 50, torch.device("cpu"))
    text = speculation.text
    room = len(text.text) - text.archive_start
    for number in range(7):
        length = room // 3
        sequence = SimpleNamespace(prompt=(1, 2), generated=[10 + number] * length)
        speculation.ended(sequence)
        speculation.put_by()
    archive = text.text[text.archive_start :]
    assert {10 + 5, 10 + 6} <= set(archive.tolist()) <= {-1, 1, 2, 13, 14, 15, 16}


class Drawn:
    """Choices drawn at random: widths, rows from one a sequence on, and with or without drafts."""

    def __init__(self, widths, rows):
        self.generator, self.widths, self.rows = np.random.default_rng(3), widths, rows
        self.worth = DraftWorth()
        self.chosen = set()

    def begin(self):
        pass

    def choose(self, sequences):
        size, most = padded_batch(sequences), int(self.generator.choice(self.widths))
        rows = size + int(self.generator.integers(0, self.rows + 1))
        drafts = bool(self.generator.integers(0, 3))
        width = Width(most, min(rows, size * most) if most > 1 else size, most > 1 or drafts)
        self.chosen.add((width.most, width.drafts))
        return width

    def observe(self, **_):
        pass


@pytest.mark.parametrize("rows", [0, 3, 64])
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


@pytest.mark.parametrize("mode", ["text", "head", "auto"])
@pytest.mark.parametrize("beyond", [17, 65, 255])
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


def test_rows_for_drafts_go_where_they_are_most_likely_right():
    def shared(wanted, quality, extra, turn=0):
        drafted = share_rows(torch.tensor(wanted), torch.tensor(quality), extra, turn)
        assert drafted.sum() <= extra
        return drafted.tolist()

    assert shared([7, 7, 7], [256, 256, 256], 21) == [7, 7, 7]
    assert shared([7, 0, 2], [256, 256, 256], 9) == [7, 0, 2]
    assert shared([7, 7, 7], [192, 192, 192], 6) == [2, 2, 2], "first all first tokens"
    # One token more than rows for it: another sequence's each time.
    assert sorted(tuple(shared([7, 7, 7], [192] * 3, 4, turn)) for turn in range(3)) == [
        (1, 1, 2),
        (1, 2, 1),
        (2, 1, 1),
    ]
    assert shared([7, 7, 7], [250, 100, 0], 4) == [4, 0, 0]
    assert shared([7, 7, 7], [250, 200, 100], 11) == [7, 3, 1]
    assert shared([7, 7], [0, 0], 100) == [3, 3], "no more of what is always wrong"
    assert shared([7, 7], [0, 256], 0) == [0, 0]


def observed(widths, sequences, most, rows, seconds, hit, steps=30, forwards=8, head=False):
    """Steps in which the first token of each draft is right by a share, and the others after it."""
    count = 100
    hits = (np.arange(count) < hit * count).astype(int)
    width = Width(most, rows, True)
    for _ in range(steps):
        drafted = np.full(count, most - 1)
        drawn = 1 + hits * (most - 1)
        times = {"forwards": forwards, "seconds": seconds * forwards}
        what = {"drawn": drawn, "drafted": drafted, "hit": hits, "offered": hits | 1}
        widths.observe(sequences, width, **times, **what, by_head=np.full(count, head))


def chosen(widths, sequences):
    width = widths.choose(sequences)
    return width.most, width.rows


def test_widths_follow_what_drafts_are_worth():
    widths = DraftWidths(always=False)
    assert chosen(widths, 8) == (1, 8), "how long a forward takes is not known"
    observed(widths, 8, 1, 8, 3.0, 0.0)
    assert chosen(widths, 8) == (1, 8), "no draft is right"
    observed(widths, 8, 1, 8, 3.0, 0.9)
    assert chosen(widths, 8) == (2, 16), "a trial"
    observed(widths, 8, 2, 16, 3.1, 0.9, 2)
    assert chosen(widths, 8) == (4, 32)
    observed(widths, 8, 4, 32, 3.2, 0.9, 2)
    assert chosen(widths, 8) == (8, 64)
    observed(widths, 8, 8, 64, 30.0, 0.9, 2)
    assert chosen(widths, 8) == (4, 32), "too slow"
    observed(widths, 8, 1, 8, 3.0, 0.01)
    assert chosen(widths, 8) == (1, 8), "for one in a hundred it does not pay"


def test_longer_contexts_change_no_choice():
    """The seconds of a choice that ran when contexts were short say little later."""
    widths = DraftWidths(always=False)
    observed(widths, 64, 1, 64, 4.0, 0.5, 2)
    observed(widths, 64, 2, 128, 7.0, 0.5, 2)
    assert chosen(widths, 64) == (1, 64), "3 more is too much of 4"
    observed(widths, 64, 1, 64, 12.0, 0.5, 12)
    assert chosen(widths, 64)[0] > 1, "3 more is little of 12"
    observed(widths, 64, 2, 128, 15.0, 0.5, 2)
    # All take longer and longer: the forwards that verify say so too.
    for step in range(50):
        observed(widths, 64, 2, 128, 15.0 + 0.2 * step, 0.5, 1)
        assert widths._times.plain[64] <= 13.0 + 0.2 * step
    assert widths._times.plain[64] > 20.0


def test_a_new_call_is_not_compared_with_the_end_of_the_one_before():
    """A forward at the end of the last call took longer, since its contexts were long."""
    widths = DraftWidths(always=False)
    observed(widths, 64, 1, 64, 12.0, 0.7, 2)
    observed(widths, 64, 2, 128, 14.0, 0.7, 3)
    assert chosen(widths, 64)[0] > 1
    widths.begin()
    assert chosen(widths, 64) == (1, 64), "how long a forward takes is not known"
    observed(widths, 64, 1, 64, 4.0, 0.7, 1)
    assert widths._times.extra_of(64, 2, 128) == pytest.approx(2.0)
    observed(widths, 64, 2, 128, 6.1, 0.7, 1)
    observed(widths, 32, 1, 32, 2.0, 0.7, 1)  # of another number of sequences
    assert widths._times.extra_of(64, 2, 128) == pytest.approx(2.05)


def test_a_step_without_drafts_comes_again_and_again():
    widths = DraftWidths(always=False)
    observed(widths, 8, 1, 8, 3.0, 0.9, 2)
    most = []
    for _ in range(200):
        width = widths.choose(8)
        most.append(width.most)
        observed(widths, 8, width.most, width.rows, 3.0 + width.rows / 1000, 0.9, 1)
    assert max(most) == 8
    assert 2 <= most.count(1) <= 4


def test_drafts_are_looked_up_seldom_where_none_is_verified():
    widths = DraftWidths(always=False)
    looked_up = []
    for _ in range(100):
        width = widths.choose(256)
        looked_up.append(width.drafts)
        none = np.zeros(0, dtype=int)
        widths.observe(256, width, 8, 56.0, none, none, none, none, none)
    assert looked_up[:4] == [True] * 4
    assert 10 <= sum(looked_up[4:]) <= 14


def test_the_widths_of_a_head_end_at_its_longest_draft():
    longest = [DraftWidths(True, 1 + n).choose(1).most for n in (1, 2, 3, 4, 7)]
    assert longest == [2, 4, 4, 8, 8]


def test_a_head_that_is_not_asked_is_asked_once_in_a_while():
    widths = DraftWidths(always=False)
    observed(widths, 8, 1, 8, 3.0, 0.0)
    assert {widths.choose(8).most for _ in range(100)} == {1}, "no head"
    widths.worth.head_tokens = 3
    most = [widths.choose(8).most for _ in range(100)]
    assert most[0] == 2
    assert 2 <= most.count(2) <= 4
    assert set(most) == {1, 2}
    assert {widths.choose(200).most for _ in range(100)} == {1}, "of hundreds of sequences never"
    observed(widths, 8, 2, 16, 3.1, 0.9, 10, head=True)
    assert chosen(widths, 8) == (4, 32)
    observed(widths, 8, 4, 32, 3.9, 0.9, 10, head=True)
    observed(widths, 8, 1, 8, 3.0, 0.0)
    assert chosen(widths, 8) == (4, 32), "steps without drafts say nothing of the head"
