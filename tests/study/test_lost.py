"""Runs that collapsed or fell behind are counted, and the counts of arms compared exactly."""

from __future__ import annotations

import math
from typing import Any

import pytest
from benchmarks.study.analysis import ALL_POINTS
from benchmarks.study.charts import curve_charts
from benchmarks.study.counts import fisher_p, least_shown, runs_needed
from benchmarks.study.definition import Definition, definition_of
from benchmarks.study.lost import lost_names, lost_runs
from benchmarks.study.lost_tables import lost_table, seed_tables
from benchmarks.study.results import RunResult
from benchmarks.study.tables import accuracy_name
from matplotlib.figure import Figure
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


def test_the_least_count_that_is_shown_is_on_the_edge() -> None:
    for n in range(1, 21):
        least = least_shown(n, 0, n, 0.95)
        shown = [count for count in range(1, n + 1) if fisher_p(count, n, 0, n) < 0.05]
        assert least == (shown[0] if shown else None)
    assert [least_shown(n, 0, n, 0.95) for n in (3, 4, 5, 10)] == [None, 4, 4, 5]
    assert least_shown(5, 5, 5, 0.95) is None


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


def test_an_arm_that_loses_more_is_said_to() -> None:
    study = definition_of(
        {**definition().tree, "study": {"name": "many", "seeds": list(range(6))}},
        definition().source,
    )
    runs = [run("long", arm, s, a) for s in range(6) for arm, a in (("bf16", 0.9), ("mixed", 0.1))]
    table = lost_table(study, list(lost_runs(study, runs)))
    assert table is not None
    assert table.rows[1][-3:] == ["0.002", "0.002", "yes"]
    assert "at least 5 lost runs of 6" in table.note


def test_a_run_that_fell_behind_has_a_line_of_its_own() -> None:
    study, runs = made_up()
    (chart,) = curve_charts(study, runs, {"length": "short"})
    axes = Figure().add_subplot()
    chart.draw(axes)
    assert len(axes.lines) == 2 + 3  # the means, and each lost run


def test_accuracy_on_the_training_set_is_called_so() -> None:
    tree: dict[str, Any] = dict(definition().tree)
    assert accuracy_name(definition()) == "Final held-out accuracy"
    tree["settings"] = {"task": {"eval_split": "train"}}
    on_train = definition_of(tree, definition().source)
    assert accuracy_name(on_train) == "Final accuracy on the training set"
