"""Accuracies, differences, collapses, doses and twins of results that are made up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.study.analysis import ALL_POINTS, arm_results, has_collapsed, twin_groups
from benchmarks.study.charts import curve_charts, dose_charts
from benchmarks.study.definition import CollapseSection, Definition, definition_of
from benchmarks.study.results import Curves, FinalEvaluation, Results, RunResult, read_results
from benchmarks.study.tables import accuracy_tables, twin_table
from matplotlib.figure import Figure

from jetrl.errors import UserError


def definition(**arms: dict[str, Any]) -> Definition:
    """A study of three seeds at two points."""
    tree = {
        "study": {"name": "made-up", "seeds": [0, 1, 2], "margin": 0.02},
        "grid": {"length": {"short": {}, "long": {}}},
        "arms": arms or {"bf16": {}, "mixed": {}},
    }
    return definition_of(tree, Path("made-up.toml"))


def run(
    point: str,
    arm: str,
    seed: int,
    accuracy: float | None,
    rewards: Sequence[float | None] = (),
    **more: Any,
) -> RunResult:
    """A result with an accuracy and a curve of rewards."""
    common = None
    if accuracy is not None:
        common = FinalEvaluation(
            preset="bf16",
            mean=accuracy,
            solved=accuracy,
            prompts=10,
            samples=1,
            response_length=5.0,
            clip_ratio=0.0,
        )
    values = {"reward/mean": list(rewards), **more.pop("curves", {})}
    curves = Curves(steps=list(range(1, 1 + len(rewards))), values=values)
    return RunResult(
        name=f"{point}-{arm}-s{seed}",
        point={"length": point},
        arm=arm,
        seed=seed,
        digest="0",
        end=more.pop("end", "finished"),
        steps=10,
        common=common,
        curves=curves,
        **more,
    )


def test_differences_are_paired_by_seed() -> None:
    """Seeds spread by 20 points and arms by 1: pairs show it; a seed without both is left out."""
    runs = [run("short", "bf16", s, a) for s, a in [(0, 0.5), (1, 0.6), (2, 0.7)]]
    runs += [run("short", "mixed", s, a) for s, a in [(0, 0.49), (1, 0.591)]]
    results = {(r.point, r.arm): r for r in arm_results(definition(), runs)}
    mixed = results["short", "mixed"]
    assert results["short", "bf16"].comparison is None
    assert mixed.comparison is not None
    assert mixed.comparison.tests.difference.mean == pytest.approx(-0.0095)
    assert mixed.comparison.tests.difference.n == 2
    assert mixed.comparison.tests.t_p == pytest.approx(2 * (0.5 - math.atan(19) / math.pi))
    assert results["long", "mixed"].common is None


def test_arms_are_compared_in_their_own_precision_too() -> None:
    """Equal under the study's precision, and one point apart in each one's own."""
    runs = []
    for seed, accuracy in enumerate((0.5, 0.6, 0.7)):
        for arm, own in (("bf16", accuracy), ("mixed", accuracy - 0.01)):
            made = run("short", arm, seed, accuracy)
            assert made.common is not None
            in_own = made.common.model_copy(update={"preset": arm, "mean": own})
            runs.append(made.model_copy(update={"own": in_own}))
    results = {r.arm: r for r in arm_results(definition(), runs) if r.point == "short"}
    common, own = results["mixed"].comparison, results["mixed"].own_comparison
    assert common is not None
    assert own is not None
    assert (common.tests.difference.mean, common.tests.rank_p) == (0.0, 1.0)
    assert own.tests.difference.mean == pytest.approx(-0.01)
    assert own.tests.rank_p == own.adjusted_rank_p == 2 / 8
    tables = [t for t in accuracy_tables(definition(), arm_results(definition(), runs)) if t.rows]
    assert [len(t.rows) for t in tables if t.title.endswith("in its own precision")] == [2]


def test_over_all_points_a_seed_counts_once() -> None:
    runs = [run("short", "bf16", s, 0.5) for s in range(3)]
    runs += [run("long", "bf16", s, 0.3) for s in range(3)]
    runs += [run("short", "mixed", s, 0.5 - 0.01 * s) for s in range(3)]
    runs += [run("long", "mixed", s, 0.3 - 0.03 * s) for s in range(2)]  # seed 2 is missing
    every = {r.arm: r for r in arm_results(definition(), runs) if r.point == ALL_POINTS}
    assert every["bf16"].common is not None
    assert (every["bf16"].common.mean, every["bf16"].common.n) == (pytest.approx(0.4), 3)
    assert every["mixed"].comparison is not None
    difference = every["mixed"].comparison.tests.difference
    assert (difference.mean, difference.n) == (pytest.approx(-0.01), 2)


def test_a_run_without_weights_is_counted_and_not_averaged() -> None:
    runs = [run("short", "mixed", 0, 0.5), run("short", "mixed", 1, None, end="nonfinite")]
    mixed = next(r for r in arm_results(definition(), runs) if r.arm == "mixed")
    assert mixed.common is not None
    assert (mixed.common.n, mixed.without_weights, mixed.num_collapsed) == (1, 1, 1)
    assert mixed.collapsed is not None
    assert mixed.collapsed.mean == 0.5


RISES = [0.1 * n for n in range(1, 11)]


@pytest.mark.parametrize(
    ("rewards", "collapsed"),
    [
        (RISES, False),
        ([*RISES[:-1], 0.44], True),  # below half of 0.9
        ([*RISES[:-1], 0.46], False),
        ([0.04] * 9 + [0.0], False),  # it never learnt
        ([0.9] * 5 + [0.1] * 4 + [0.8], False),  # it recovered
        ([], False),
        ([0.9], False),
        ([0.9, None, 0.1], True),  # a step without a finite mean is left out
    ],
)
def test_the_rule_of_collapse(rewards: list[float | None], collapsed: bool) -> None:
    assert has_collapsed(run("short", "x", 0, 0.5, rewards), CollapseSection()) is collapsed


def test_twins_are_compared_within_their_group_point_and_seed() -> None:
    arms = definition(a={"twin": "x"}, b={"twin": "x"}, c={"twin": "y"}, d={"twin": "y"}, e={})
    shas = {"a": "1", "b": "1", "c": "2", "d": "3", "e": "4"}
    runs = [run("long", arm, 1, 0.5, weights_sha256=sha) for arm, sha in shas.items()]
    runs += [run("short", "a", 1, 0.5, weights_sha256="7")]  # alone at its point
    groups = {group.name: group for group in twin_groups(arms, runs)}
    assert {name: group.equal for name, group in groups.items()} == {
        "long, x, seed 1": True,
        "long, y, seed 1": False,
    }
    without = [run("long", arm, 1, 0.5, weights_sha256="") for arm in "ab"]
    assert not next(twin_groups(arms, without)).equal


@pytest.mark.parametrize(("norms", "learnt"), [([0.0, 0.0], False), ([0.0, 0.3], True)])
def test_equal_twins_that_had_no_gradient_show_nothing(norms: list[float], learnt: bool) -> None:
    study = definition(a={"twin": True}, b={"twin": True})
    curves = {"policy/grad_norm": norms}
    runs = [run("long", arm, 1, 0.5, curves=curves, weights_sha256="1") for arm in "ab"]
    groups = list(twin_groups(study, runs))
    assert [group.learnt for group in groups] == [learnt]
    table = twin_table(study, groups)
    assert table is not None
    words = "equal" if learnt else "equal, but no run had a gradient: this shows nothing"
    assert table.rows[0][1] == words


def test_an_arm_whose_mismatch_is_zero_is_named_and_not_drawn() -> None:
    kl = "mismatch/k3_kl"
    runs = [
        run("short", "bf16", 0, 0.5, RISES, curves={kl: [0.0] * 10}),
        run("short", "mixed", 0, 0.5, RISES, curves={kl: [1e-4] * 9 + [None]}),
    ]
    charts = {c.key: c for c in curve_charts(definition(), runs, {"length": "short"})}
    assert set(charts) == {"short-reward", "short-k3_kl"}
    assert charts["short-k3_kl"].caption == (
        "at the end: mixed 0.0001; exactly 0 throughout, not drawn: bf16"
    )


def test_doses_have_plots_only_where_arms_have_doses() -> None:
    kl = {"mismatch/k3_kl": [1e-4]}
    runs = [run("short", arm, 0, 0.5, [0.5], curves=kl) for arm in ("none", "some")]
    assert dose_charts(definition(none={}, some={}), runs) == []
    doses = dose_charts(definition(none={"dose": 0}, some={"dose": 0.5}), runs)
    assert [chart.key for chart in doses] == ["dose-accuracy", "dose-lost"]


def test_an_arm_that_deviates_without_a_dose_has_a_mark_beside_the_line() -> None:
    arms = {"none": 0.0, "some": 1e-3, "other": 1e-2, "exact": 0.0}
    runs = [
        run("short", arm, 0, 0.5, [0.5], curves={"mismatch/k3_kl": [kl]})
        for arm, kl in arms.items()
    ]
    doses = {"none": {"dose": 0}, "some": {"dose": 0.5}}
    accuracy, _ = dose_charts(definition(**doses, other={}, exact={}), runs)
    axes = Figure().add_subplot()
    accuracy.draw(axes)
    (line,) = [line for line in axes.lines if line.get_marker() == "D"]
    (mark,) = [line for line in axes.lines if line.get_marker() == "s" and len(line.get_xdata())]
    assert list(line.get_xdata()) == [1e-4, 1e-3]  # no mismatch stands a power of ten below
    assert list(mark.get_xdata()) == [1e-2]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["short", "other"]


def test_a_json_file_that_is_no_results_is_named(tmp_path: Path) -> None:
    (tmp_path / "demo.json").write_text('{"rows": []}')
    with pytest.raises(UserError, match=r"demo\.json: .*is missing; .* no results of a study"):
        read_results(tmp_path / "demo.json")


def test_results_are_read_back_as_they_were(tmp_path: Path) -> None:
    study = definition()
    results = Results(tmp_path / "deep" / "results.json", "made-up.toml", study.tree)
    first, second = run("short", "bf16", 0, 0.5, RISES), run("long", "bf16", 0, None, [None])
    results.failed["short-mixed-s0"] = "no memory"
    results.add(first, "CPU")
    results.add(second, "CPU")
    read = read_results(results.path)
    assert read.runs == {first.name: first, second.name: second}
    assert (read.devices, read.failed) == (["CPU"], {"short-mixed-s0": "no memory"})
    assert read.definition == study.tree
    lines = results.path.read_text().splitlines()
    assert sum(line.startswith('  {"name":') for line in lines) == 2, "a run a line"
    assert '"command": "jetrl study made-up.toml"' in results.path.read_text()


def test_arms_that_learnt_nothing_are_not_called_equivalent() -> None:
    runs = [run("short", arm, s, 0.0) for arm in ("bf16", "mixed") for s in range(3)]
    (table,) = accuracy_tables(definition(), arm_results(definition(), runs))
    assert table.rows[1][-2] == "not shown (nothing was learnt)"
