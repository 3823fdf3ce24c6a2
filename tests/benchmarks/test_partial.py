"""The benchmark of partial rollouts, tried out on the CPU."""

from __future__ import annotations

import pytest
from benchmarks.harness import Load
from benchmarks.parity import make_policy

from benchmarks import partial


def test_what_is_carried_over_is_drawn_before_it_is_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partial, "_LOAD", Load(3, 2, 5, 24))
    policy = make_policy("tiny", "unified", "cpu", None)
    *whole, total = partial.run(policy, share=0.0, steps=2, prompts_per_step=3, mean=8)
    assert [row["drawn"] for row in whole] == [row["tokens"] for row in whole]
    assert [row["prefilled"] for row in whole] == [15, 15]
    assert total["tokens"] == whole[1]["tokens"]
    *ahead, total = partial.run(policy, share=1.0, steps=3, prompts_per_step=3, mean=8)
    drawn, given = (sum(row[name] for row in ahead) for name in ("drawn", "tokens"))
    assert drawn > given, "the stock is on its way"
    assert ahead[1]["prefilled"] > 15, "what was cut off is prefilled again"
    assert total["tokens"] == ahead[1]["tokens"] + ahead[2]["tokens"]
