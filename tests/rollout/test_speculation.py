"""Speculation changes no token and no log-prob, whatever the drafts are, and says what it brought.

`test_naive_sampler.py` has random calls with every option, `test_scheduler.py` random schedules.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jetrl.errors import UserError
from jetrl.rollout.draft_widths import DraftWidths
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.options import GenerateOptions
from jetrl.rollout.partial import Partial
from jetrl.rollout.progress import SpeculationStats
from jetrl.rollout.speculation import Speculation
from jetrl.runs.metrics import check_metrics
from jetrl.session.step_metrics import speculation_metrics
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
    text = engine._pool._speculation.text
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


def test_what_an_earlier_call_cut_off_goes_on_with_the_same_tokens(policy):
    engine = RolloutEngine(policy, page_size=4, max_batch_size=4)
    engine.generate(PROMPTS, PARAMS, options=GenerateOptions(partial=Partial(enough=1)))
    assert engine.unfinished
    resume = [[cut] for cut in engine.unfinished.values()]
    options = GenerateOptions(partial=Partial(9, resume, 1))
    expected = engine.generate(PROMPTS, PARAMS, options=options)
    for mode in ("text", "auto"):
        assert speculating(policy, mode).generate(PROMPTS, PARAMS, options=options) == expected


def test_a_mode_that_there_is_not_is_refused(policy):
    with pytest.raises(UserError, match="speculation 'fast': one of off, text, head, auto"):
        RolloutEngine(policy, speculation="fast")


def test_the_archive_goes_round(policy):
    """Each completion that has ended is found, until newer ones lie over it."""
    speculation = Speculation("text", 2, 50, torch.device("cpu"))
    text = speculation.text
    room = len(text.text) - text.archive_start
    for number in range(7):
        length = room // 3
        sequence = SimpleNamespace(prompt=(1, 2), generated=[10 + number] * length)
        speculation.ended(sequence)
        speculation.begin()
    archive = text.text[text.archive_start :]
    assert {10 + 5, 10 + 6} <= set(archive.tolist()) <= {-1, 1, 2, 13, 14, 15, 16}


def observed(widths, rows, width, seconds, hit, forwards=8, head=False):
    """Steps in which the first token of each draft is right by a share, and the others after it."""
    count = 100
    hits = (np.arange(count) < hit * count).astype(int)
    for _ in range(30):
        drafted = np.full(count, width - 1)
        drawn = 1 + hits * (width - 1)
        offered, by_head = hits | 1, np.full(count, head)
        took = seconds * forwards
        widths.observe(rows, width, forwards, took, drawn, drafted, hits, offered, by_head)


def test_widths_follow_what_drafts_are_worth():
    widths = DraftWidths(always=False)
    assert widths.choose(8) == 1, "how long a forward takes is not known"
    observed(widths, 8, 1, 3.0, 0.0)
    assert widths.choose(8) == 1, "no draft is right"
    observed(widths, 8, 1, 3.0, 0.9)
    assert widths.choose(8) == 2, "a trial"
    observed(widths, 8, 2, 3.1, 0.9)
    assert widths.choose(8) == 4
    observed(widths, 8, 4, 3.2, 0.9)
    assert widths.choose(8) == 8
    observed(widths, 8, 8, 30.0, 0.9)
    assert widths.choose(8) == 4, "too slow"
    observed(widths, 8, 4, 3.2, 0.01)
    assert widths.choose(8) == 1, "for one in a hundred it does not pay"


def test_a_large_batch_whose_forwards_grow_by_each_row_verifies_nothing():
    widths = DraftWidths(always=False)
    widths.captured(256, 1, 6.0)
    widths.captured(256, 2, 11.0)
    observed(widths, 250, 1, 7.4, 0.6)
    assert widths.choose(250) == 1
    assert widths.choose(2000) == 1


def test_text_always_verifies():
    widths = DraftWidths(always=True)
    assert [widths.choose(n) for n in (1, 32, 33, 64, 65, 500)] == [8, 8, 4, 4, 2, 2]


def test_the_widths_of_a_head_end_at_its_longest_draft():
    longest = [max(DraftWidths(True, 1 + n).choose(1) for _ in range(2)) for n in (1, 2, 3, 4, 7)]
    assert longest == [2, 4, 4, 8, 8]


def test_a_head_that_is_not_asked_is_asked_once_in_a_while():
    widths = DraftWidths(always=False)
    observed(widths, 8, 1, 3.0, 0.0)
    assert [widths.choose(8) for _ in range(100)] == [1] * 100, "no head"
    widths.head_tokens = 3
    chosen = [widths.choose(8) for _ in range(100)]
    assert chosen[0] == 2
    assert 2 <= chosen.count(2) <= 4
    assert set(chosen) == {1, 2}
    assert [widths.choose(200) for _ in range(100)] == [1] * 100, "of hundreds of sequences never"
    observed(widths, 8, 2, 3.1, 0.9, head=True)
    assert widths.choose(8) == 4
    observed(widths, 8, 4, 3.2, 0.9, head=True)
    observed(widths, 8, 1, 3.0, 0.0)
    assert widths.choose(8) == 4, "steps without drafts say nothing of the head"
    observed(widths, 8, 8, 3.2, 0.0)
    observed(widths, 8, 4, 3.2, 0.9, head=True)
    assert widths.choose(8) == 4, "a draft of the head has three tokens"
