"""The benchmark of speculation, tried out on the CPU, and what it measures with."""

from __future__ import annotations

import numpy as np
import torch
from benchmarks.harness import load_text
from benchmarks.parity import make_policy
from benchmarks.speculation import Drafting, KnownDrafts, run_case
from benchmarks.verify import forms

from jetrl.rollout.draft_widths import Width, choices
from jetrl.types import Completion


def test_drafts_of_known_quality_bring_tokens_and_change_none() -> None:
    policy = make_policy("tiny", "unified", "cpu", 1)
    drafting = Drafting([0.0, 1.0], mode="text", fixed=[(2, 1.5)])
    so_far = list(run_case(policy, load_text("1x2x5x12"), drafting))
    _, wrong, right, *fixed = rows = so_far[-1]
    assert [len(found) for found in so_far] == [1, 2, 3, 4, 5]
    assert {(row["different_tokens"], row["different_logprobs"]) for row in rows} == {(0, 0)}
    assert {row["tokens"] for row in rows} == {24}
    assert [row["speculation"] for row in rows] == ["off", "text", "text", "2x1.5", "2x1.5"]
    assert wrong["tokens_per_forward"] == 1.0
    assert right["tokens_per_forward"] > 5
    # Of the width, as many forwards as there were but the prompt's, with all that was drawn.
    (width,) = right["widths"].values()
    assert width["forwards"] == right["forwards"] - 1
    assert width["tokens"] == right["tokens_per_forward"]
    # One row for a draft, which is right: three tokens in each forward of two sequences.
    assert 1.3 < fixed[1]["tokens_per_forward"] <= 2.0


def test_known_drafts_are_right_by_the_chosen_share() -> None:
    drafts = KnownDrafts(2, 5000, torch.device("cpu"))
    tokens = tuple(range(4000))
    drafts.know([Completion(tokens, (0.0,) * 4000, "length", "")], 0.7, 4001)
    share = float(np.mean(drafts._known[0] == np.array(tokens)))
    assert abs(share - 0.7) < 5 * (0.7 * 0.3 / 4000) ** 0.5


def test_forms_of_a_forward_are_those_that_auto_chooses_from() -> None:
    off, plain, looked_up, *several = forms(60, None)
    assert off is None
    assert (plain, looked_up) == (Width(1, 64, False), Width(1, 64, True))
    assert [(width.most, width.rows) for width in several if width] == choices(64)
    assert forms(8, ["3x3", "8x4"])[3:] == [Width(3, 24, True), Width(8, 32, True)]
