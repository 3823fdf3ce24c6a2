"""Runs that collapsed or fell behind are counted, and the counts of arms compared exactly."""

from __future__ import annotations

import math

import pytest
from benchmarks.study.analysis import ALL_POINTS, lost_names, lost_runs
from benchmarks.study.definition import Definition, definition_of
from benchmarks.study.results import RunResult
from benchmarks.study.statistics import fisher_p, least_shown, runs_needed
from benchmarks.study.tables import lost_table, seed_tables
from tests.study.test_analysis import RISES, definition, run


@pytest.mark.parametrize(
    ("counts", "p"),
    [
        ((3, 4, 1, 4), 34 / 70),  # Fisher's tea: 1 + 16 of 70 tables on each side
        ((4, 4, 0, 4), 2 / 70),
        ((8, 10, 1, 6), 400 / 11440),  # 270, 10 and, on the other side, 120 of C(16, 9) tables
        ((0, 5, 0, 5), 1.0),
        ((5, 5, 5, 5), 1.0),
        ((1, 4, 0, 5), 4 / 9),
    ],
)
def test_fishers_test_is_that_of_tables_counted_by_hand(
    counts: tuple[int, int, int, int], p: float
) -> None:
    n, m = counts[:2], counts[2:]
    assert fisher_p(*counts) == pytest.approx(p, rel=1e-12)
    assert fisher_p(*m, *n) == pytest.approx(p, rel=1e-12)


def test_the_runs_that_are_needed_have_the_power() -> None:
    """An arm loses 2 runs of 7, beside one that never loses: 27 runs show it 4 times of 5."""

    def power(n: int, share: float) -> float:
        least = least_shown(n, 0, n, 0.95)
        assert least is not None
        counts = range(least, n + 1)
        return sum(math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in counts)

    assert runs_needed(2 / 7, 0.0, 0.95) == 27
    assert power(26, 2 / 7) < 0.8 <= power(27, 2 / 7)
    assert runs_needed(1.0, 0.0, 0.95) == 4
    assert runs_needed(0.3, 0.3, 0.95) is None
    assert runs_needed(0.011, 0.01, 0.95) is None  # more than are named


def made_up() -> tuple[Definition, list[RunResult]]:
    """The reference ends at 94, 90 and 60%; the other arm has a collapse, one behind, one sound."""
    study = definition()
    fallen = [*RISES[:-1], 0.1]
    runs = [run("short", "bf16", s, a, RISES) for s, a in enumerate((0.94, 0.9, 0.6))]
    runs += [run("short", "mixed", 0, 0.57, RISES), run("short", "mixed", 1, 0.93, fallen)]
    runs += [run("short", "mixed", 2, 0.801, RISES)]
    return study, runs


def test_a_run_is_behind_by_the_median_of_the_reference() -> None:
    study, runs = made_up()
    assert lost_names(study, runs) == {
        "short-bf16-s2": "behind",
        "short-mixed-s0": "behind",
        "short-mixed-s1": "collapsed",
    }
    wider = definition_of({**study.tree, "collapse": {"behind": 0.35}}, study.source)
    assert lost_names(wider, runs) == {"short-mixed-s1": "collapsed"}
    without_reference = [one for one in runs if one.arm == "mixed"]
    assert lost_names(study, without_reference) == {"short-mixed-s1": "collapsed"}


def test_lost_runs_are_compared_with_the_references() -> None:
    study, runs = made_up()
    runs += [run("long", "mixed", 0, None, end="nonfinite")]
    counts = {(one.point, one.arm): one for one in lost_runs(study, runs)}
    assert list(counts) == [
        ("short", "bf16"),
        ("short", "mixed"),
        ("long", "mixed"),
        (ALL_POINTS, "bf16"),
        (ALL_POINTS, "mixed"),
    ]
    mixed = counts["short", "mixed"]
    assert (mixed.num_runs, mixed.num_collapsed, mixed.num_behind) == (3, 1, 1)
    assert mixed.p == pytest.approx(fisher_p(2, 3, 1, 3))
    assert counts["long", "mixed"].p != counts["long", "mixed"].p, "no reference: no test"
    everywhere = counts[ALL_POINTS, "mixed"]
    assert (everywhere.num_lost, everywhere.num_runs) == (3, 4)


def test_the_tables_say_which_runs_were_lost_and_what_that_shows() -> None:
    study, runs = made_up()
    table = lost_table(study, list(lost_runs(study, runs)))
    assert table is not None
    assert "more than 10 points below the median of bf16" in table.note
    assert "Beside 3 runs without a loss it takes more than 3 for a p below 0.05." in table.note
    reference, mixed = table.rows
    assert list(reference) == ["short", "bf16", "3", "0", "1", "33.33% [0.84, 90.57]", *"---"]
    assert list(mixed)[:8] == [
        *("short", "mixed", "3", "1", "1", "66.67% [9.43, 99.16]", "1.000", "1.000"),
    ]
    assert mixed[8].startswith("not shown; ")
    assert mixed[8].endswith(" runs would do")
    (seeds,) = seed_tables(study, runs, lost_names(study, runs))
    assert [list(row) for row in seeds.rows] == [
        ["bf16", "94.0%", "90.0%", "60.0%, behind"],
        ["mixed", "57.0%, behind", "93.0%, collapsed", "80.1%"],
    ]
