"""The runs that an arm lost: those that collapsed, and those that ended far behind the others.

The rule of collapse looks at a run's own curve and asks how far it fell. A run that stops learning
half way, or falls and comes back a part of the way, is none by it. So a second rule looks at where
a run ended: it fell behind if its final held-out accuracy is more than `collapse.behind` below the
median of the reference arm's runs at the same grid point. Runs of the reference arm are judged by
the same median. A run that collapsed is not counted as behind as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from benchmarks.study.analysis import (
    ALL_POINTS,
    common_accuracy,
    has_collapsed,
    point_name,
    runs_of,
)
from benchmarks.study.counts import fisher_p, runs_needed
from benchmarks.study.definition import Definition
from benchmarks.study.plan import grid_points
from benchmarks.study.results import RunResult
from benchmarks.study.statistics import Interval, adjusted, share_interval

Loss = Literal["collapsed", "behind"]


@dataclass(frozen=True)
class LostRuns:
    """The count of an arm's lost runs at a grid point, compared with the reference arm's.

    Attributes:
        point: The name of the grid point.
        arm: The arm.
        num_runs: The number of its runs.
        num_collapsed: The number of runs that collapsed.
        num_behind: The number of runs that fell behind.
        share: The share of both, with its exact interval.
        p: The two-sided p-value of Fisher's exact test that the reference arm loses as many; NaN
            for the reference arm and where that has no run.
        adjusted_p: The same, adjusted for the number of arms (Holm).
        runs_needed: The runs an arm that would show the seen shares, were they the true ones, four
            times of five; None where the arm lost no larger share, or too many would be needed.
    """

    point: str
    arm: str
    num_runs: int
    num_collapsed: int
    num_behind: int
    share: Interval
    p: float = math.nan
    adjusted_p: float = math.nan
    runs_needed: int | None = None

    @property
    def num_lost(self) -> int:
        """The number of runs that collapsed or fell behind."""
        return self.num_collapsed + self.num_behind


def lost_names(definition: Definition, runs: Sequence[RunResult]) -> dict[str, Loss]:
    """Return the names of the runs that were lost, each with the rule that found it.

    Args:
        definition: The definition of the study.
        runs: Its runs.
    """
    lost: dict[str, Loss] = {}
    for point in grid_points(definition):
        references = map(common_accuracy, runs_of(runs, point, definition.reference))
        known = [value for value in references if value is not None]
        bound = median(known) - definition.collapse.behind if known else -math.inf
        for arm in definition.arms:
            for run in runs_of(runs, point, arm):
                accuracy = common_accuracy(run)
                if has_collapsed(run, definition.collapse):
                    lost[run.name] = "collapsed"
                elif accuracy is not None and accuracy < bound:
                    lost[run.name] = "behind"
    return lost


def lost_runs(definition: Definition, runs: Sequence[RunResult]) -> Iterator[LostRuns]:
    """Yield the lost runs of each arm at each grid point, and at all points if there are several.

    Args:
        definition: The definition of the study.
        runs: Its runs.
    """
    lost = lost_names(definition, runs)
    points = list(grid_points(definition))
    for point in points:
        of_arm = {arm: runs_of(runs, point, arm) for arm in definition.arms}
        yield from _compared(definition, point_name(point), of_arm, lost)
    if sum(any(run.point == point for run in runs) for point in points) > 1:
        of_arm = {arm: [run for run in runs if run.arm == arm] for arm in definition.arms}
        yield from _compared(definition, ALL_POINTS, of_arm, lost)


def _compared(
    definition: Definition,
    point: str,
    of_arm: Mapping[str, Sequence[RunResult]],
    lost: Mapping[str, Loss],
) -> Iterator[LostRuns]:
    """Yield the lost runs of each arm that has runs, compared with the reference arm's."""
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
        needed = runs_needed(one.share.mean, reference.share.mean, level)
        yield replace(one, p=p, adjusted_p=holm, runs_needed=needed)


def _counted(
    point: str, arm: str, runs: Sequence[RunResult], lost: Mapping[str, Loss], level: float
) -> LostRuns:
    """Return the count of an arm's lost runs, at least one run, without a comparison."""
    found = [lost[run.name] for run in runs if run.name in lost]
    share = share_interval(len(found), len(runs), level)
    return LostRuns(point, arm, len(runs), found.count("collapsed"), found.count("behind"), share)
