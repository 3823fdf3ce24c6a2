"""Effects in log-odds, losses and their family of tests, from results that are made up."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from benchmarks.study import effects
from benchmarks.study.results import Curves, Results, RunResult
from benchmarks.study.statistics import rank_estimate
from tests.study.test_analysis import definition, run

from jetrl.errors import UserError


def made_up(*runs: RunResult) -> Results:
    study = definition()
    tree = study.tree | {
        "study": {**study.tree["study"], "seeds": list(range(8))},
        "arms": {"bf16": {}, "mixed": {"precision": {"preset": "mixed"}}},
    }
    return Results(Path("made-up.json"), "", tree, runs={one.name: one for one in runs})


def rows(*runs: RunResult) -> list[effects.Row]:
    return list(effects.rows_of(made_up(*runs)))


def test_rank_estimates_by_hand() -> None:
    """With six pairs only 2 of 64 signs are as far out as all of one sign: 0.03 is below 0.05."""
    assert rank_estimate([1, 2, 3, 4, 5, 6]) == (3.5, 1, 6)
    assert rank_estimate([1, 2, 3, 4, 5]) == (3, -math.inf, math.inf)


def test_none_and_all_right_have_finite_log_odds() -> None:
    """Half an answer on each side: 0 of 10 are odds of 1 to 21, and 10 of 10 of 21 to 1."""
    ends = [run("short", arm, s, end) for arm, end in (("bf16", 1), ("mixed", 0)) for s in range(6)]
    _, row = rows(*ends)
    expected = pytest.approx(-2 * math.log(21))
    assert (row["log_odds"], row["log_odds_low"], row["log_odds_high"]) == (expected,) * 3
    assert row["points"] == -100
    assert (row["pairs"], row["lost"], row["runs"]) == (6, 6, 6)
    assert (row["p"], row["lost_p"]) == pytest.approx((2 / 64, 2 / math.comb(12, 6)))
    with pytest.raises(UserError, match=r"bf16-s0 ends with a mean reward of 2: log-odds need"):
        rows(run("short", "bf16", 0, 2.0), run("short", "mixed", 0, 0.5))


def test_a_gain_leaves_out_what_was_there_at_the_start() -> None:
    """The runs end with 8 and 6 of ten answers right, and began with 40 and 20%."""
    ends = {"bf16": (0.4, 0.8), "mixed": (0.2, 0.6)}
    runs = [
        run("short", arm, s, end, held_out=Curves(steps=[0], values={"mean": [start]}))
        for arm, (start, end) in ends.items()
        for s in range(6)
    ]
    _, row = rows(*runs)
    ended = math.log(6.5 / 4.5) - math.log(8.5 / 2.5)
    assert row["log_odds"] == pytest.approx(ended)
    started = math.log(0.2 / 0.8) - math.log(0.4 / 0.6)
    assert [row[f"gain{end}"] for end in ("", "_low", "_high")] == [
        pytest.approx(ended - started)
    ] * 3


def test_the_family_has_the_tests_that_could_show_something() -> None:
    """Five pairs cannot, nor can three lost of eight and none of eight; six pairs of ranks can."""
    runs = [run("short", arm, s, 0.9) for arm in ("bf16", "mixed") for s in range(5)]
    runs += [run("long", "bf16", s, 0.9) for s in range(8)]
    runs += [run("long", "mixed", s, 0.5 if s < 3 else 0.8 + s / 100) for s in range(8)]
    found = rows(*runs)
    assert effects.adjust(found) == 1
    few, many = found[1], found[3]
    assert "p" not in few
    assert "log_odds_low" not in few
    assert (many["lost"], many["p"], many["p_adjusted"]) == (3, 2 / 256, 2 / 256)
    assert many["lost_p"] == pytest.approx(2 * 56 / 560)
    assert "lost_p_adjusted" not in many
    text = effects.tables(found, 1)
    assert "With 8 pairs no adjusted p of an effect is below 0.0078. Fewer than 6 pairs" in text
    assert "made-up: accuracy under the study's precision" in text
    assert "| made-up: long | mixed | 8 |" in text


def test_pairs_share_seed_and_first_weights() -> None:
    starts = {"bf16": "aaa", "mixed": "abb"}
    runs = [
        run("short", arm, s, 0.5, start_sha256=sha[s])
        for arm, sha in starts.items()
        for s in (0, 1)
    ]
    assert rows(*runs)[1]["pairs"] == 1


def test_time_leaves_out_evaluations_and_tenths_are_of_the_kept_curve() -> None:
    seconds = {"step": 20.0, "rollout": 4.0, "update": 3.0, "eval": 9.0, "checkpoint": 1.0}
    (row,) = rows(run("short", "bf16", 0, 0.5, [float(i) for i in range(20)], seconds=seconds))
    assert (row["rollout_s"], row["update_s"], row["rest_s"]) == (4, 3, 3)
    assert row["rollout_share"] == 0.4
    assert (row["reward_first"], row["reward_last"]) == (0.5, 18.5)


def test_the_figure_has_a_mark_per_row_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    kls = {"bf16": 0.0, "mixed": 1e-3}
    runs = [
        run("short", arm, s, 0.5, [0.5], curves={effects.MISMATCH: [kl]})
        for arm, kl in kls.items()
        for s in range(8)
    ]
    files = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for file in files:
        effects.draw(rows(*runs), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    text = files[0].read_text()
    there = [effects.FLOWS[flow][0] in text for flow in effects.FLOWS]
    assert there == [flow in ("exact", "mixed") for flow in effects.FLOWS]
