"""The numbers of a study's report: accuracies, paired differences, lost runs and twins."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Literal

from benchmarks.study.definition import CollapseSection, Definition
from benchmarks.study.plan import grid_points
from benchmarks.study.results import RunResult
from benchmarks.study.statistics import (
    Comparison,
    Interval,
    adjusted,
    compare,
    fisher_p,
    mean_interval,
    share_interval,
)

ALL_POINTS = "all points"
GRADIENT = "policy/grad_norm"
Accuracy = Callable[[RunResult], float | None]


@dataclass(frozen=True)
class ArmComparison:
    """The paired differences of an arm from the reference arm.

    Attributes:
        tests: The mean difference with its interval, and the tests.
        adjusted_t_p: The p-value of the t test, adjusted for the number of arms (Holm).
        adjusted_rank_p: The same for the signed-rank test.
    """

    tests: Comparison
    adjusted_t_p: float
    adjusted_rank_p: float


@dataclass(frozen=True)
class ArmResult:
    """The results of an arm at a grid point.

    Attributes:
        common: The held-out accuracy in the study's precision, over seeds, if any.
        own: The held-out accuracy in the arm's own precision, over seeds, if any.
        comparison: The paired differences of `common` from the reference arm; None for the
            reference arm, and if no seed has both.
        own_comparison: The same for `own`.
        collapsed: The share of collapsed runs with its interval; None without runs.
        without_weights: The number of runs without weights to evaluate.
    """

    point: str
    arm: str
    common: Interval | None
    own: Interval | None
    comparison: ArmComparison | None
    own_comparison: ArmComparison | None
    collapsed: Interval | None
    num_collapsed: int
    without_weights: int


@dataclass(frozen=True)
class TwinGroup:
    """Runs whose final weights must be bitwise equal.

    Attributes:
        name: The names of the grid point and the group, and the seed.
        digests: The SHA-256 of the final weights, by arm.
        learnt: Whether any run had a gradient; without one, equal weights prove nothing.
    """

    name: str
    digests: Mapping[str, str]
    attempts: Mapping[str, int]
    learnt: bool

    @property
    def equal(self) -> bool:
        """True if all runs have weights, and they are equal."""
        return len(set(self.digests.values())) == 1 and all(self.digests.values())


def point_name(point: Mapping[str, str]) -> str:
    """Return the name of a grid point: its values, or "" for a study without a grid."""
    return ", ".join(point.values())


def common_accuracy(run: RunResult) -> float | None:
    """Return the held-out accuracy of a run in the study's precision; None without weights."""
    return None if run.common is None else run.common.mean


def own_accuracy(run: RunResult) -> float | None:
    """Return the held-out accuracy of a run in its own precision; None without."""
    return None if run.own is None else run.own.mean


def evaluation_of(runs: Iterable[RunResult]) -> Literal["own", "common"]:
    """Return the final evaluation to compare runs by: in own precision if all have one."""
    return "own" if all(run.own or not run.common for run in runs) else "common"


def runs_of(runs: Sequence[RunResult], point: Mapping[str, str], arm: str) -> list[RunResult]:
    """Return the runs of an arm at a grid point, by seed."""
    own = [run for run in runs if run.point == dict(point) and run.arm == arm]
    return sorted(own, key=lambda run: run.seed)


def arm_results(definition: Definition, runs: Sequence[RunResult]) -> list[ArmResult]:
    """Return the results of each arm at each grid point, and over all points if there are several.

    Over all points, the value of a seed is its mean over the points with runs; only seeds with all
    of these points count. Without such a seed of the reference arm there are no overall results.
    """
    points = list(grid_points(definition))
    results = []
    for point in points:
        chosen = {arm: runs_of(runs, point, arm) for arm in definition.arms}
        results += _results_at(definition, point_name(point), chosen, 1)
    begun = sum(any(run.point == point for run in runs) for point in points)
    chosen = {arm: [run for run in runs if run.arm == arm] for arm in definition.arms}
    if begun > 1 and by_seed(chosen[definition.reference], common_accuracy, begun):
        results += _results_at(definition, ALL_POINTS, chosen, begun)
    return results


