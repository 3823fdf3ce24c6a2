"""Runs that collapsed or fell behind are counted, and the counts of arms compared exactly."""

from __future__ import annotations

import pytest
from benchmarks.study.analysis import lost_names, lost_runs
from benchmarks.study.definition import Definition, definition_of
from benchmarks.study.results import RunResult
from benchmarks.study.statistics import fisher_p
from benchmarks.study.tables import lost_table, seed_tables, unfinished_table
from tests.study.test_analysis import RISES, definition, run


def test_fishers_test_is_that_of_tables_counted_by_hand() -> None:
    # Fisher's tea: 1 + 16 of 70 tables on each side.
    assert fisher_p(3, 4, 1, 4) == pytest.approx(34 / 70, rel=1e-12)
    # 270, 10 and, on the other side, 120 of C(16, 9) tables.
    assert fisher_p(8, 10, 1, 6) == pytest.approx(400 / 11440, rel=1e-12)
    assert fisher_p(1, 6, 8, 10) == pytest.approx(400 / 11440, rel=1e-12)
    assert fisher_p(5, 5, 5, 5) == 1.0


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
    own = {one.name: one.common.model_copy(update={"mean": 0.9}) for one in runs if one.common}
    in_own = [one.model_copy(update={"own": own[one.name]}) for one in runs]
    assert lost_names(study, in_own) == {"short-mixed-s1": "collapsed"}
    without_reference = [one for one in runs if one.arm == "mixed"]
    assert lost_names(study, without_reference) == {"short-mixed-s1": "collapsed"}


def test_the_tables_say_which_runs_were_lost_and_what_that_shows() -> None:
    study, runs = made_up()
    table = lost_table(study, list(lost_runs(study, runs)))
    assert table is not None
    assert "more than 10 points below the median of bf16" in table.note
    reference, mixed = table.rows
    assert list(reference) == ["short", "bf16", "3", "0", "1", "33.33% [0.84, 90.57]", *"--"]
    assert list(mixed) == [
        *("short", "mixed", "3", "1", "1", "66.67% [9.43, 99.16]", "1.000", "1.000")
    ]
    (seeds,) = seed_tables(study, runs, lost_names(study, runs))
    assert [list(row) for row in seeds.rows] == [
        ["bf16", "94.0%", "90.0%", "60.0%, behind"],
        ["mixed", "57.0%, behind", "93.0%, collapsed", "80.1%"],
    ]


def test_a_run_without_a_gradient_is_named_with_what_to_do() -> None:
    norms = {"a": [0.0, 0.0], "b": [0.0, 0.1]}
    runs = [
        run("short", arm, 0, 0.0, [0.0, 0.0], curves={"policy/grad_norm": norm})
        for arm, norm in norms.items()
    ]
    table = unfinished_table([*runs, run("short", "c", 0, 0.0)], {})
    assert table is not None
    ((name, end, message),) = table.rows
    assert (name, end) == ("short-a-s0", "finished")
    assert message.startswith("learned nothing: in every group all rewards were equal; take a task")
