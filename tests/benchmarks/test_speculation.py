"""The benchmark of speculation, tried out on the CPU, and what it measures with."""

from __future__ import annotations

from benchmarks.loads import load_text
from benchmarks.policies import make_policy
from benchmarks.speculation import Drafting, run_case


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
    # One row for a draft, which is right: three tokens in each forward of two sequences.
    assert 1.3 < fixed[1]["tokens_per_forward"] <= 2.0