def _results_at(
    definition: Definition, point: str, runs: Mapping[str, Sequence[RunResult]], num_points: int
) -> list[ArmResult]:
    """Return the results of each arm from its runs at one grid point, or at all points."""
    level = definition.study.level
    common = {arm: by_seed(of_arm, common_accuracy, num_points) for arm, of_arm in runs.items()}
    own = {arm: by_seed(of_arm, own_accuracy, num_points) for arm, of_arm in runs.items()}
    comparisons, own_comparisons = (_compared(definition, values) for values in (common, own))
    results = []
    for arm, of_arm in runs.items():
        fallen = sum(has_collapsed(run, definition.collapse) for run in of_arm)
        results.append(
            ArmResult(
                point=point,
                arm=arm,
                common=_interval(common[arm], level),
                own=_interval(own[arm], level),
                comparison=comparisons.get(arm),
                own_comparison=own_comparisons.get(arm),
                collapsed=share_interval(fallen, len(of_arm), level) if of_arm else None,
                num_collapsed=fallen,
                without_weights=sum(run.common is None for run in of_arm),
            )
        )
    return results


def _compared(
    definition: Definition, values: Mapping[str, Mapping[int, float]]
) -> dict[str, ArmComparison]:
    """Return the comparison of each arm with the reference arm, if a seed has both."""
    reference = values[definition.reference]
    tests: dict[str, Comparison] = {}
    for arm, of_arm in values.items():
        differences = [
            of_arm[seed] - reference[seed] for seed in sorted(of_arm) if seed in reference
        ]
        if differences and arm != definition.reference:
            tests[arm] = compare(differences, definition.study.margin, definition.study.level)
    by_t = adjusted([test.t_p for test in tests.values()])
    by_rank = adjusted([test.rank_p for test in tests.values()])
    return {
        arm: ArmComparison(test, t_p, rank_p)
        for (arm, test), t_p, rank_p in zip(tests.items(), by_t, by_rank, strict=True)
    }


def by_seed(runs: Sequence[RunResult], accuracy: Accuracy, num_points: int = 1) -> dict[int, float]:
    """Return the mean accuracy over grid points of each seed that has all of them."""
    values: dict[int, list[float]] = {}
    for run in runs:
        value = accuracy(run)
        if value is not None:
            values.setdefault(run.seed, []).append(value)
    return {seed: fmean(own) for seed, own in values.items() if len(own) == num_points}


def _interval(values: Mapping[int, float], level: float) -> Interval | None:
    return mean_interval(list(values.values()), level) if values else None


def has_collapsed(run: RunResult, rule: CollapseSection) -> bool:
    """Return whether a run has collapsed by the rule of the study, applied to its stored curve."""
    if run.end == "nonfinite":
        return True
    kept = [value for value in run.curves.values.get(rule.metric, []) if value is not None]
    length = max(1, round(rule.window * len(kept)))
    if len(kept) < 2 * length:
        return False
    means = [fmean(kept[i : i + length]) for i in range(len(kept) - length + 1)]
    highest = max(means)
    return highest >= rule.least and means[-1] < rule.share * highest


def mean_of_curve(run: RunResult, metric: str) -> float | None:
    """Return the mean of a metric over a run; None if it has none."""
    kept = [value for value in run.curves.values.get(metric, []) if value is not None]
    return fmean(kept) if kept else None


def twin_groups(definition: Definition, runs: Sequence[RunResult]) -> Iterator[TwinGroup]:
    """Yield the groups of two or more runs whose final weights must be equal."""
    marks = dict.fromkeys(arm.twin for arm in definition.arms.values() if arm.twin)
    for mark in marks:
        arms = [name for name, arm in definition.arms.items() if arm.twin == mark]
        for point in grid_points(definition):
            for seed in definition.study.seeds:
                members = [
                    run for arm in arms for run in runs_of(runs, point, arm) if run.seed == seed
                ]
                if len(members) > 1:
                    words = [point_name(point), mark if isinstance(mark, str) else ""]
                    yield TwinGroup(
                        ", ".join([*filter(None, words), f"seed {seed}"]),
                        {run.arm: run.weights_sha256 for run in members},
                        {run.arm: run.attempts for run in members},
                        any(any(run.curves.values.get(GRADIENT, ())) for run in members),
                    )


