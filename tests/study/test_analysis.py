"""Accuracies, differences, collapses and twins of results that are made up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.study.analysis import ALL_POINTS, arm_results, has_collapsed, twin_groups
from benchmarks.study.definition import CollapseSection, Definition, definition_of
from benchmarks.study.report import known_runs, method
from benchmarks.study.results import Curves, FinalEvaluation, Results, RunResult, read_results

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


def test_results_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = definition()
    results = Results(tmp_path / "deep" / "results.json", "made-up.toml", study.tree)
    first, second = run("short", "bf16", 0, 0.5, RISES), run("long", "bf16", 0, None, [None])
    results.failed["short-mixed-s0"] = "no memory"
    monkeypatch.setenv("JETRL_COMMIT", "1234abcd")
    results.add(first, "CPU")
    results.add(second, "CPU")
    read = read_results(results.path)
    assert read.runs == {first.name: first, second.name: second}
    assert (read.devices, read.commits, read.failed) == (["CPU"], ["1234abcd"], results.failed)
    assert read.definition == study.tree
    lines = results.path.read_text().splitlines()
    assert sum(line.startswith('  {"name":') for line in lines) == 2, "a run a line"
    assert '"command": "jetrl study made-up.toml"' in results.path.read_text()
    results.path.write_text("\n".join([*lines[:-3], lines[-3] + ",", *lines[-3:]]))
    with pytest.raises(UserError, match="seed 0 of bf16 at one point, long-bf16-s0 and long"):
        read_results(results.path)
    results.path.write_text("\n".join(lines).replace('"steps":[1]', '"steps":[1,2]'))
    with pytest.raises(UserError, match="reward/mean has 1 values, and steps has 2"):
        read_results(results.path)


def test_a_seed_that_was_taken_out_does_not_count() -> None:
    runs = [run("short", "bf16", seed, 0.5) for seed in (0, 2, 3)]
    assert [one.seed for one in known_runs(definition(), runs)] == [0, 2]


def test_the_report_names_the_prompts_that_were_evaluated() -> None:
    assert "1 completions of each of 10 held-out prompts" in method(
        definition(), [run("short", "bf16", 0, 0.5)]
    ).pop(0)