def learned_nothing(run: RunResult) -> bool:
    """Return whether no step of a run had a gradient, as with equal rewards in every group."""
    norms = run.curves.values.get(GRADIENT, ())
    return len(norms) > 0 and not any(norms)


NOTHING_LEARNED = (
    "learned nothing: in every group all rewards were equal; take a task that the start solves "
    "sometimes, or train the start longer (sft.steps)"
)
Loss = Literal["collapsed", "behind"]


@dataclass(frozen=True)
class LostRuns:
    """The count of an arm's lost runs at a grid point, compared with the reference arm's.

    Attributes:
        p: The two-sided p-value of Fisher's exact test that the reference arm has the same rate of
            losses; NaN for the reference arm and if that has no run.
        adjusted_p: The same, adjusted for the number of arms (Holm).
    """

    point: str
    arm: str
    num_runs: int
    num_collapsed: int
    num_behind: int
    share: Interval
    p: float = math.nan
    adjusted_p: float = math.nan

    @property
    def num_lost(self) -> int:
        """The number of runs that collapsed or fell behind."""
        return self.num_collapsed + self.num_behind


def lost_names(definition: Definition, runs: Sequence[RunResult]) -> dict[str, Loss]:
    """Return the names of lost runs, each with the rule that applies."""
    lost: dict[str, Loss] = {}
    for point in grid_points(definition):
        here = [run for run in runs if run.point == dict(point)]
        accuracy_of = own_accuracy if evaluation_of(here) == "own" else common_accuracy
        references = map(accuracy_of, runs_of(runs, point, definition.reference))
        known = [value for value in references if value is not None]
        bound = median(known) - definition.collapse.behind if known else -math.inf
        for arm in definition.arms:
            for run in runs_of(runs, point, arm):
                accuracy = accuracy_of(run)
                if has_collapsed(run, definition.collapse):
                    lost[run.name] = "collapsed"
                elif accuracy is not None and accuracy < bound:
                    lost[run.name] = "behind"
    return lost


def lost_runs(definition: Definition, runs: Sequence[RunResult]) -> Iterator[LostRuns]:
    """Yield the lost runs of each arm at each grid point, and over all points."""
    lost = lost_names(definition, runs)
    points = list(grid_points(definition))
    for point in points:
        of_arm = {arm: runs_of(runs, point, arm) for arm in definition.arms}
        yield from _lost_compared(definition, point_name(point), of_arm, lost)
    if sum(any(run.point == point for run in runs) for point in points) > 1:
        of_arm = {arm: [run for run in runs if run.arm == arm] for arm in definition.arms}
        yield from _lost_compared(definition, ALL_POINTS, of_arm, lost)


def _lost_compared(
    definition: Definition,
    point: str,
    of_arm: Mapping[str, Sequence[RunResult]],
    lost: Mapping[str, Loss],
) -> Iterator[LostRuns]:
    """Yield the lost runs of each arm, compared with the reference arm's."""
    level = definition.study.level
    counts = {arm: _counted(point, arm, runs, lost, level) for arm, runs in of_arm.items() if runs}
    reference = counts.get(definition.reference)
    if reference is None:
        yield from counts.values()
        return
    others = [count for arm, count in counts.items() if arm != definition.reference]
    p_values = [
        fisher_p(one.num_lost, one.num_runs, reference.num_lost, reference.num_runs)
        for one in others
    ]
    yield reference
    for one, p, holm in zip(others, p_values, adjusted(p_values), strict=True):
        yield replace(one, p=p, adjusted_p=holm)


def _counted(
    point: str, arm: str, runs: Sequence[RunResult], lost: Mapping[str, Loss], level: float
) -> LostRuns:
    """Return the lost runs of an arm with at least one run, without a comparison."""
    found = [lost[run.name] for run in runs if run.name in lost]
    share = share_interval(len(found), len(runs), level)
    return LostRuns(point, arm, len(runs), found.count("collapsed"), found.count("behind"), share)
